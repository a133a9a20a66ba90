"""The user's wishes for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.setting import check_section, setting
from thalweg.core.tree import MAX_TREE_NODES

ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NONE")
DEEPEST = 8  # drafts a step: a layer that was trained for one is right in few of those behind the fourth
BRANCHES = 10  # of a tree
RULES = ("race", "standard", "relaxed")
RELAXED_TOPK, RELAXED_DELTA = 10, 0.6  # what TensorRT-LLM's guide for DeepSeek-R1 takes


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Tokens that are drafted, and verified several in a step. By default they are those of plain decoding, seed for
    seed, whatever is drafted.
    """

    speculative_algorithm: str | None = setting(
        None,
        "what drafts tokens. NEXTN: the checkpoint's own next-token layer; EAGLE3, EAGLE: a head from its own folder"
        " (EAGLE without a folder is NEXTN, as other engines call it); STANDALONE: a smaller model from its own folder;"
        " NGRAM: what followed the last tokens when they stood in the sequence before; NONE: nothing",
        foreign=("speculative-algo",),
        choices=ALGORITHMS,
        auto="what the drafter's folder holds, NEXTN where a number of drafts is given, else NONE",
        off="NONE",
        on="NEXTN",
    )
    speculative_draft_model_path: str | None = setting(
        None,
        "folder of the drafter's own weights, or org/name on the hub: an EAGLE head for this model, or a smaller model"
        " with the same vocabulary",
        aliases=("speculative-model",),
        foreign=("speculative-draft",),
        metavar="DIR",
        auto="none",
    )
    speculative_adaptive: bool = setting(
        True,
        "draft as many of these in each step as bring most tokens a second, by measured times and what was accepted"
        " lately; off: always all",
    )
    speculative_num_steps: int | None = setting(
        None,
        "tokens drafted for each step at most, one behind the other",
        foreign=("num-speculative-tokens",),
        least=1,
        most=DEEPEST,
        auto="NEXTN and EAGLE 3, STANDALONE and NGRAM 4",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "tokens verified in a step: one more than are drafted",
        least=2,
        most=MAX_TREE_NODES + 1,
        auto="--speculative-num-steps + 1; of a tree 16",
    )
    speculative_eagle_topk: int | None = setting(
        None,
        "ways in which drafts may go on behind each token: more than 1 makes them a tree, whose path the model chooses",
        least=1,
        most=BRANCHES,
        auto="1",
    )
    speculative_tree: str | None = setting(
        None,
        "dynamic: a tree grows where drafts are good (EAGLE-2); static: it has the same form in every step",
        choices=("dynamic", "static"),
        auto="dynamic",
    )
    speculative_acceptance: str | None = setting(
        None,
        "which drafts are accepted. race: those that the model draws itself, so that tokens are plain decoding's, seed"
        " for seed; standard: by the odds min(1, p/q), which are better where requests sample: tokens are distributed"
        " as the model's, but not those of plain decoding; relaxed, LOSSY: also those nearly as likely as the model's"
        " best token. Only by the race does a seed repeat an answer",
        choices=RULES,
        auto="race",
    )
    speculative_relaxed_topk: int | None = setting(
        None,
        "LOSSY, of the relaxed rule: a draft must be among so many of the model's most likely tokens",
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
        "BENCHMARKS ONLY: tokens that a verification brings on average, whatever the model says of the drafts; what is"
        " written then means nothing. For `thalweg bench one-batch`, `offline` and `speculation`; refused elsewhere",
        aliases=("accept-length",),
        least=1.0,
        auto="what is really accepted",
    )
    allow_simulated_acceptance: bool = setting(
        False, "serve with --speculative-simulate-accept-length all the same: answers mean nothing"
    )
    mtp: int | None = setting(
        None,
        "short for a chain of the checkpoint's own: most tokens of a step; 1 is off",
        least=1,
        most=DEEPEST + 1,
        auto="--speculative-num-steps + 1",
    )

    def __post_init__(self) -> None:
        check_section(self)
