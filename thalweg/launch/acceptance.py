"""Which rule judges drafts: decided from the user's wishes and from how tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thalweg.config.speculative import RELAXED_DELTA, RELAXED_TOPK, SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import USER
from thalweg.launch.decisions import Decisions, source_and_reason

UNSAMPLED = ("NGRAM",)  # drafters whose drafts are no samples
LOSSY = "LOSSY: answers are not distributed as the model's, and greedy ones not the model's own"
SIMULATED = "drafts are accepted by decree, and what is written means nothing"
POINT_MASS = "these drafts are no samples: they are judged by the rule for a point mass, which is the race"
LIST = "several drafts of one position are judged by the multi-draft rule that the race extends to"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rule, relaxed, imposed: as `acceptance`, `relaxed` and `imposed` of `config.engine.EngineConfig`."""

    rule: str = "race"
    relaxed: tuple[int, float] = (RELAXED_TOPK, RELAXED_DELTA)
    imposed: float = 0.0


def refuse_simulated(wish: SpeculativeOptions) -> None:
    """Of what answers somebody. Raises UnsupportedConfig."""
    if wish.speculative_simulate_accept_length is not None and not wish.allow_simulated_acceptance:
        raise UnsupportedConfig(
            f"speculative_simulate_accept_length: {SIMULATED}: it is for `thalweg bench one-batch`, `offline` and"
            " `speculation`; leave it out, or add --allow-simulated-acceptance"
        )


def resolve_acceptance(
    wish: SpeculativeOptions, drafter: str, deepest: int, trees: bool, decisions: Decisions
) -> Acceptance:
    """drafter: its name, "NONE" for none. deepest: drafts one behind the other, at most. trees: whether drafts may part
    ways. Raises UnsupportedConfig for thresholds of another rule than the one that is wished, for a rule beside a
    decree, and for a decree of more tokens than a verification has.
    """
    acceptance, length = _rule(wish, drafter, trees, decisions), wish.speculative_simulate_accept_length
    if drafter == "NONE" or length is None:
        return acceptance
    if length > deepest + 1:
        raise UnsupportedConfig(
            f"speculative_simulate_accept_length: {length:g} tokens of each verification, and {deepest} drafts one"
            f" behind the other bring {deepest + 1} at most; give less, or more --speculative-num-steps"
        )
    if wish.speculative_acceptance not in (None, "race"):
        raise UnsupportedConfig(
            f"speculative_acceptance: {wish.speculative_acceptance} judges no draft where they are accepted by decree;"
            " leave it out, or --speculative-simulate-accept-length"
        )
    decisions.add("speculative_simulate_accept_length", length, USER, f"BENCHMARKS ONLY: {SIMULATED}")
    return replace(acceptance, imposed=length)


def _rule(wish: SpeculativeOptions, drafter: str, trees: bool, decisions: Decisions) -> Acceptance:
    rule, topk, delta = wish.speculative_acceptance, wish.speculative_relaxed_topk, wish.speculative_relaxed_delta
    for name, value in (("speculative_relaxed_topk", topk), ("speculative_relaxed_delta", delta)):
        if value is not None and rule != "relaxed":
            raise UnsupportedConfig(
                f"{name}: a threshold of the lossy rule, and drafts are judged by {rule or 'the race'}; leave it out,"
                " or use --speculative-acceptance relaxed"
            )
    if drafter == "NONE":
        return Acceptance()
    if rule == "relaxed":
        relaxed = (topk or RELAXED_TOPK, RELAXED_DELTA if delta is None else delta)
        decisions.add(
            "speculative_acceptance",
            rule,
            USER,
            f"{LOSSY}; drafts of the {relaxed[0]} most likely tokens that are at most {relaxed[1]:g} less likely than"
            " the first",
        )
        return Acceptance(rule, relaxed)
    if rule == "standard":
        why = LIST if trees else POINT_MASS if drafter in UNSAMPLED else ""
        decisions.add("speculative_acceptance", rule, USER, why)
        return Acceptance("race" if why else rule)
    decisions.add(
        "speculative_acceptance",
        "race",
        *source_and_reason(rule is not None, "tokens are plain decoding's, seed for seed"),
    )
    return Acceptance()
