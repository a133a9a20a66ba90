"""Whether drafts part ways, and how: decided from the user's wishes and from what drafts."""

from __future__ import annotations

from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, USER
from thalweg.core.tree import CHAIN, MAX_TREE_NODES, TreeShape
from thalweg.launch.decisions import Decisions

NODES = 15  # drafts where nobody says how many: with the root as many tokens as a tile of the kernels has rows
CHAINS = ("NGRAM",)  # drafters that know of one way only


def resolve_tree(wish: SpeculativeOptions, drafter: str, deepest: int, decisions: Decisions) -> TreeShape:
    """drafter: the resolved algorithm; deepest: drafts one behind the other. Raises UnsupportedConfig for what cannot
    branch, and for more nodes than such a tree has.
    """
    branches, nodes = wish.speculative_eagle_topk, wish.speculative_num_draft_tokens
    if branches is None or branches == 1:
        if wish.speculative_tree is not None:
            raise UnsupportedConfig(
                f"speculative_tree: {wish.speculative_tree} is a form of trees, and drafts are a chain; leave it out,"
                " or use --speculative-eagle-topk 4"
            )
        return CHAIN
    why = (
        "nothing drafts"
        if drafter == "NONE"
        else "what follows in the text itself is one chain"
        if drafter in CHAINS
        else ""
    )
    if why:
        instead = (
            "--speculative-eagle-topk 1" if drafter != "NONE" else "--speculative-algorithm NEXTN, or leave it out"
        )
        raise UnsupportedConfig(f"speculative_eagle_topk: {branches} ways at each token, but {why}; use {instead}")
    shape = TreeShape(branches, deepest, 0, wish.speculative_tree != "static")
    if shape.dynamic and shape.num_expanded() > MAX_TREE_NODES:
        raise UnsupportedConfig(
            f"speculative_eagle_topk: {branches} ways at each of {deepest} tokens behind each other are grown from"
            f" {shape.num_expanded()} nodes, and {MAX_TREE_NODES} can be; use --speculative-num-steps"
            f" {1 + MAX_TREE_NODES // branches}, or --speculative-tree static"
        )
    if nodes is not None and nodes - 1 > shape.num_candidates():
        raise UnsupportedConfig(
            f"speculative_num_draft_tokens: {nodes}, but {deepest} tokens behind each other with {branches} ways at"
            f" each are a tree of {shape.num_candidates()} at most; use {shape.num_candidates() + 1} or fewer, or more"
            " --speculative-num-steps or --speculative-eagle-topk"
        )
    shape = shape._replace(num_drafts=min(NODES, shape.num_candidates()) if nodes is None else nodes - 1)
    if shape.num_drafts == 1:
        decisions.add("speculative_eagle_topk", 1, AUTO, "one draft is a chain, however many ways there might be")
        return CHAIN._replace(max_depth=1, num_drafts=1)
    decisions.add("speculative_eagle_topk", branches, USER, "")
    why = "as many as a tile of the kernels, or all" if nodes is None else ""
    decisions.add("speculative_num_draft_tokens", shape.num_drafts + 1, AUTO if nodes is None else USER, why)
    form = "dynamic" if shape.dynamic else "static"
    decisions.add(
        "speculative_tree",
        form,
        USER if wish.speculative_tree else AUTO,
        "" if wish.speculative_tree else "it grows where drafts are good",
    )
    return shape
