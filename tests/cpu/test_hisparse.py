"""Latents in host memory behind hot sets: the same tokens and at every step the same latents, and how much fits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.configs import config
from tests.cpu.plan_models import V3, V32
from thalweg.attention import context
from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.swap_in import ref
from thalweg.launch.decisions import Decisions
from thalweg.launch.hisparse import resolve_hisparse
from thalweg.launch.resolve import resolve
from thalweg.launch.sizes import measure
from thalweg.memory import hot as hot_memory
from thalweg.memory.planes import Planes

TINY, TOPK = "models/tiny", 64
NEXTN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_adaptive": False}
TREE = NEXTN | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
SHORT = {"max_total_tokens": 448, "context_length": 384, "max_tokens": 100}  # too few pages for three


def served(**wishes: Any) -> tuple[dict[int, list[int]], Any]:
    """Greedy tokens by request, of prompts that begin alike, one of them sampled twice; and the engine."""
    most = wishes.pop("max_tokens", 40)
    sizes = {"max_running_requests": 3, "max_total_tokens": 2048, "chunked_prefill_size": 64, "random_seed": 1}
    options = options_of(model=TINY, device="cpu", threads=1, **sizes | wishes)
    engine, draw, tokens = LocalEngine(resolve(options, progress=False).engine), random.Random(5), {}
    common = draw.choices(range(3, 2000), k=150)
    for length, n in ((10, 1), (60, 1), (90, 2), (150, 1)):
        params = SamplingParams(temperature=0.0, max_tokens=most, n=n, ignore_eos=True)
        engine.submit(common[:100] + draw.choices(range(3, 2000), k=length), params)
    while not engine.idle:
        for delta in engine.step():
            tokens.setdefault(delta.uid, []).extend(delta.tokens)
    engine.close()
    return tokens, engine


class Watched:
    """`ref.swap_in`, with counts of what it loads and of latents that are not those in host memory."""

    def __init__(self) -> None:
        self.chosen = self.loaded = self.wrong = self.replaced = 0
        self.swap_in: Callable[..., Tensor] = ref.swap_in

    def __call__(self, hot: ref.HotSet, host_XD: Tensor, *rows: Tensor) -> Tensor:
        before, chosen = hot.position_SH.clone(), (rows[3] >= 0) & rows[2].unsqueeze(2)
        rows_RQK = self.swap_in(hot, host_XD, *rows)
        got, want = hot.latents_ED[rows_RQK[chosen]], host_XD[rows[4][chosen]]
        self.wrong += int((got.view(torch.uint8) != want.view(torch.uint8)).any(1).sum())
        self.chosen += int(chosen.sum())
        self.replaced += int(((before > 0) & (hot.position_SH != before)).sum())
        self.loaded += int((hot.position_SH != before).sum())
        return rows_RQK


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched()
    monkeypatch.setattr(ref, "swap_in", made)
    yield made


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        NEXTN,
        TREE,
        SHORT,
        NEXTN | SHORT | {"overlap_schedule": True},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_ds_mla"} | NEXTN,
        {"kv_cache_dtype": "fp8_e4m3", "index_topk_pattern": "FFSS"},
    ],
    ids=lambda wishes: "-".join(map(str, wishes.values())) or "plain",
)
def test_tokens_and_latents_are_the_same(watched: Watched, wishes: dict[str, Any]) -> None:
    query = wishes.get("speculative_num_draft_tokens", 1 + wishes.get("speculative_num_steps", 0))
    want, _ = served(**wishes)
    assert watched.chosen == 0, "nothing is swapped in without the flag"
    got, engine = served(**wishes, enable_hisparse=True, hisparse_device_buffer_size=query * TOPK + 8)
    assert got == want
    assert not watched.wrong
    assert watched.replaced > 100 and 2 * watched.loaded < watched.chosen
    counters = engine.loop.scheduler.counters
    assert counters.cached_tokens > 0 and (counters.preemptions > 0) == ("max_total_tokens" in wishes)


def test_a_verification_may_be_cut_into_tiles(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of its first tiles are not found again: they may be rejected."""
    want, _ = served(**NEXTN)
    monkeypatch.setattr(context, "TILE_ELEMENTS", 2000)
    got, _ = served(**NEXTN, enable_hisparse=True)
    assert watched.chosen and not watched.wrong and got == want


