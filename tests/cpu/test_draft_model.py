"""A small draft model, with planes in the same pages and weights in its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compose.matrix import MODEL, settings
from tests.configs import changed
from tests.cpu import zoo
from tests.cpu.batches import whole_batch
from tests.cpu.test_eagle import GREEDY, SEEDED, plain, prompts, run
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.models import traced
from thalweg.models.catalog import read_facts
from thalweg.runner import deferred_kv
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.draft_model import DraftModel
from thalweg.weights import stream
from thalweg.weights.stream import Safetensors


def engine(folder: str, width: int, **fields: Any) -> LocalEngine:
    wished = {
        "chunked_prefill_size": 64,
        "num_pages": 60,
        "max_running_requests": 8,
        "speculative_algorithm": "STANDALONE" if width else "NONE",
        "speculative_draft_model_path": folder,
    }
    return LocalEngine(changed(settings(), **(wished | {"num_drafts": width} | fields)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: right hardly ever."""
    folder = tmp_path_factory.mktemp("llama")
    given = zoo.draw_config("llama", 1) | {"vocab_size": read_facts(Path(MODEL)).vocab}
    zoo.save(zoo.reference(given, 1), given, folder)
    return folder


def test_the_model_itself_drafts_what_it_then_writes() -> None:
    """Behind chunks, refusals by a seed's coins and prefixes that were found: what it knows of the tokens is all that
    it needs.
    """
    made = engine(MODEL, 3, max_steps_in_flight=2)
    for params, want in zip((GREEDY, SEEDED), plain(), strict=True):
        before = made.loop.stats()
        assert run(made, prompts(4), params) == want
        after = made.loop.stats()
        drafted, accepted = (
            getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens")
        )
        # the last drafts of a sequence may lie behind its end
        assert drafted > 60 and accepted >= drafted - 4 * 3
    assert made.loop.stats().cached_tokens > 0


def test_a_draft_model_has_its_own_planes(llama: Path) -> None:
    made = engine(str(llama), 2, radix_cache=False)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter) and isinstance(drafter.head, DraftModel)
    small, prompt = drafter.head.model, prompts(1)[0]
    made.submit(prompt, SamplingParams(temperature=0.0, max_tokens=2))
    pages: list[int] = []
    while not made.idle:
        made.step()
        pages = [*next((r.pages for r in made.loop.scheduler.live.values()), pages)]
    alone = Planes(small.planes(), 10)
    with torch.inference_mode():
        small.forward(whole_batch([len(prompt)], torch.tensor(prompt)), alone)
    for spec in small.planes():
        got = made.runner.planes.paged(spec.name, spec.layer + drafter.head.index)[pages].flatten(0, 1)[: len(prompt)]
        want = alone.paged(spec.name, spec.layer)[1 : 1 + len(pages)].flatten(0, 1)[: len(prompt)]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_each_folder_is_read_for_what_is_its_own(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    deliver = stream.Safetensors.deliver

    def watched(self: Safetensors, reads: Any, device: Any) -> Any:
        read.extend(str(self._slices[one.name].path.parent) for one in reads)
        return deliver(self, reads, device)

    monkeypatch.setattr(stream.Safetensors, "deliver", watched)
    engine("", 0)
    without = len(read)
    engine(str(llama), 1)
    with Safetensors(llama) as own:
        assert read.count(str(llama)) == len(own.specs)
    assert read.count(MODEL) == 2 * without


def test_deferred_kv_of_a_long_text_is_written_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 280 tokens for which nothing was drafted its drafts are as good as ever; it never computes more at once
    than a head does.
    """
    monkeypatch.setattr(traced, "ROWS", 0)
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS_PER_SLOT", 100)
    made, prompt = engine(MODEL, 3, chunked_prefill_size=512), prompts(1)[0]
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    tokens, learn, first = list[int](), drafter.extend, len(prompt) + 280

    def extend(draft_input: Any, *rest: Any) -> None:
        tokens.append(len(draft_input.batch.ids_T))
        learn(draft_input, *rest)

    drafter.extend = extend  # type: ignore[method-assign]
    made.loop.scheduler.draft_length.choose = lambda rows, most: 3 * (rows[0].num_tokens >= first)  # type: ignore[method-assign]
    run(made, [prompt], SamplingParams(temperature=0.0, max_tokens=310, ignore_eos=True))
    stats = made.loop.stats()
    assert tokens[:3] == [len(prompt), 100, 100] and 75 < tokens[3] < 90 and max(tokens[4:]) == 4
    assert stats.drafted_tokens > 15 and stats.accepted_tokens >= stats.drafted_tokens - 3


@pytest.mark.parametrize(("vocab", "tree"), [(1800, TreeShape(2, 2, 4)), (2112, CHAIN)], ids=["fewer", "more"])
def test_a_draft_model_may_have_another_padded_vocabulary(
    vocab: int, tree: TreeShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts have ids that a smaller one lacks."""
    monkeypatch.setattr(traced, "ROWS", 0)
    given = zoo.draw_config("llama", 1) | {"vocab_size": vocab}
    zoo.save(zoo.reference(given, 1), given, tmp_path)
    made = engine(str(tmp_path), 4, tree=tree)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    both = min(vocab, read_facts(Path(MODEL)).vocab)
    assert drafter.head.logits(torch.zeros(1, drafter.head.width)).shape[1] == both
    assert any(token >= 1800 for prompt in prompts(4) for token in prompt)
    for params, want in zip((GREEDY, SEEDED), plain(), strict=True):
        assert run(made, prompts(4), params) == want
    stats = made.loop.stats()
    assert stats.drafted_tokens > 0 and not stats.drafter_failures
