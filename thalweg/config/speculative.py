"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.drafters import DRAFTERS, NO_DRAFTER
from thalweg.config.setting import Section, setting
from thalweg.core.tree import MAX_TREE_NODES

MAX_STEPS = 8  # drafts of a chain: a layer trained for one step is seldom right after the fourth
MAX_BRANCHES = 10  # children of a token in a tree
RULES = {
    "gumbel-max": "drafts equal to the token that the model samples: tokens are those of plain decoding, seed for seed",
    "rejection-sampling": "with probability min(1, p/q): the same distribution, but other tokens for a seed",
    "relaxed": "LOSSY: also drafts nearly as likely as the best token",
}
RELAXED_TOPK, RELAXED_DELTA = 10, 0.6  # from TensorRT-LLM's guide for DeepSeek-R1
_STEPS = ", ".join(f"{name} {entry.steps}" for name, entry in DRAFTERS.items())


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions(Section):
    """Drafts several tokens and verifies them in one step. By default the tokens are those of plain decoding."""

    speculative_algorithm: str | None = setting(
        None,
        "what drafts tokens",
        foreign=("speculative-algo",),
        choices={name: entry.summary for name, entry in DRAFTERS.items()} | {NO_DRAFTER: "nothing"},
        auto="what the drafter's folder holds, NEXTN where a number of drafts is given, else NONE",
        off=NO_DRAFTER,
        on="NEXTN",
    )
    speculative_draft_model_path: str | None = setting(
        None,
        "folder of the drafter's weights, or org/name on the hub",
        aliases=("speculative-model",),
        foreign=("speculative-draft",),
        metavar="DIR",
        auto="none",
    )
    speculative_adaptive: bool = setting(
        True, "choose the number of drafts of each step by measured times and recent acceptance; off: always all"
    )
    speculative_num_steps: int | None = setting(
        None,
        "longest chain of drafts; of a tree its depth",
        foreign=("num-speculative-tokens",),
        least=1,
        most=MAX_STEPS,
        auto=_STEPS,
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "tokens verified in a step: all drafts and one more",
        least=2,
        most=MAX_TREE_NODES + 1,
        auto="--speculative-num-steps + 1; for a tree 16",
    )
    speculative_eagle_topk: int | None = setting(
        None, "children of a draft token; more than 1 makes the drafts a tree", least=1, most=MAX_BRANCHES, auto="1"
    )
    speculative_tree: str | None = setting(
        None,
        "shape of a draft tree",
        choices={"dynamic": "it grows where drafts are likely (EAGLE-2)", "static": "the same in every step"},
        auto="dynamic",
    )
    index_share_for_mtp_iteration: bool = setting(
        False,
        "for NEXTN with sparse attention (DSA): all steps of a draft attend to the context that the first one selects,"
        " and to the drafts since",
    )
    speculative_acceptance: str | None = setting(
        None,
        "which drafts are accepted",
        choices=RULES,
        auto="gumbel-max",
    )
    speculative_relaxed_topk: int | None = setting(
        None,
        "LOSSY, of the relaxed rule: a draft must be among this many most likely tokens",
        least=1,
        most=64,
        auto=str(RELAXED_TOPK),
    )
    speculative_relaxed_delta: float | None = setting(
        None,
        "LOSSY, of the relaxed rule: how much less likely than the best token a draft may be",
        least=0.0,
        most=1.0,
        auto=str(RELAXED_DELTA),
    )
    speculative_simulate_accept_length: float | None = setting(
        None,
        "BENCHMARKS ONLY: tokens that a verification brings on average, whatever the model says; the text means"
        " nothing",
        aliases=("accept-length",),
        least=1.0,
        auto="what is really accepted",
    )
    allow_simulated_acceptance: bool = setting(
        False, "serve with --speculative-simulate-accept-length all the same: answers mean nothing"
    )
    mtp: int | None = setting(
        None,
        "tokens of a step with NextN, as vLLM's MTP counts them: drafts and one more; 1: no speculation",
        least=1,
        most=MAX_STEPS + 1,
        auto="--speculative-num-steps + 1",
    )