def newest(last_use_RH: Tensor, is_missing_RK: Tensor) -> Tensor:
    """A bug: victims may be what this step has chosen."""
    return last_use_RH.sort(1, descending=True).indices[:, : is_missing_RK.shape[1]].sort(1).values


@pytest.mark.parametrize(
    ("place", "name", "bug", "wishes"),
    [
        (ref, "least_recently_used", newest, {}),
        (Planes, "forget", lambda planes, slots: None, {}),
        (ref, "first_of_step", lambda positions_RQ: positions_RQ[:, -1:] + 1, NEXTN),
    ],
    ids=["victims of this step", "hot sets of an earlier request", "drafts that are found again"],
)
def test_planted_bugs_are_found(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any, wishes: dict[str, Any]
) -> None:
    monkeypatch.setattr(place, name, bug)
    served(**wishes, enable_hisparse=True)
    assert watched.wrong


def decided(machine: Machine | None = None, device: str = "cpu", graphs: str | None = None, **wishes: Any) -> Decisions:
    """Of DeepSeek-V3.2 with `drafts` drafts."""
    of, kernels = wishes.pop("of", V32), wishes.pop("kernels", KernelConfig())
    decisions = Decisions()
    decisions.fields["speculative_num_steps"] = wishes.pop("drafts", 0)
    memory = options_of(model=TINY, **({"enable_hisparse": True} | wishes)).memory
    machine = machine or Machine("Test CPU", 8, 4000 * 10**9, 1000 * 10**9)
    made = resolve_hisparse(memory, of, machine, device, kernels, graphs, decisions)
    assert made.hot == decisions.config().hisparse_device_buffer_size
    return decisions


SPARSE = KernelConfig(decode="triton_sparse", prefill="triton_sparse")


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"enable_hisparse": False, "hisparse_device_buffer_size": 9}, "without --enable-hisparse"),
        ({"of": V3}, "no sparse attention"),
        ({"kernels": KernelConfig(latent=False)}, "--no-mla keeps no latents"),
        ({"device": "cuda", "kernels": KernelConfig(decode="triton_sparse", deterministic=True)}, "deterministic"),
        ({"kernels": KernelConfig(deterministic=True)}, "deterministic"),
        ({"drafts": 16}, "use --speculative-num-draft-tokens 16 or fewer drafts"),
        ({"device": "cuda", "kernels": SPARSE, "graphs": "full"}, "use full_and_piecewise"),
        ({"kernels": SPARSE}, "no swap-in on a CPU"),
        ({"hisparse_device_buffer_size": 2047}, "--hisparse-device-buffer-size 2048"),
        ({"hisparse_device_buffer_size": 4096, "drafts": 2}, "--hisparse-device-buffer-size 6144 or fewer drafts"),
        ({"hisparse_host_memory_gb": 1001.0}, "1000.0 GB that the container's limit"),
    ],
)
def test_what_cannot_be_is_refused(wishes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedConfig, match=told):
        decided(**wishes)


def test_defaults_and_the_limit_of_host_memory() -> None:
    plain, drafting = decided().config(), decided(drafts=3).config()
    assert decided(drafts=15).config().hisparse_device_buffer_size == 16 * 2048, "its entries' numbers are int16"
    assert plain.hisparse_device_buffer_size == 4096 and drafting.hisparse_device_buffer_size == 5 * 2048
    assert plain.hisparse_host_memory == 0, "a CPU's memory is one"
    records = msgspec.structs.replace(SPARSE, kv="fp8_ds_mla")
    assert decided(device="cuda", kernels=records).config().hisparse_device_buffer_size == 4096
    beside = decided(device="cuda", kernels=SPARSE).config()
    assert beside.hisparse_host_memory == 800 * 10**9, "of what is free, not of what the machine has"
    assert decided(hisparse_host_memory_gb=12.0).config().hisparse_host_memory == 12 * 10**9


