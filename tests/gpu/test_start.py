"""The start of an engine on a GPU: weights through pinned memory, no compilation within a request, pages from the free
memory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import SHAPES, facts, folder, kernel_layers
from thalweg.bench.make_checkpoint import make
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.compilations import Compilations
from thalweg.launch.resolve import resolve
from thalweg.models import catalog
from thalweg.weights.loader import load
from thalweg.weights.stream import Read, Safetensors


def engine(path: Path, **wishes: Any) -> LocalEngine:
    given = {"max_running_requests": 24, "context_length": 4096, "random_seed": 1} | wishes
    return LocalEngine(
        resolve(options_of(model=str(path), load_format="dummy", **given), weights=False, progress=False).engine
    )


def run(of: LocalEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], apart: int) -> None:
    """All of them, a new one every `apart` steps, so that prompts run beside decoding requests."""
    waiting = list(zip(prompts, params, strict=True))
    step = 0
    while waiting or not of.idle:
        if waiting and step % apart == 0:
            of.submit(*waiting.pop())
        of.step()
        step += 1


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 0.7, "min_p": 0.1, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": ((7, 5.0),), "min_tokens": 4},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "seed": 6, "logprobs": 0, "prompt_logprobs": 3},
]


def jit_files() -> set[Path]:
    """Of DeepGEMM's kernels; what a process is about to add lies in tmp/."""
    folder = Path(os.environ.get("DG_JIT_CACHE_DIR", "/nowhere"))
    return {path for path in folder.rglob("*") if "tmp" not in path.relative_to(folder).parts}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graphs", ["full_and_piecewise", "none"])
def test_nothing_compiles_within_a_request(shape: str, graphs: str, cuda: torch.device, tmp_path: Path) -> None:
    rng = random.Random(1)
    of = engine(folder(shape, tmp_path), max_total_tokens=65536, cuda_graph_mode=graphs)
    edges = [length + more for length in (32, 64, 128, 256, 512, 1024) for more in (-1, 0, 1)]
    lengths = [*range(1, 20), *edges, 100, 200, 700, 2000, 3000, 4000]
    prompts = [tuple(rng.randrange(1024) for _ in range(length)) for length in lengths]
    prompts += [prompts[-1][:3500] + prompts[0] * length for length in (1, 3, 40)]  # a cached beginning
    rng.shuffle(prompts)
    params = [SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **rng.choice(KINDS)) for _ in prompts]
    before = jit_files()
    with Compilations() as seen:
        for kind in KINDS:  # each alone, then all together at two paces
            run(of, prompts[:2], [SamplingParams(max_tokens=5, ignore_eos=True, **kind)] * 2, 3)
        run(of, prompts, params, 1)
        run(of, prompts, params, 5)
    assert not seen.compiled and not seen.loaded, sorted({*seen.compiled, *seen.loaded})
    assert jit_files() == before


class Plain(Safetensors):
    """Reads as a CPU does, and copies what it has read."""

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        return (tensor.to(device) for tensor in super().deliver(reads, torch.device("cpu")))


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_through_pinned_memory_are_those_of_the_files(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    (tmp_path / "shape").mkdir()
    out, of = tmp_path / "out", facts(shape)
    make(folder(shape, tmp_path / "shape"), out, 1, False, 500_000_000, cuda)
    pumped, plain = (catalog.assemble(of, kernel_layers(of, cuda)) for _ in range(2))
    for model, kind in ((pumped, Safetensors), (plain, Plain)):
        assert isinstance(model, torch.nn.Module)
        for parameter in model.parameters():
            parameter.data.view(torch.uint8).fill_(1) if parameter.is_contiguous() else parameter.data.fill_(0.5)
        with kind(out) as stream:
            load(model, model.table(), stream, of.quantization_config)  # type: ignore[operator]
    given = dict(pumped.named_parameters())  # type: ignore[attr-defined]
    for name, parameter in plain.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(parameter.contiguous().view(torch.uint8), given[name].contiguous().view(torch.uint8)), name


def test_the_cache_gets_what_is_free(cuda: torch.device, tmp_path: Path) -> None:
    path = folder("v2-lite", tmp_path)
    of = engine(path, max_running_requests=8, chunked_prefill_size=1024)
    said = of.config.report.current()["max_total_tokens"]
    assert of.config.max_total_tokens == said.value and "free beside the weights" in said.reason
    assert of.runner.planes.pages == of.config.num_pages + 1 and of.context == 4096
    left = torch.cuda.mem_get_info()[0]
    assert (0.4 * (1 << 30)) < left < (4 << 30), left
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20)
    run(of, [tuple(range(1000)) * 3] * 8, [greedy] * 8, 1)
    pages = of.config.num_pages
    del of
    torch.cuda.empty_cache()  # the resolver counts what the driver has left
    with pytest.raises(UnsupportedConfig, match="do not fit|leaves no page"):
        engine(path, max_running_requests=8, chunked_prefill_size=1024, max_total_tokens=2 * pages * PAGE)
