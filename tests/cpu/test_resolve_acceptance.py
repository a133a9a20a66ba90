"""Which acceptance rule is used, by options and by the kind of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from thalweg.config.args import options_parser, parse_options
from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import Decision
from thalweg.launch.decisions import Decisions
from thalweg.launch.speculation import refuse_simulated, resolve_drafting


@dataclass
class Facts:
    nextn: int = 1


@dataclass
class Acceptance:
    rule: str = "gumbel-max"
    relaxed: tuple[int, float] = (10, 0.6)
    imposed: float = 0.0


def decided(drafter: str = "NEXTN", trees: bool = False, **wishes: Any) -> tuple[Acceptance, list[Decision]]:
    """With 3 drafts. The decisions are those about acceptance."""
    decisions, facts = Decisions(), cast(Any, Facts())
    steps = {} if drafter == "NONE" else {"speculative_num_steps": 3}
    shape = {"speculative_eagle_topk": 2} if trees else {}
    resolve_drafting(SpeculativeOptions(speculative_algorithm=drafter, **steps, **shape, **wishes), facts, decisions)
    made = decisions.config()
    relaxed = made.speculative_relaxed_topk, made.speculative_relaxed_delta
    acceptance = Acceptance(made.speculative_acceptance, relaxed, made.speculative_simulate_accept_length)
    names = ("speculative_acceptance", "speculative_simulate_accept_length")
    effective = [one for one in decisions.entries if one.name in names and "without effect" not in one.reason]
    return acceptance, effective


def test_default_acceptance_is_coupled_sampling() -> None:
    acceptance, (noted,) = decided()
    assert (acceptance.rule, noted.value, noted.source) == ("gumbel-max", "gumbel-max", "auto")
    assert decided("NONE", speculative_acceptance="rejection-sampling") == (Acceptance(), []), "nothing drafts"


def test_standard_acceptance_needs_sampled_drafts() -> None:
    assert decided(speculative_acceptance="rejection-sampling")[0].rule == "rejection-sampling"
    acceptance, (noted,) = decided("NGRAM", speculative_acceptance="rejection-sampling")
    assert acceptance.rule == "gumbel-max" and noted.value == "rejection-sampling" and "no samples" in noted.reason
    acceptance, (noted,) = decided(trees=True, speculative_acceptance="rejection-sampling")
    assert acceptance.rule == "gumbel-max" and noted.value == "rejection-sampling" and "multi-draft" in noted.reason


@pytest.mark.parametrize(
    ("wishes", "relaxed"),
    [
        ({}, (10, 0.6)),
        ({"speculative_relaxed_topk": 3}, (3, 0.6)),
        ({"speculative_relaxed_delta": 0.0}, (10, 0.0)),
    ],
)
def test_relaxed_acceptance_is_reported_as_lossy(wishes: dict[str, Any], relaxed: tuple[int, float]) -> None:
    acceptance, (noted,) = decided(speculative_acceptance="relaxed", **wishes)
    assert acceptance == Acceptance("relaxed", relaxed)
    assert noted.value == "relaxed" and noted.reason.startswith("LOSSY")
    said = options_parser("t", "t").format_help()
    assert said.count("LOSSY") >= 3


def test_simulated_acceptance_is_for_benchmarks_only() -> None:
    length = {"speculative_simulate_accept_length": 2.5}
    acceptance, (rule, noted) = decided(**length)
    assert acceptance == Acceptance(imposed=2.5) and rule.value == "gumbel-max"
    assert (noted.name, noted.value) == ("speculative_simulate_accept_length", 2.5) and "means nothing" in noted.reason
    assert decided("NONE", **length) == (Acceptance(), [])
    assert decided(speculative_simulate_accept_length=4.0)[0].imposed == 4, "as many as there can be"
    with pytest.raises(UnsupportedConfig, match="thalweg bench.*--allow-simulated-acceptance"):
        refuse_simulated(SpeculativeOptions(**length))
    for wish in (SpeculativeOptions(), SpeculativeOptions(**length, allow_simulated_acceptance=True)):
        refuse_simulated(wish)
    with pytest.raises(UnsupportedConfig, match="at least 1"):
        SpeculativeOptions(speculative_simulate_accept_length=0.5)
    parsed = parse_options(options_parser("t", "t"), ["m", "--accept-length", "3"])
    assert parsed.options.speculative.speculative_simulate_accept_length == 3


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (
            {"speculative_relaxed_topk": 3},
            ("speculative_relaxed_topk", "gumbel-max", "--speculative-acceptance relaxed"),
        ),
        (
            {"speculative_relaxed_delta": 0.1, "speculative_acceptance": "rejection-sampling"},
            ("delta", "rejection-sampling"),
        ),
        ({"speculative_simulate_accept_length": 4.5}, ("4.5 tokens", "3 drafts", "4 at most")),
        (
            {"speculative_simulate_accept_length": 2.5, "speculative_acceptance": "rejection-sampling"},
            ("rejection-sampling accepts no draft", "--speculative-simulate-accept-length"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        decided(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("flag", ["--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"])
def test_lossy_acceptance_thresholds_of_other_engines_are_refused(flag: str) -> None:
    for value in ("1", "1.0"):
        assert "changes nothing" in parse_options(options_parser("t", "t"), [flag, value]).notices[0]
    with pytest.raises(UnsupportedConfig, match=f"{flag}: 1.0 is all .* got 0.9: .*--speculative-acceptance relaxed"):
        parse_options(options_parser("t", "t"), [flag, "0.9"])
