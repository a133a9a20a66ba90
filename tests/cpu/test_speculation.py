"""Speculation in a whole engine with the bundled model's NextN layer: drafter state, failures, and unchanged tokens."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tests.compose.matrix import MODEL, settings
from tests.configs import changed
from tests.cpu.batches import whole_batch
from thalweg.batch.batch import Batch, Group
from thalweg.core.errors import CheckpointError
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.experts.ref import SCRIPTABLE
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models import traced
from thalweg.models.decoder import Decoder
from thalweg.models.traced_head import TracedHead
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter
from thalweg.spec.catalog import build_drafter
from thalweg.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
JSON = Grammar(
    "json_schema", json.dumps({"type": "array", "items": {"enum": ["aye", "nay"]}, "minItems": 6, "maxItems": 9})
)


@pytest.fixture(autouse=True, scope="module")
def unrecorded() -> Iterator[None]:
    """Most of an engine's start is recording its steps, which `test_models_traced` and the compose tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "ROWS", 0)
        yield


def engine(width: int, **fields: Any) -> LocalEngine:
    wished = {
        "chunked_prefill_size": 512,
        "num_pages": 60,
        "max_running_requests": 8,
        "speculative_algorithm": "NEXTN" if width else "NONE",
        "num_drafts": width,
    } | fields
    return LocalEngine(changed(settings(), **wished))


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(4)
    return [[0, *(rng.randrange(20, 2000) for _ in range(rng.randint(5, longest)))] for _ in range(count)]


def run(
    made: LocalEngine, asked: list[list[int]], params: SamplingParams = GREEDY, grammar: Grammar = NO_GRAMMAR
) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for prompt in asked:
        answers |= {uid: [] for uid in made.submit(prompt, params, grammar=grammar)}
    while not made.idle:
        for delta in made.step():
            answers[delta.uid] += delta.tokens
    return list(answers.values())


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return run(engine(0), prompts(5))


@pytest.mark.parametrize("width", [1, 4])
def test_greedy_tokens_are_those_of_plain_decoding(plain: list[list[int]], width: int) -> None:
    made = engine(width, max_steps_in_flight=2)
    assert run(made, prompts(5)) == plain
    stats = made.loop.stats()
    assert stats.accepted_tokens > 20 and stats.drafted_tokens >= stats.accepted_tokens
    assert stats.steps < 40  # of plain decoding, which takes one for each token


CACHES = [
    KernelConfig(kv="fp8_e4m3"),
    KernelConfig(kv="fp8_ds_mla", fp8_index=True),
    KernelConfig(latent=False),
    KernelConfig(deterministic=True),
]


@pytest.mark.parametrize("kernels", CACHES, ids=repr)
def test_with_every_kind_of_cache(kernels: KernelConfig) -> None:
    assert run(engine(2, kernels=kernels), prompts(2)) == run(engine(0, kernels=kernels), prompts(2))


