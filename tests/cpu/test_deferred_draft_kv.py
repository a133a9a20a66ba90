"""Deferred draft KV: a drafter that writes its KV later has the state of one that writes it at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.batches import whole_batch
from tests.cpu.test_speculation import GREEDY, engine, prompts, run, unrecorded
from thalweg.batch.batch import Batch, RowExtent
from thalweg.batch.inputs import groups_of
from thalweg.batch.slots import Slots
from thalweg.core.plan import PAGE, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Decoder
from thalweg.runner import deferred_kv
from thalweg.runner.deferred_kv import DeferredKV
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter
from thalweg.spec.drafter import DraftExtendInput

assert unrecorded  # a fixture of this module, too
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
SHORTER = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


def drafting(made: LocalEngine, width: Callable[[], int]) -> None:
    made.loop.scheduler.draft_length.choose = lambda sampling, most: width()  # type: ignore[method-assign]


def observed(made: LocalEngine) -> list[int]:
    """Tokens of each step that the drafter is shown, from now on."""
    drafter, tokens = made.runner.drafting.drafter, list[int]()
    real = drafter.extend

    def extend(draft_input: Any, *rest: Any) -> None:
        tokens.append(len(draft_input.batch.ids_T))
        real(draft_input, *rest)

    drafter.extend = extend  # type: ignore[method-assign]
    return tokens


def released(made: LocalEngine) -> list[tuple[tuple[int, ...], list[int]]]:
    """Tokens and pages of each request that ends from now on."""
    ended: list[tuple[tuple[int, ...], list[int]]] = []
    release = made.loop.scheduler._release

    def watched(r: Any) -> None:
        ended.append((r.tokens, list(r.pages)))
        release(r)

    made.loop.scheduler._release = watched  # type: ignore[method-assign]
    return ended


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for a position or two where the model's choice of an expert is a near-tie, which steps of other shapes decide
    otherwise.
    """
    off = (got - want).abs().flatten(1).amax(1)
    assert (off > 2e-3).sum() <= 2 and off.max() < 0.3, (
        f"{(off > 2e-3).nonzero().flatten().tolist()} differ, by up to {off.max():.2f}"
    )


def check_entries(made: LocalEngine, tokens: tuple[int, ...], pages: list[int]) -> None:
    """Those of the drafter, in all full pages, which are in the prefix cache now, as one pass over the whole text makes
    them.
    """
    drafter, model = made.runner.drafting.drafter, made.runner.model
    assert isinstance(drafter, AutoregressiveDrafter) and isinstance(model, Decoder)
    full = (len(tokens) - 1) // PAGE
    text, pages = torch.tensor(tokens[: full * PAGE]), pages[:full]
    planes = Planes((*model.planes(), *drafter.planes()), 10)
    with torch.inference_mode():
        batch = whole_batch([len(text)], text)
        hidden = model.forward(batch, planes)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        drafter.head.write_kv(text, before, batch, planes)
    layer = drafter.head.index
    for name in {spec.name for spec in drafter.head.planes()}:
        got = made.runner.planes.paged(name, layer)[pages].flatten(0, 1)
        want = planes.paged(name, layer)[1 : 1 + full].flatten(0, 1)
        check_close(got, want)
    ends = made.runner.planes.paged(HIDDEN, layer).flatten(1)[pages]
    check_close(ends, hidden[PAGE - 1 :: PAGE])


@pytest.mark.parametrize(("depth", "passing"), [(1, False), (2, True)])
def test_deferred_draft_kv_equals_immediate_draft_kv(depth: int, passing: bool, monkeypatch: Any) -> None:
    """Requests that come and go, of drafts now and then: also of those whose slots were bound anew before it had caught
    up.
    """
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS", 40)
    made, rng, until = engine(3, max_steps_in_flight=depth, max_running_requests=2), random.Random(3), 0
    made.runner.drafting.deferred.copies_tensors = passing
    turns = iter(range(10000))

    def width() -> int:
        nonlocal until
        turn = next(turns)
        if turn < until or rng.random() < 0.85:
            return 0
        until = turn + rng.randint(0, 40)
        return rng.randint(1, 3)

    drafting(made, width)
    ended = released(made)
    assert all(map(len, run(made, prompts(4), SHORTER)))
    made.runner.drafting.write_all_deferred()
    assert len(ended) == 4 and made.loop.stats().drafted_tokens > 20
    for tokens, pages in ended:
        check_entries(made, tokens, pages)


def test_drafts_after_a_pause_are_accepted_as_often() -> None:
    """Accepted at each step, whether the steps before drafted or not."""
    found = []
    for idle in (0, 90):
        made, steps = engine(2), 0
        of: dict[int, int] = {}

        made.loop.scheduler.draft_length.choose = lambda rows, most, idle=idle: 2 * (len(rows[0].output_ids) >= idle)  # type: ignore
        made.submit(prompts(1)[0], LONG)
        known = 0
        while not made.idle:
            for delta in made.step():
                of[known] = len(delta.tokens)
                known += len(delta.tokens)
            steps += 1
        found.append({at: count for at, count in of.items() if at > 100})
    both = found[0].keys() & found[1].keys()
    assert len(both) > 10 and all(found[0][at] == found[1][at] for at in both)


def test_draft_kv_is_not_written_while_nothing_is_drafted(monkeypatch: Any) -> None:
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS", 64)
    made, prompt = engine(3), prompts(1)[0]
    drafting(made, lambda: 0)
    tokens = observed(made)
    run(made, [prompt], LONG)
    assert tokens == [len(prompt), 64, 64] and made.runner.drafting.deferred.tokens == 21
    run(made, [prompt], GREEDY)
    assert tokens[3] == 21, "before the slot was bound anew"


