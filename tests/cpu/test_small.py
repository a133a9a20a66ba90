"""A smaller model that drafts, with planes in the same pages and weights in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.compose import matrix
from tests.compose.matrix import MODEL, settings
from tests.cpu import zoo
from tests.cpu.test_eagle import GREEDY, SEEDED, plain, prompts, run
from thalweg.bench.nextn_acceptance import whole_batch
from thalweg.config.model import read_facts
from thalweg.core.errors import CheckpointError
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.spec.catalog import build_drafter
from thalweg.spec.small import Small
from thalweg.spec.unroll import Unrolled
from thalweg.weights import stream
from thalweg.weights.stream import Safetensors


def engine(folder: str, width: int, **fields: Any) -> LocalEngine:
    wished = {"budget": 64, "pages": 60, "slots": 8, "drafter": "small" if width else "", "drafter_path": folder}
    return LocalEngine(msgspec.structs.replace(settings(), **(wished | {"width": width} | fields)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: right hardly ever."""
    folder = tmp_path_factory.mktemp("llama")
    given = zoo.draw_config("llama", 1) | {"vocab_size": read_facts(Path(MODEL)).vocab}
    zoo.save(zoo.reference(given, 1), given, folder)
    return folder


def test_the_model_itself_drafts_what_it_then_writes() -> None:
    """Behind chunks, refusals by a seed's coins and prefixes that were found: what it knows of the tokens is all that it needs."""
    made = engine(MODEL, 3, depth=2)
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


def test_with_everything_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `test_eagle`; as a tree."""
    kind = {"drafter": "small", "drafter_path": str(llama), "width": 6, "tree": TreeShape(2, 3, 6)}
    monkeypatch.setitem(matrix.DRAFTING, "small", kind)
    case = {"budget": 48, "depth": 2, "radix": True, "pages": 10, "policy": "lpm", "slots": 3, "kind": "penalised"}
    matrix.check(case | {"logprobs": True, "prompt_logprobs": False, "n": 2, "drafts": "small"})


def test_its_planes_are_what_it_keeps_alone(llama: Path) -> None:
    made = engine(str(llama), 2, radix=False)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, Unrolled) and isinstance(drafter.head, Small)
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
        read.extend(str(self._spans[one.name].path.parent) for one in reads)
        return deliver(self, reads, device)

    monkeypatch.setattr(stream.Safetensors, "deliver", watched)
    engine("", 0)
    without = len(read)
    engine(str(llama), 1)
    with Safetensors(llama) as own:
        assert read.count(str(llama)) == len([*own.names()])
    assert read.count(MODEL) == 2 * without


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    given = zoo.draw_config("qwen2", 1)
    zoo.save(zoo.reference(given, 1), given, tmp_path)
    target = zoo.catalog.build(read_facts(Path(MODEL)), torch.float32, "meta")
    with pytest.raises(CheckpointError, match=f"vocabulary of {given['vocab_size']} tokens.*2048.*same family"):
        build_drafter("small", target, str(tmp_path))
