"""Deterministic inference on the CPU with the bundled model: sparse attention and experts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.compose.deterministic import CASES, KINDS, PLAIN, TREES, answers, assert_equal_bits
from tests.compose.workload import Answer
from tests.configs import config
from thalweg.core.kernels import KernelConfig
from thalweg.engine.local import LocalEngine

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")


def engine(deterministic: bool = True, **fields: Any) -> LocalEngine:
    kernels = KernelConfig(deterministic=deterministic)
    return LocalEngine(
        config(model_path=MODEL, context_length=400, eos_ids=(1,), show_progress=False, kernels=kernels, **fields)
    )


@cache
def plain(kind: str) -> list[Answer]:
    return answers(engine(**PLAIN), kind, alone=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_sequence_alone(name: str, kind: str) -> None:
    assert_equal_bits(plain(kind), answers(engine(**CASES[name]), kind, alone=False))


def test_bits_do_not_depend_on_trees() -> None:
    made = engine(speculative_algorithm="NEXTN", **TREES)
    assert_equal_bits(plain("seeded"), answers(made, "seeded", alone=False))
    assert made.loop.stats().accepted_tokens > 100


def test_without_it_bits_do_move() -> None:
    """The test above would be worth nothing if they never did."""
    loose = answers(engine(deterministic=False, **CASES["overlap, prefix hits"]), "seeded", alone=False)
    assert any(a.logprobs != b.logprobs for a, b in zip(plain("seeded"), loose, strict=True))
