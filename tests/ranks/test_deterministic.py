"""Deterministic inference in groups of processes: a request has the same bits alone and beside others, for any chunks,
cache hits, idle ranks, preemptions and moves of experts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest

from tests.compose.deterministic import PLAIN, SEED, assert_equal_bits
from tests.compose.matrix import DRAFTING
from tests.compose.workload import Answer, Ask, workload
from tests.ranks.group import ProcessGroup, Script, Served, dealt, submits
from tests.ranks.test_tokens import EPLB, answers_of, engine_config
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE

REQUESTS = 5
CROWD: dict[str, Any] = {
    "chunked_prefill_size": 48,
    "max_steps_in_flight": 2,
    "radix_cache": True,
    "num_pages": 3,
    "max_running_requests": 3,
}


def asks() -> list[Ask]:
    """Short ones, since tokens run one by one. All have a second page or grow into one; the last two have the first one
    in common.
    """
    made = workload(SEED, 2048, "seeded", logprobs=True, prompt_logprobs=True, n=1)[:REQUESTS]
    draw, short = random.Random(SEED), list[Ask]()
    shared = tuple(draw.randrange(20, 2000) for _ in range(PAGE))
    for i, ask in enumerate(made):
        own = tuple(draw.randrange(20, 2000) for _ in range(PAGE - 6))
        params = msgspec.structs.replace(ask.params, max_tokens=12, ignore_eos=True)
        prompt, turn = (own, i) if i < 3 else (shared + own[:20], 20 * i)
        short.append(replace(ask, prompt=prompt, params=params, turn=turn))
    return short


SCRIPT: Script = tuple(
    (ask.turn, submit) for i, ask in enumerate(asks()) for submit in submits(i, ask.prompt, ask.params)
)


def answers(
    group: ProcessGroup, layout: str, is_dealt: bool = True, **fields: Any
) -> tuple[list[Answer], list[Served]]:
    """is_dealt: to all data-parallel ranks; otherwise to the first."""
    config = engine_config(layout, kernels=KernelConfig(deterministic=True), **fields)
    scripts = dealt(SCRIPT, config.dp_size) if is_dealt else [SCRIPT, *[()] * (config.dp_size - 1)]
    served = group.serve(config, scripts)
    found = answers_of(served)
    return [found[uid] for uid in range(REQUESTS)], served


@cache
def alone(group: ProcessGroup, layout: str, has_eplb: bool = False) -> list[Answer]:
    """One request after the other, without a prefix cache; experts rest."""
    resting = EPLB | {"eplb_rebalance_num_iterations": 1_000_000} if has_eplb else {}
    found, served = answers(group, layout, is_dealt=False, **PLAIN | {"max_running_requests": 1} | resting)
    steps = sum(ask.params.max_tokens for ask in asks())
    assert not served[0].cached and served[0].steps >= steps, "no two requests share a step"
    return found


@pytest.mark.parametrize(
    ("layout", "experts"),
    [("tp2", {}), ("cp2", {}), ("tp2-dcp2", {}), ("dp2-ep2", {}), ("tp2-dp2-ep4", EPLB), ("pp2", {})],
)
def test_bits_depend_on_the_sequence_alone(
    layout: str, experts: dict[str, Any], groups: dict[int, ProcessGroup]
) -> None:
    group = groups[engine_config(layout).processes]
    crowd, served = answers(group, layout, **CROWD, **experts)
    assert_equal_bits(alone(group, layout, bool(experts)), crowd)
    assert not experts or all(rank.expert_moves for rank in served)
    assert layout not in ("tp2", "cp2") or (served[0].preemptions and served[0].cached), "one rank has all requests"


def test_trees_over_ranks_that_share_contexts(groups: dict[int, ProcessGroup]) -> None:
    """Entries of a tree's nodes move between the ranks, and drafts change no bit."""
    crowd, served = answers(groups[2], "tp2-dcp2", **CROWD, **DRAFTING["nextn-tree"])
    assert served[0].accepted
    assert_equal_bits(alone(groups[2], "tp2-dcp2"), crowd)


def test_without_it_bits_do_move(groups: dict[int, ProcessGroup]) -> None:
    """The test above would be worth nothing if they never did."""
    loose = [rank for one in SCRIPT for rank in groups[2].serve(engine_config("tp2", **PLAIN), [(one,)])]
    crowd = answers_of(groups[2].serve(engine_config("tp2", **CROWD), [SCRIPT]))
    assert any(want.logprobs != crowd[uid].logprobs for uid, want in answers_of(loose).items())
