"""What is decided about speculation, from wishes and a checkpoint's facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from thalweg.config.args import config_parser, parse_config
from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import CannotServe
from thalweg.launch.ledger import Ledger
from thalweg.launch.speculation import Speculation, decide_speculation


@dataclass
class Facts:
    nextn: int = 1


def decided(nextn: int = 1, **wishes: Any) -> tuple[Speculation, Ledger]:
    ledger = Ledger()
    facts: Any = Facts(nextn)
    return decide_speculation(SpeculativeOptions(**wishes), facts, ledger), ledger


@pytest.mark.parametrize(
    ("wishes", "drafter", "width"),
    [
        ({}, "", 0),
        ({"mtp": 1}, "", 0),
        ({"mtp": 3}, "nextn", 2),
        ({"speculative_algorithm": "NEXTN"}, "nextn", 3),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}, "nextn", 3),
        ({"speculative_num_draft_tokens": 3}, "nextn", 2),
        ({"speculative_algorithm": "NGRAM"}, "ngram", 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}, "ngram", 2),
        ({"speculative_algorithm": "NONE"}, "", 0),
    ],
)
def test_wishes_become_a_drafter_and_a_width(wishes: dict[str, Any], drafter: str, width: int) -> None:
    assert decided(**wishes)[0] == Speculation(drafter, width, adaptive=width > 0)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"mtp": 3, "speculative_num_steps": 3}, ("--mtp means 2", "--speculative-num-steps means 3")),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ("means 3 drafts", "means 2 drafts")),
        ({"speculative_algorithm": "NONE", "mtp": 2}, ("NONE", "1 drafts")),
        ({"speculative_algorithm": "NGRAM", "mtp": 2}, ("mtp", "NGRAM", "--speculative-num-steps")),
        ({"speculative_algorithm": "NEXTN", "mtp": 1}, ("0 drafts",)),
        ({"mtp": 40}, ("mtp", "9")),
    ],
)
def test_wishes_that_contradict_are_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CannotServe) as refused:
        decided(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_checkpoint_without_the_layer_is_named() -> None:
    with pytest.raises(CannotServe, match="num_nextn_predict_layers is 0"):
        decided(0, mtp=2)
    assert decided(0)[0] == Speculation("", 0, False)
    assert decided(0, speculative_algorithm="NGRAM")[0].drafter == "ngram"


def test_every_choice_is_noted() -> None:
    assert [(one.name, one.value, one.source) for one in decided(mtp=4)[1].decisions] == [
        ("speculative_algorithm", "NEXTN", "asked"),
        ("speculative_num_steps", 3, "asked"),
        ("speculative_adaptive", True, "auto"),
    ]
    assert not decided(mtp=4, speculative_adaptive=False)[0].adaptive
    assert [(one.name, one.value, one.source) for one in decided()[1].decisions] == [
        ("speculative_algorithm", "NONE", "auto")
    ]


def test_other_engines_flags() -> None:
    flags = "--model m --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    parsed = parse_config(config_parser("t", "t"), [*flags.split(), "--speculative-num-draft-tokens", "4"])
    assert parsed.config.speculative.speculative_num_steps == 3
