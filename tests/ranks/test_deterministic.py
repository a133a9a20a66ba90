"""Deterministic inference in groups of processes: a request has the same bits alone and beside others, for any chunks,
cache hits, idle ranks, preemptions, drafts and moves of experts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest

from tests.compose.deterministic import PLAIN, SEED, assert_equal_bits
from tests.compose.matrix import DRAFTING, settings
from tests.compose.test_compose_grammar import GRAMMARS
from tests.compose.workload import Answer, Ask, workload
from tests.ranks.group import ProcessGroup, Served, dealt, serve
from tests.ranks.test_tokens import COLUMNS, EPLB, Case, answers_of, engine_config, left_to_soak, script_of
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE

REQUESTS = 4
CROWD: dict[str, Any] = {
    "chunked_prefill_size": 48,
    "max_steps_in_flight": 2,
    "radix_cache": True,
    "num_pages": 3,
    "max_running_requests": 3,
}
RESTING = {"eplb_rebalance_num_iterations": 1_000_000}
EXCHANGED, NO_CACHE, NO_OVERLAP = {"moe_a2a_backend": "alltoall"}, {"radix_cache": False}, {"max_steps_in_flight": 1}
# one case of a layout; every level of the columns of `test_tokens` is in some case
CASES = [
    Case("tp2", "seeded", kv="fp8_e4m3"),
    Case("cp2", "seeded", "nextn-3"),
    Case("tp2-dcp2", "seeded", "nextn-tree"),
    Case("pp2", "greedy", "adaptive", "regex"),
    Case("tp2-ep2", "penalised", "none", "json_schema", n=2, fields=EXCHANGED),
    Case("dp2-ep2", "seeded", "adaptive", fields=EPLB, is_uneven=True),
    Case("tp4", "greedy", "nextn-tree", "regex", fields=NO_CACHE),
    Case("tp2-dp2-ep4", "seeded", "nextn-3", fields=EPLB | EXCHANGED),
    Case("pp2-tp2", "penalised", "nextn-3", "json_schema", fields=NO_OVERLAP),
]
SOAK = ("tp4", "tp2-dp2-ep4")  # four processes each; "pp2-tp2" has as many


@cache
def asks(kind: str = "seeded", grammar: str = "none", n: int = 1) -> list[tuple[Ask, Grammar]]:
    """Short ones, since tokens run one by one. All have a second page or grow into one; the last two have the first one
    in common. Every second one is under the grammar.
    """
    made = workload(SEED, 2048, kind, logprobs=True, prompt_logprobs=True, n=n)[1 : 1 + REQUESTS]
    draw, short = random.Random(SEED), list[tuple[Ask, Grammar]]()
    shared = tuple(draw.randrange(20, 2000) for _ in range(PAGE))
    for i, ask in enumerate(made):
        own = tuple(draw.randrange(20, 2000) for _ in range(PAGE - 6))
        held = NO_GRAMMAR if i % 2 else GRAMMARS[grammar]
        params = msgspec.structs.replace(ask.params, max_tokens=8, ignore_eos=not held.is_set)
        prompt, turn = (own, i) if i < 2 else (shared + own[:20], 20 * i)
        short.append((replace(ask, prompt=prompt, params=params, turn=turn), held))
    return short


SCRIPT, _ = script_of(asks())


def answers(
    group: ProcessGroup, case: Case, is_alone: bool = False, **fields: Any
) -> tuple[list[Answer], list[Served]]:
    """In the order of the requests and their choices. is_alone: on the first data-parallel rank."""
    kernels = KernelConfig(deterministic=True, kv=case.kv)
    config = engine_config(case.layout, kernels=kernels, **fields)
    script, _ = script_of(asks(case.kind, case.grammar, case.n))
    on_one = is_alone or case.is_uneven
    served = group.serve(config, [script, *[()] * (config.dp_size - 1)] if on_one else dealt(script, config.dp_size))
    return [answer for _, answer in sorted(answers_of(served).items())], served


def alone(group: ProcessGroup, case: Case) -> list[Answer]:
    """One sequence after the other, without drafts and without a prefix cache; experts rest."""
    fields = case.fields | (RESTING if "enable_eplb" in case.fields else {})
    found, served = answers(group, case, True, **fields | PLAIN | {"max_running_requests": 1})
    steps = sum(len(answer.tokens) for answer in found)
    assert not served[0].cached and served[0].steps >= steps, "no two sequences share a step"
    return found


@pytest.mark.parametrize("case", left_to_soak(CASES, *SOAK))
def test_bits_depend_on_the_sequence_alone(case: Case, groups: dict[int, ProcessGroup]) -> None:
    """Nor on drafts; entries of a tree's nodes move between ranks that share contexts."""
    group = groups[engine_config(case.layout).processes]
    crowd, served = answers(group, case, **CROWD | DRAFTING[case.drafts] | case.fields)
    assert_equal_bits(alone(group, case), crowd)
    assert any(rank.expert_moves for rank in served) == ("enable_eplb" in case.fields)
    assert any(rank.accepted for rank in served) == (case.drafts != "none")
    assert case.layout not in ("tp2", "cp2") or (served[0].preemptions and served[0].cached), (
        "one rank has all requests"
    )


def test_every_level_is_among_the_cases() -> None:
    """But a layout of four processes."""
    for column, levels in COLUMNS.items():
        levels = [level for level in levels if level not in SOAK]
        if column in Case.__dataclass_fields__ and column not in ("pages", "prompt_logprobs"):  # scarce, and on
            assert {getattr(case, column) for case in CASES if case.layout not in SOAK} >= set(levels), column


@cache
def one_ranks() -> list[Answer]:
    found = answers_of([serve(settings(kernels=KernelConfig(deterministic=True), **PLAIN), SCRIPT)])
    return [answer for _, answer in sorted(found.items())]


@pytest.mark.parametrize(
    "fields",
    [
        {"ep_size": 2, **DRAFTING["nextn-3"]},
        pytest.param({"ep_size": 2, "pp_size": 2}, marks=pytest.mark.soak),
        pytest.param({"ep_size": 4, "tp_size": 4, "attn_cp_size": 4, **EPLB}, marks=pytest.mark.soak),
        {"ep_size": 4, "tp_size": 4, "attn_cp_size": 4, "moe_a2a_backend": "alltoall", "cp_strategy": "zigzag"},
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)
def test_ranks_that_only_divide_tokens_give_one_ranks_bits(
    fields: dict[str, Any], groups: dict[int, ProcessGroup]
) -> None:
    """Each expert of a token is whole on some rank; the token's own rank adds them up as one rank does."""
    group = groups[engine_config("cp2", **fields).processes]
    crowd, served = answers(group, Case("cp2", "seeded"), **CROWD, **fields)
    assert_equal_bits(one_ranks(), crowd)
    assert bool(served[0].expert_moves) == ("enable_eplb" in fields)


def test_without_it_bits_do_move(groups: dict[int, ProcessGroup]) -> None:
    """The test above would be worth nothing if they never did."""
    loose = [rank for one in SCRIPT for rank in groups[2].serve(engine_config("tp2", **PLAIN), [(one,)])]
    crowd = answers_of(groups[2].serve(engine_config("tp2", **CROWD), [SCRIPT]))
    assert any(want.logprobs != crowd[uid].logprobs for uid, want in answers_of(loose).items())