def test_pages_are_limited_by_host_memory() -> None:
    def pages(**wishes: Any) -> Any:
        options = options_of(model=TINY, device="cpu", threads=1, enable_hisparse=True, **wishes)
        return resolve(options, weights=False, progress=False)

    whole, small = pages(), pages(hisparse_host_memory_gb=0.003)
    latents = 64 * 4 * 4 * (128 + 16)  # float32 of four layers
    assert small.pages == 3_000_000 // latents - 1 < whole.pages
    assert "host memory" in str(small.engine.report.as_tree()["max_total_tokens"])
    with pytest.raises(InsufficientMemory, match="of host memory"):
        pages(hisparse_host_memory_gb=0.003, max_total_tokens=4096)


def test_four_times_as_many_requests_of_128k_fit() -> None:
    """DeepSeek-V3.2 with records and index keys in FP8, on a GPU with 45 GB left for its cache, as an H200 of eight that
    share the weights, and 160 GB of host memory for it.
    """
    tokens, device, host = 131072, 45 * 10**9, 160 * 10**9
    cache = {"kv": "fp8_ds_mla", "fp8_index": True}
    plain, hot = (
        measure(V32, config(model_path="", kernels=KernelConfig(**cache, hot=entries))) for entries in (0, 4096)
    )
    assert plain.kv_bytes == hot.kv_bytes == 61 * (656 + 132) and plain.host_kv_bytes == 0
    assert hot.host_kv_bytes == 61 * 656 and hot.hot_sets(tokens) == 61 * (4096 * (656 + 8) + 4 + 2 * tokens)
    without = device // (plain.kv_bytes * tokens)
    on_device = device // ((hot.kv_bytes - hot.host_kv_bytes) * tokens + hot.hot_sets(tokens))
    fit = min(on_device, host // (hot.host_kv_bytes * tokens))
    assert (without, on_device, fit) == (7, 36, 30) and fit >= 4 * without


def test_planes_on_the_host_and_their_hot_sets() -> None:
    """What a plan counts is what is allocated, and the hot sets of a slot are emptied alone."""
    sizes = measure(V32, config(model_path="", hisparse_device_buffer_size=4096))
    assert {(plane.name, plane.in_host) for plane in sizes.planes} == {("latent", True), ("index", False)}
    _, engine = served(enable_hisparse=True, **NEXTN)
    planes, slots = engine.runner.planes, 3
    assert [spec.layer for spec in planes.specs if spec.hot] == [0, 1, 2, 3], "a next-token layer's are on the device"
    context = engine.config.context_length
    padding = sum(hot.latents_ED[slots * hot.entries :].nbytes for hot in map(planes.hot, range(4)))
    assert planes.slots_nbytes - padding - planes.hot(0).table_1P.nbytes * 4 == slots * Planes.slot_cost(
        planes.specs, context
    )
    kept = planes.hot(1).position_SH[1].clone()
    assert kept.any() and planes.hot(1).position_SH[0].any()
    planes.forget([0])
    assert not planes.hot(1).position_SH[0].any() and torch.equal(planes.hot(1).position_SH[1], kept)


def test_pages_of_host_memory_are_locked_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = dict[int, int]()
    monkeypatch.setattr(hot_memory, "lock_pages", locked.__setitem__)
    monkeypatch.setattr(hot_memory, "unlock_pages", locked.pop)
    zeros = hot_memory.host_zeros(5, 100, torch.device("cuda"))
    view = zeros.view(torch.float32)
    assert zeros.device.type == "cpu" and not zeros.any() and locked == {zeros.data_ptr(): 500}
    del zeros
    assert locked, "a view holds the memory"
    del view
    assert not locked
