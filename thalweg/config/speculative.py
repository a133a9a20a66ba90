"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.drafters import DRAFTERS, NO_DRAFTER
from thalweg.config.setting import check_section, setting
from thalweg.core.tree import MAX_TREE_NODES

MAX_STEPS = 8  # drafts of a chain: a layer trained for one step is seldom right after the fourth
MAX_BRANCHES = 10  # children of a token in a tree
RULES = ("race", "standard", "relaxed")
RELAXED_TOPK, RELAXED_DELTA = 10, 0.6  # from TensorRT-LLM's guide for DeepSeek-R1
_SUMMARIES = "; ".join(f"{name}: {entry.summary}" for name, entry in DRAFTERS.items())
_STEPS = ", ".join(f"{name} {entry.steps}" for name, entry in DRAFTERS.items())


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Tokens that are drafted, and verified several in a step. By default the output is that of plain decoding, seed
    for seed.
    """

    speculative_algorithm: str | None = setting(
        None,
        f"what drafts tokens. {_SUMMARIES}; NONE: nothing",
        foreign=("speculative-algo",),
        choices=(*DRAFTERS, NO_DRAFTER),
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
        "most tokens drafted one after the other",
        foreign=("num-speculative-tokens",),
        least=1,
        most=MAX_STEPS,
        auto=_STEPS,
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "tokens verified in a step: one more than are drafted",
        least=2,
        most=MAX_TREE_NODES + 1,
        auto="--speculative-num-steps + 1; for a tree 16",
    )
    speculative_eagle_topk: int | None = setting(
        None, "children of a draft token; more than 1 makes the drafts a tree", least=1, most=MAX_BRANCHES, auto="1"
    )
    speculative_tree: str | None = setting(
        None,
        "dynamic: a tree grows where drafts are likely (EAGLE-2); static: it has the same shape in every step",
        choices=("dynamic", "static"),
        auto="dynamic",
    )
    speculative_acceptance: str | None = setting(
        None,
        "which drafts are accepted. race: those that the model samples itself, so tokens are those of plain decoding,"
        " seed for seed; standard: rejection sampling by min(1, p/q), which accepts more where requests sample, with"
        " the model's distribution but not the same tokens; relaxed, LOSSY: also those nearly as likely as the best"
        " token",
        choices=RULES,
        auto="race",
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
        "most tokens of a step with the checkpoint's next-token layer; 1 is off",
        least=1,
        most=MAX_STEPS + 1,
        auto="--speculative-num-steps + 1",
    )

    def __post_init__(self) -> None:
        check_section(self)