@pytest.mark.parametrize("depth", [1, 2])
def test_under_a_grammar(depth: int) -> None:
    """The masks follow the drafts: what comes out is what it would be without, and valid."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=150)
    texts = run(engine(0), prompts(3), params, JSON)
    made = engine(3, max_steps_in_flight=depth)
    assert run(made, prompts(3), params, JSON) == texts
    assert made.loop.stats().accepted_tokens > 0
    tokenizer = Tokenizer(Path(MODEL))
    assert all(6 <= len(json.loads(tokenizer.decode(tokens[:-1]))) <= 9 for tokens in texts)


# ---- the drafter's state


class Afresh(NamedTuple):
    """A sequence that was written, computed anew as one prompt: its tokens but the last, whose entry comes with a step
    that there is none of; the pages it lay in; and their planes and the target's hidden states as one step makes
    them.
    """

    tokens: Tensor
    pages: list[int]
    planes: Planes
    hidden_TH: Tensor

    def check(self, made: LocalEngine, spec: PlaneSpec, atol: float, rtol: float) -> None:
        """What the engine has kept of the sequence is what was computed anew."""
        got = made.runner.planes.paged(spec.name, spec.layer)[self.pages]
        want = self.planes.paged(spec.name, spec.layer)[1 : 1 + len(self.pages)]
        both = (x.flatten(0, 1)[: len(self.tokens)] for x in (got, want))
        torch.testing.assert_close(*both, atol=atol, rtol=rtol)


def written_afresh(made: LocalEngine, prompt: tuple[int, ...]) -> Afresh:
    """Lets the engine write, and computes what it and its drafter then keep: of each position its token and the state
    of the one before.
    """
    seen: dict[str, Any] = {}
    release = made.loop.scheduler._release

    def watched(r: Any) -> None:
        seen.update(tokens=r.tokens, pages=list(r.pages))
        release(r)

    made.loop.scheduler._release = watched  # type: ignore[method-assign]
    run(made, [prompt])
    model, drafter = made.runner.model, made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter) and isinstance(model, Decoder)
    tokens = torch.tensor(seen["tokens"][:-1])
    planes = Planes((*model.planes(), *drafter.planes()), 10)
    with torch.inference_mode():
        batch = whole_batch([len(tokens)], tokens)
        hidden = model.forward(batch, planes)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        drafter.head.write_kv(tokens, before, batch, planes)
    return Afresh(tokens, seen["pages"], planes, hidden)


def test_entries_are_those_of_the_true_hidden_states() -> None:
    """Whatever was drafted and refused meanwhile."""
    made = engine(3, chunked_prefill_size=50, radix_cache=False)
    afresh = written_afresh(made, prompts(1)[0])
    head = made.runner.drafting.drafter.head  # type: ignore[attr-defined]
    for spec in head.planes():
        afresh.check(made, spec, 2e-3, 1e-3)
    ends = made.runner.planes.paged(HIDDEN, head.index).flatten(1)[afresh.pages][: len(afresh.tokens) // PAGE]
    torch.testing.assert_close(ends, afresh.hidden_TH[PAGE - 1 :: PAGE], atol=2e-3, rtol=1e-3)


def test_a_prefix_hit_drafts_as_a_cold_start_does() -> None:
    made, prompt = engine(2), prompts(1)[0]
    counts = []
    for _ in range(2):
        before = made.loop.stats()
        run(made, [prompt])
        after = made.loop.stats()
        counts.append((after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens))
    assert made.loop.stats().cached_tokens > 0 and counts[0] == counts[1]


def test_a_hit_takes_the_hidden_state_from_its_last_page() -> None:
    made, prompt = engine(1), prompts(1)[0]
    run(made, [prompt])
    made.submit(prompt, GREEDY)
    drafting = made.runner.drafting
    drafter, found = drafting.drafter, []

    class Watched(AutoregressiveDrafter):
        def bind(self, binds: Any, slots: Any, planes: Any) -> None:
            super().bind(binds, slots, planes)
            found.extend((bind, slots.extra[HIDDEN][bind.slot].clone()) for bind in binds)

    assert isinstance(drafter, AutoregressiveDrafter)
    drafting.drafter = Watched(drafter.head, drafter.draft_sampling)
    made.step()
    ((bind, hidden),) = found
    assert bind.computed == len(prompt) // PAGE * PAGE and hidden.abs().sum() > 0
    (request,) = made.loop.scheduler.live.values()
    page = request.pages[bind.computed // PAGE - 1]
    assert torch.equal(hidden, made.runner.planes.paged(HIDDEN, drafter.head.index).flatten(1)[page])


@pytest.mark.skipif(not SCRIPTABLE, reason="TorchScript does not support this Python")
def test_recorded_drafts_are_bit_for_bit_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "ROWS", 2)
    drafter = engine(1).runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter) and isinstance(drafter.steps, TracedHead)
    layer, recorded, generator = drafter.head, drafter.steps, torch.Generator().manual_seed(1)
    planes = [recorded.planes, Planes(recorded.planes.specs, recorded.planes.pages)]
    for rows, positions in ((1, (0, 40, 63, 64, 65, 130)), (2, (1, 66, 128))):
        for at in positions:
            position, page = torch.full((rows,), at), torch.arange(rows)
            table = 1 + 3 * page[:, None] + torch.arange(at // PAGE + 1)
            group = Group(0, rows, 0, 1, at + 1)
            write = table[:, at // PAGE] * PAGE + at % PAGE
            batch = Batch(position, position, write, table, position >= 0, page, (group,))
            ids, hidden = torch.randint(2000, (rows,), generator=generator), torch.randn(rows, 256, generator=generator)
            with torch.inference_mode():
                got = recorded.forward(ids, hidden, batch, planes[0])
                assert torch.equal(got, layer.forward(ids, hidden, batch, planes[1]))
                recorded.write_kv(ids + 1, -hidden, batch, planes[0])
                layer.write_kv(ids + 1, -hidden, batch, planes[1])
    for name, index in planes[0].bytes:
        assert torch.equal(planes[0].bytes[name, index][1:], planes[1].bytes[name, index][1:])


# ---- what fails


class Broken(Exception):
    pass


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def breaking(made: LocalEngine, method: str, after: int) -> None:
    """From its `after`-th call on, the drafter raises."""
    drafter = made.runner.drafting.drafter
    real: Callable[..., Any] = getattr(drafter, method)
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Broken("on purpose")
        return real(*args)

    setattr(drafter, method, broken)


@pytest.mark.parametrize(
    ("method", "after", "depth"), [("bind", 0, 2), ("extend", 3, 1), ("propose", 0, 1), ("propose", 5, 2)]
)
def test_a_drafter_that_raises_is_switched_off(
    plain: list[list[int]], method: str, after: int, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(3, max_steps_in_flight=depth)
    breaking(made, method, after)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1, "one line"
    assert "switched off" in caplog.text and "on purpose" in caplog.text
    stats = made.loop.stats()
    assert stats.drafter_failures == 1 and made.loop.scheduler.draft_length.max_drafts == 0
    drafted = stats.drafted_tokens
    assert run(made, prompts(5)) == plain and made.loop.stats().drafted_tokens == drafted


def test_a_drafter_with_nan_output_is_switched_off(plain: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    made = engine(2, max_steps_in_flight=2)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    drafter.head.norm.weight.data.fill_(float("nan"))
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1 and "NaN or infinite" in caplog.text
    assert made.loop.stats().drafter_failures == 1


def test_partial_drafts_of_a_failing_drafter_do_no_harm(plain: list[list[int]]) -> None:
    made = engine(3)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    real, calls = drafter.head.logits, 0

    def broken(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 11:  # the second draft of a step
            raise Broken("on purpose")
        return real(hidden)

    drafter.head.logits = broken  # type: ignore[method-assign]
    assert run(made, prompts(5)) == plain


def test_a_checkpoint_without_the_layer_says_so() -> None:
    model = engine(0).runner.model
    assert isinstance(model, Decoder)
    model.facts = structs.replace(model.facts, nextn=0)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 0"):
        build_drafter("NEXTN", model)


# ---- how many are drafted


def test_the_width_goes_by_measured_times(plain: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thalweg.engine"):
        made = engine(3, speculative_adaptive=True, max_running_requests=2)
    assert "drafts: 0 to 3" in caplog.text
    times = made.config.speculative_step_times
    assert times is not None and [rows for rows, *_ in times] == [1, 2]
    assert {len(seconds) for *_, seconds in times} == {4} and min(min(seconds) for *_, seconds in times) > 0
    assert made.config.report.current()["speculative_adaptive"].value == "0 to 3"
    assert run(made, prompts(5)) == plain


def test_a_changing_draft_length_changes_no_token(plain: list[list[int]]) -> None:
    """Steps of one token pass unseen, drafts of different numbers meet in a step."""
    made = engine(3, max_steps_in_flight=2, chunked_prefill_size=60)
    rng = random.Random(5)
    made.loop.scheduler.draft_length.choose = lambda sampling, most: rng.choice((0, 0, 1, 3))  # type: ignore[method-assign]
    assert run(made, prompts(5)) == plain
    assert made.loop.stats().accepted_tokens > 10


def test_an_engine_that_cannot_verify_even_one_request_drafts_nothing(plain: list[list[int]]) -> None:
    made = engine(3, speculative_adaptive=True, chunked_prefill_size=3)
    assert made.config.num_drafts == 0 and made.loop.scheduler.draft_length.max_drafts == 0


# ---- measured with an acceptance that is imposed


@pytest.mark.parametrize("length", [1.0, 2.0, 2.5, 4.0])
def test_simulated_acceptance_is_reached(length: float) -> None:
    made = engine(3, speculative_simulate_accept_length=length, context_length=200)
    run(made, prompts(6), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
    stats = made.loop.stats()
    assert abs(1 + stats.accepted_tokens / stats.verifications - length) < 0.15