def test_deferred_tokens_of_all_rows_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS", 40)
    made = engine(3, radix_cache=False)
    drafting(made, lambda: 0)
    tokens = observed(made)
    run(made, prompts(8), GREEDY)
    assert max(tokens[8:]) < 48 and made.runner.drafting.deferred.tokens < 40


def test_deferred_tokens_of_each_row_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS_PER_SLOT", 30)
    made = engine(3, radix_cache=False)
    drafting(made, lambda: 0)
    tokens = observed(made)
    run(made, prompts(2), GREEDY)
    assert tokens[-1] == 60 and len(tokens) < 5


def test_a_new_request_does_not_write_deferred_kv_of_others() -> None:
    """Prompts beside decoding rows are looked at alone, and so is what left the slot that is bound anew."""
    made = engine(2, max_running_requests=3, chunked_prefill_size=64)
    drafting(made, lambda: 0)
    first, *others = prompts(4, 30)
    made.submit(first, LONG)
    for _ in range(5):
        made.step()
    tokens, by_slot = observed(made), made.runner.drafting.deferred.by_slot
    for prompt in others[:2]:
        made.submit(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for _ in range(10):
            made.step()
    assert tokens == [len(prompt) for prompt in others[:2]]
    (slot,) = (r.slot for r in made.loop.scheduler.live.values() if r.prompt == tuple(first))
    assert len(by_slot[slot].locations) >= 20
    while len(made.loop.scheduler.live) > 1:
        made.step()
    made.submit(others[2], GREEDY)
    made.step()
    assert tokens[2:] == [19 + 19, len(others[2])], "of both who have left"
    assert len(by_slot[slot].locations) > 30


class Joined(TorchDispatchMode):
    """Numbers that are put together."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.__name__.partition(".")[0] == "cat":
            self.numbers += made.numel()
        return made


def test_deferred_kv_is_written_for_its_own_tokens_only() -> None:
    """Of what all have kept: the first, one in the middle with the last, and then all who are left."""
    slots, rng, width = Slots(8, 400, torch.device("cpu")), random.Random(4), 16
    deferred, seen = DeferredKV(slots, copies_tensors=False), dict[int, list[int]]()
    for step in range(40):
        going = sorted(rng.sample(range(5), 4))
        rows = tuple(Row(slot, slot, step, 1, 0, True) for slot in going)
        at = torch.tensor([100 * step + slot for slot in going])
        batch = Batch(at, at, at, slots.table_SP[:4], at >= 0, at, groups_of(rows), (RowExtent(1, 400),) * 4)
        deferred.defer(
            DraftExtendInput(
                StepPlan(step, step, rows, max_kv_len=400), batch, at.unsqueeze(1).expand(4, width).float()
            ),
            4,
        )
        for slot in going:
            seen.setdefault(slot, []).append(100 * step + slot)
    for wanted in ([0], [2, 4], [1, 3]):
        with Joined() as joined:
            made = deferred.pop(wanted)
        assert made is not None
        tokens = [token for row in made.plan.rows for token in seen[row.slot]]
        assert sorted(row.slot for row in made.plan.rows) == wanted
        assert made.batch.ids_T.tolist() == made.hidden_TH[:, 3].tolist() == tokens
        assert joined.numbers == len(tokens) * (4 + width)
    assert not deferred.steps


def test_pages_of_an_ended_request_are_written_before_reuse() -> None:
    """What lagged of the one is written before the other's, not with it: a step writes to no place twice."""
    made = engine(2, radix_cache=False, num_pages=6, max_running_requests=2)
    drafting(made, lambda: 0)
    drafter, twice = made.runner.drafting.drafter, 0
    real, ended = drafter.extend, released(made)

    def extend(draft_input: Any, *rest: Any) -> None:
        nonlocal twice
        written = draft_input.batch.write_T[draft_input.batch.real_T]
        twice += len(written) - len(written.unique())
        real(draft_input, *rest)

    drafter.extend = extend  # type: ignore[method-assign]
    made.submit(list(range(30, 100)), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    made.submit(list(range(200, 250)), SamplingParams(temperature=0.0, max_tokens=280, ignore_eos=True))
    while not made.idle:
        made.step()
    made.runner.drafting.write_all_deferred()
    (_, pages), (tokens, others) = ended
    assert set(pages) & set(others) and not twice
    check_entries(made, tokens, others)


def test_a_prefix_hit_on_a_running_request_finds_its_draft_kv() -> None:
    """The page that the one has filled while nothing was drafted is the other's prefix, with the drafter's entries."""
    made = engine(2, max_running_requests=2)
    drafting(made, lambda: 0)
    prompt, running = list(range(30, 30 + PAGE - 8)), dict[int, list[int]]()
    (uid,) = made.submit(prompt, LONG)
    running[uid] = []
    while len(running[uid]) < 20:
        for delta in made.step():
            running[delta.uid] += delta.tokens
    ended = released(made)
    (fork,) = made.submit(
        [*prompt, *running[uid][:15]], SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    )
    cached = 0
    while not ended:
        for delta in made.step():
            cached = max(cached, delta.cached) if delta.uid == fork else cached
    assert cached == PAGE and uid in {r.uid for r in made.loop.scheduler.live.values()}
    made.runner.drafting.write_all_deferred()
    check_entries(made, *ended[0])


def test_an_engine_without_a_drafter_defers_nothing() -> None:
    for fields in ({"width": 0}, {"width": 2, "speculative_algorithm": "NGRAM"}):
        made = engine(**fields)
        run(made, prompts(2), GREEDY)
        assert not made.runner.drafting.deferred.steps
