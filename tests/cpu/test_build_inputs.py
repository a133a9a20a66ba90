"""`build_inputs` against a plain statement of a step's tokens, on random slots and plans."""

from __future__ import annotations

import random
from dataclasses import fields

import torch

from thalweg.batch.batch import Batch
from thalweg.batch.inputs import build_inputs, sampled_tokens
from thalweg.batch.slots import Slots
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_inputs.ref import build_inputs as reference

CONTEXT, SLOTS, CPU = 500, 6, torch.device("cpu")


def random_step(rng: random.Random) -> tuple[Slots, StepPlan, dict[int, Bind], dict[int, list[int]]]:
    """Slots bound and a plan with decode rows first, then prefill chunks, some of which sample."""
    slots = Slots(SLOTS, CONTEXT, torch.device("cpu"))
    binds, tables, rows = {}, {}, []
    page = 1
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        tokens = tuple(rng.randrange(1, 90) for _ in range(rng.randint(2, 300)))
        computed = rng.choice((0, len(tokens) - 1, rng.randrange(len(tokens))))
        binds[slot] = Bind(
            slot, tokens, len(tokens), computed, min(len(tokens) + 9, CONTEXT), slot, (), SamplingParams()
        )
        tables[slot] = list(range(page, page + -(-len(tokens) // PAGE)))
        page += len(tables[slot])
        n = rng.randint(1, len(tokens) - computed)
        rows.append(Row(slot, slot, computed, n, 0, computed + n == len(tokens)))
    rows.sort(key=lambda row: row.n)
    max_kv_len = max(row.start + row.n for row in rows)
    appends = tuple(PageAppend(slot, 0, tuple(pages)) for slot, pages in tables.items())
    return slots, StepPlan(0, -1, tuple(rows), tuple(binds.values()), appends, max_kv_len=max_kv_len), binds, tables


def test_a_step_is_what_the_plan_says() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    for k in range(50):
        rng = random.Random(seed + k)
        slots, plan, binds, tables = random_step(rng)
        ended = rng.choice([None, plan.rows[0].slot])
        slots.bind(plan.binds)
        slots.append(plan.appends)
        if ended is not None:
            slots.end[ended] = 0
        before = slots.num_computed.clone() if ended is not None else None
        inputs = build_inputs(plan, slots)
        batch, token, sampling = inputs.batch, 0, []
        for r, row in enumerate(plan.rows):
            for i in range(row.n):
                position = row.start + i
                real = row.slot != ended
                assert bool(batch.real_T[token]) == real
                assert batch.positions_T[token] == (position if real else 0)
                assert batch.ids_T[token] == (binds[row.slot].tokens[position] if real else 0)
                at = tables[row.slot][position // PAGE] * PAGE + position % PAGE
                assert batch.write_T[token] == (at if real else 0)
                token += 1
            if row.samples:
                sampling.append((token - 1, row.slot))
            pages = -(-plan.max_kv_len // PAGE)
            assert batch.table_RP[r].tolist() == (tables[row.slot] + [0] * pages)[:pages]
            if before is not None:
                assert slots.num_computed[row.slot] == before[row.slot] + (0 if row.samples else row.n)
        assert list(zip(batch.logits_indices_N.tolist(), inputs.slot_E.tolist(), strict=True)) == sampling
        assert inputs.ints_EI.tolist() == slots.ints_SI[inputs.slot_E].tolist()
        covered = [t for g in batch.groups for t in range(g.token_slice.start, g.token_slice.stop)]
        assert covered == list(range(token))
        assert all(
            row.n == g.query and row.start + row.n <= g.max_kv_len
            for g in batch.groups
            for row in plan.rows[g.row_slice]
        )


def test_tokens_at_or_past_the_end_are_padding() -> None:
    slots = Slots(2, CONTEXT, torch.device("cpu"))
    bind = Bind(1, (5, 6, 7), 3, 2, 3, 0, (), SamplingParams())
    plan = StepPlan(0, -1, (Row(0, 1, 2, 3, 2, True),), (bind,), (PageAppend(1, 0, (4,)),), max_kv_len=5)
    slots.bind(plan.binds)
    slots.append(plan.appends)
    batch = build_inputs(plan, slots).batch
    assert batch.real_T.tolist() == [True, False, False]
    assert batch.ids_T.tolist() == [7, 0, 0] and batch.write_T.tolist() == [4 * PAGE + 2, 0, 0]


def test_sampled_tokens_of_rows_with_different_numbers_of_drafts() -> None:
    """A chunk, two verifications and a prompt's end: of each sampled row as many positions, the last one again where
    there are fewer drafts.
    """
    rows = (Row(0, 0, 5, 3, 2, True), Row(1, 1, 5, 2, 1, True), Row(2, 2, 0, 4, 0, False), Row(3, 3, 0, 2, 0, True))
    made = StepPlan(0, -1, rows, max_kv_len=8)
    assert made.sampled_per_row == 3
    assert sampled_tokens(made, CPU).tolist() == [0, 1, 2, 3, 4, 4, 10, 10, 10]
    assert sampled_tokens(StepPlan(0, -1, rows[2:]), CPU).tolist() == [5]
    assert not len(sampled_tokens(StepPlan(0, -1, rows[2:3]), CPU))


def test_where_every_token_is_sampled_it_is_known() -> None:
    slots, rows = Slots(3, CONTEXT, CPU), [Row(slot, slot, 5, 3, 2, True) for slot in range(3)]
    for made, whole in (
        (rows, True),
        ([rows[0]._replace(n=4), *rows], False),
        ([*rows, rows[0]._replace(n=2, num_drafts=1)], False),
    ):
        plan = StepPlan(0, -1, tuple(made), max_kv_len=8)
        inputs = build_inputs(plan, slots)
        assert inputs.all_sampled == whole and torch.equal(inputs.batch.logits_indices_N, sampled_tokens(plan, CPU))
        assert (inputs.batch.logits_indices_N.tolist() == list(range(plan.tokens))) == whole


def test_tensors_of_a_tree_step_are_contiguous() -> None:
    """Kernels read them without strides."""
    slots = Slots(SLOTS, CONTEXT, CPU, tree=TreeShape(3, 3, 7))
    slots.bind([Bind(slot, tuple(range(1, 40)), 2, 38, 99, 0, (), SamplingParams()) for slot in range(2)])
    slots.append([PageAppend(slot, 0, (1 + slot,)) for slot in range(2)])
    slots.num_drafts[:] = 7
    plan = StepPlan(0, 0, tuple(Row(slot, slot, 38, 8, 7, True) for slot in range(2)), max_kv_len=46)
    step = slots.tensors(is_tree=True)
    batch, captured = build_inputs(plan, slots).batch, reference(torch.arange(2), None, step, 1, PAGE, 8)
    assert batch.tree is not None
    tensors = [*vars_of(batch), *batch.tree[:2], *captured]
    assert len(tensors) > 15 and all(x is not None and x.is_contiguous() for x in tensors)


def vars_of(batch: Batch) -> list[torch.Tensor]:
    return [x for x in (getattr(batch, field.name) for field in fields(batch)) if isinstance(x, torch.Tensor)]
