"""Random caches of several processes: each rank fills its own part, and the tokens are those of one process whose
cache has the same vectors.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.ranks.test_tokens import LAYOUTS
from thalweg.bench import one_batch
from thalweg.bench.filled_cache import prompts_of_own_pages
from thalweg.bench.in_process import exactly, run_all, start
from thalweg.config.tree import options_of
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.memory.random_fill import fill_planes
from thalweg.models import traced

TINY = Path(__file__).parents[2] / "models" / "tiny"
LENGTH, CACHED, TOKENS, SEED = 520, 512, 12, 5


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of an engine's start on a CPU is tracing its steps."""
    monkeypatch.setattr(traced, "ROWS", 0)


def started(**fields: Any) -> tuple[Any, LocalEngine]:
    sizes = {"max_total_tokens": PAGE * 48, "max_running_requests": 2, "threads": 1, "dtype": "float32"}
    return start(options_of(model=str(TINY), device="cpu", **sizes | fields))


def answers(engine: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of each prompt, whose full pages are all cached."""
    requests = [exactly(prompt, TOKENS) for prompt in prompts]
    run_all(engine, requests)
    assert [request.cached for request in requests] == [CACHED] * len(prompts)
    return [request.tokens for request in requests]


def copy_context(alone: LocalEngine, engine: LocalEngine) -> None:
    """Writes the vectors that the ranks of `engine` have of two prompts into the pages that `alone` has given them."""
    planes, config = alone.runner.planes, engine.config
    dcp, per_prompt = config.dcp_size, CACHED // PAGE // config.dcp_size
    by_shard = [Planes(planes.specs, config.num_pages + 1) for _ in range(dcp)]
    for shard, shown in enumerate(by_shard):
        fill_planes(shown, SEED, dcp_rank=shard)
        for prompt in range(2):
            first = 1 + (0 if config.dp_size == 2 else prompt) * per_prompt  # each data-parallel rank has one prompt
            for page in range(per_prompt):
                into = 1 + prompt * CACHED // PAGE + page * dcp + shard
                for key, stored in planes.bytes.items():
                    stored[into] = shown.bytes[key][first + page]
    first_pages = {shown.bytes["latent", 0][1].numpy().tobytes() for shown in by_shard}
    assert len(first_pages) == dcp, "other tokens have other vectors"


@pytest.mark.parametrize("layout", ["tp2", "tp2-ep2", "dp2-ep2", "cp2", "pp2", "tp2-dcp2"])
def test_filled_caches_of_two_processes_are_those_of_one(layout: str) -> None:
    resolved, alone = started()
    prompts = prompts_of_own_pages(resolved, 2, LENGTH, Random(1))
    _, engine = started(**LAYOUTS[layout])
    try:
        alone.fill_cache(prompts, SEED + 1)
        copy_context(alone, engine)
        want = answers(alone, prompts)
        for _ in range(2):  # the second time the cache has the prompts, and has other vectors in between
            engine.fill_cache(prompts, SEED)
            assert answers(engine, prompts) == want
        engine.fill_cache(prompts, SEED + 1)
        assert answers(engine, prompts) != want, "the vectors matter"
    finally:
        engine.close()


def test_one_batch_of_two_processes_fills_its_caches(tmp_path: Path) -> None:
    out, layout = tmp_path / "one.json", ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"]
    flags = ["--model", str(TINY), "--device", "cpu", "--threads", "1", "--fill-cache", "--no-warmup", *layout]
    lengths = ["--batch-size", "3", "--input-len", "1000", "--output-len", "4", "--context-length", "1024"]
    assert one_batch.main([*flags, *lengths, "--output-file", str(out)]) == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["filled"] and row["median_decode_latency"] > 0 and "prefill_latency" not in row
