"""Predicted memory, traffic and ranking of layouts, and the catalog of machines."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.cpu.plan_models import (
    DEEPSEEK,
    DP8,
    H200,
    LITE,
    QWEN,
    QWEN72,
    TP8,
    V3,
    facts,
    phases,
    planned,
)
from thalweg.config.engine import EngineConfig
from thalweg.config.machines import CHIPS, hardware
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.gpu_memory import GpuMemory, exchange_bytes, graph_bytes, slot_bytes, step_bytes
from thalweg.launch.planning.layouts import ONE, ParallelLayout, layouts, why_not
from thalweg.launch.planning.roofline import Ceilings, StepPhase, StepShape, expected, seconds
from thalweg.launch.planning.search import PlannedLayout, PlanningInput, Workload, outcomes
from thalweg.launch.planning.weights import MetaRank, PlannedModel
from thalweg.models.catalog import read_config_facts
from thalweg.parallel.axis import width_of

# ---- memory ----


def held(of: str, layout: ParallelLayout = ONE) -> float:
    return planned(of).on(layout).weight_bytes


def test_ranks_with_different_tokens_set_memory_aside_to_exchange_them() -> None:
    """Twice as many bytes as 512 rows of four ranks have, in two sets, there and back."""
    made, engine = read_config_facts(DEEPSEEK, "config.json"), EngineConfig(model_path="m")
    rows = 8 * 9 + 2 * 7168, 2 * 7168
    dp4 = ParallelLayout(4, 4, 4)
    assert exchange_bytes(made, engine, dp4) == sum(2 * 2 * 4 * (4 + 512 * many) for many in rows)
    assert exchange_bytes(made, engine, ParallelLayout(4, 1, 4)) == 0
    alltoall, deepep = (structs.replace(engine, moe_a2a_backend=name) for name in ("alltoall", "deepep"))
    assert exchange_bytes(made, alltoall, ParallelLayout(4, 1, 4)) > 0 == exchange_bytes(made, deepep, dp4)


def test_memory_of_layouts() -> None:
    """The worked values are of a checkpoint; an engine holds MLA's up-projections in bf16, norms in float32 and the
    multipliers of blocks, too.
    """
    heads = 61 * 128 * (128 + 128) * 512  # numbers of the up-projections, which take a byte more each
    assert held("V3", TP8) / 1e9 == pytest.approx(85.1 + heads / 8e9, abs=0.1)
    assert held("V3", DP8) / 1e9 == pytest.approx(100.8 + heads / 1e9, abs=0.1)
    room = 0.9 * 141e9 - 6e9
    assert (room - held("V3", TP8)) / 70_272 == pytest.approx(509e3, rel=0.01)
    assert (room - held("V32", TP8)) / 48_068 == pytest.approx(726e3, rel=0.03)
    assert held("QWEN72", TP8) / 1e9 == pytest.approx(18.18 + 80 * 3 * 8192 * 2 * 16e-9, abs=0.01)
    assert held("LITE") / 1e9 == pytest.approx(31.41, abs=0.005)


def test_stages_and_copies_divide_what_they_should() -> None:
    head = 2 * 152064 * 8192
    assert held("QWEN72", ParallelLayout(pp=2)) == pytest.approx((held("QWEN72") - 2 * head) / 2 + head, rel=1e-4)
    assert held("QWEN72", ParallelLayout(copies=4)) == held("QWEN72")


# ---- what GPUs send each other ----


def test_traffic_of_expert_parallelism() -> None:
    """64 requests on each of 8, whose 8 experts are on 5.25 of them: 6.39 MB a layer and GPU, 0.82 ms a step over 58
    layers without what each collective costs anyway.
    """
    found = collectives(V3, StepShape(64, 1, 4096), DP8)
    sent = {one.name: one for one in found}
    dispatch, combine = sent["dispatch to experts"], sent["combine"]
    assert dispatch.count == combine.count == 58 and "all-reduce" not in sent
    assert (dispatch.sent + combine.sent) / 1e6 == pytest.approx(6.39, abs=0.01)
    times = [58 * one.sent / hardware("h200x8").chip.link for one in (dispatch, combine)]
    assert 1e3 * sum(times) == pytest.approx(0.824, abs=0.005)


def test_traffic_of_tensor_parallelism() -> None:
    found = {one.name: one for one in collectives(V3, StepShape(4, 1, 4096), TP8)}
    reduce = found["all-reduce"]
    assert reduce.count == 122 and reduce.sent == 2 * 7 / 8 * 4 * 14_336
    assert not collectives(V3, StepShape(4, 1, 4096), ONE)


def test_traffic_of_data_parallel_attention() -> None:
    """Two attentions of four GPUs: each receives the other's tokens, adds up a part of all, and shares it with its
    three.
    """
    found = {one.name: one for one in collectives(V3, StepShape(16, 1, 4096), ParallelLayout(tp=8, dp=2))}
    row = 14_336
    assert found["all-gather of tokens"].sent == 16 * row, "the other attention's"
    assert found["reduce-scatter"].sent == 32 * row * 7 / 8
    assert found["all-gather within an attention"].sent == 16 * row * 3 / 4
    assert found["all-reduce"].count == 61 + 3 and found["all-reduce"].ranks == 4
    inner = collectives(V3, StepShape(16, 1, 4096), ParallelLayout(tp=8, dp=2, ep=8))
    assert {one.name: one.sent for one in inner}["dispatch to experts"] == pytest.approx(
        4 * 7 * (1 - (7 / 8) ** 8) * 7_408
    )


# ---- layouts ----


def test_layouts_that_blocks_allow() -> None:
    assert planned("V3").on(ParallelLayout(tp=16)).weight_bytes > planned("V3").on(ParallelLayout(tp=32)).weight_bytes
    assert "heads" in why_not(QWEN72, ParallelLayout(tp=128))
    with pytest.raises(UnsupportedConfig, match="256 experts cannot be shared by 24 ranks"):
        planned("V3").on(ParallelLayout(tp=24, dp=24, ep=24))
    assert "divided evenly" in why_not(V3, ParallelLayout(tp=8, ep=3))
    assert "copies" in why_not(QWEN72, ParallelLayout(tp=8, dp=8))
    names = {one.name for one in layouts(V3, 8)}
    assert {"TP8", "TP8 DP8 EP8", "TP4 PP2", "2 x TP4", "8 x 1 GPU"} <= names
    assert all(one.gpus == 8 and not why_not(V3, one) for one in layouts(V3, 8))


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        }
    },
}
ROUTED = INT4 | {"ignore": ["re:.*(self_attn|shared_experts|mlp.(gate|up|down)_proj).*"]}


def narrow(quantization: dict[str, Any]) -> PlannedModel:
    """DeepSeek-V3 whose experts have four groups of 128."""
    config = DEEPSEEK | {"moe_intermediate_size": 512, "quantization_config": quantization}
    return PlannedModel(read_config_facts(config, "config.json"))


def test_scales_that_ranks_would_cut() -> None:
    """Of a weight whose scales are of 128 columns, 512 columns are of up to 4 ranks."""
    for layout in (ParallelLayout(tp=4), ParallelLayout(tp=8, dp=8, ep=8), ParallelLayout(tp=8, dp=2, ep=8)):
        assert narrow(INT4).on(layout).weight_bytes
    name = r"model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"
    cut = r"448:512 cuts 128 columns that are stored together: let 1, 2, 4 ranks share its 512 columns; use"
    with pytest.raises(UnsupportedConfig, match=f"tp_size: {name} is .*{cut} --ep-size 8, which leaves experts whole"):
        narrow(ROUTED).on(TP8)
    assert narrow(ROUTED).on(ParallelLayout(tp=8, ep=8)).weight_bytes
    with pytest.raises(UnsupportedConfig, match=rf"shared_experts\.down_proj\.weight is .*{cut} another --tp-size"):
        narrow(INT4).on(ParallelLayout(tp=8, ep=8))
    scattered = json.loads(json.dumps(INT4))  # each column has a scale of its own
    scattered["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    assert narrow(scattered).on(TP8).weight_bytes


@pytest.mark.parametrize("unit", [8, 32, 128])
def test_if_a_ranks_slice_cuts_the_last_ones_does(unit: int) -> None:
    def start(rank: int) -> int:
        axis = MetaRank(ranks)
        axis.rank = rank
        return width_of(width, axis).start

    for width, ranks in itertools.product(range(3 * unit, 24 * unit, unit), range(1, 20)):
        assert any(start(rank) % unit for rank in range(ranks)) == bool(start(ranks - 1) % unit), (width, ranks)


def served(of: str, name: str) -> PlanningInput:
    where, model = hardware(name), planned(of)

    def memory(layout: ParallelLayout) -> GpuMemory:
        rank = model.on(layout)
        page = 64 * rank.kv_bytes() / layout.pp
        return GpuMemory(0.9 * 141e9, 0.0, rank.weight_bytes, 6e9, 0.0, 0.0, 0.0, page)

    return PlanningInput(where, Ceilings(where.chip.read, where.chip.bf16, where.chip.fp8), model, memory)


def test_few_requests_are_served_by_tensor_parallelism_and_many_by_data_parallel_attention() -> None:
    def best(requests: int) -> ParallelLayout:
        load = Workload(4096, 1024, concurrency=requests)
        return outcomes(served("V3", "h200x8"), load, 8)[0].layout

    assert best(1) == TP8
    assert best(1024).dp == 8
    assert seconds(phases("V3", StepShape(64, 1, 4096), TP8), H200) == pytest.approx(19.3e-3, rel=0.01)


def test_targets_and_rates() -> None:
    wished = Workload(1024, 512, tpot=0.02)
    site = served("QWEN72", "h100x8")
    first = outcomes(site, wished, 8)[0]
    assert first.tpot <= 0.02 and not first.trouble
    more = PlannedLayout(site, first.layout, wished).tpot(first.requests + 1)[0]
    assert more > 0.02, "one request more would miss the target"
    rate = Workload(1024, 512, rate=3.0)
    calm = outcomes(site, rate, 8)[0]
    makes = PlannedLayout(site, calm.layout, rate)
    assert makes.finished(calm.requests) >= 3.0 > makes.finished(calm.requests - 1)
    busy = outcomes(site, Workload(1024, 512, rate=1e5), 8)
    assert all("at most" in one.trouble for one in busy if one.fits)
    slow = outcomes(site, Workload(1024, 512, concurrency=1, tpot=1e-4), 8)
    assert all("a token takes" in one.trouble for one in slow if one.fits)


def test_what_does_not_fit_comes_last() -> None:
    load = Workload(4096, 1024, concurrency=64)
    found = outcomes(served("V3", "h200x8"), load, 8)
    unfit = [one for one in found if not one.fits]
    assert unfit and unfit == found[-len(unfit) :]
    assert {one.layout for one in unfit} >= {ParallelLayout(copies=8), ParallelLayout(tp=4, copies=2)}
    assert all("do not fit" in one.trouble for one in unfit)


def test_skewed_experts_are_fewer() -> None:
    assert V3.moe is not None
    assert expected(V3.moe, 32) == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32))
    skewed = [expected(V3.moe, 32, skew) for skew in (0.0, 0.5, 1.0, 2.0)]
    assert skewed == sorted(skewed, reverse=True) and skewed[-1] < 0.5 * skewed[0]
    assert expected(V3.moe, 1, 1.0) == pytest.approx(8), "a token chooses eight, whichever they are"
    assert expected(V3.moe, 10**6, 2.0) == pytest.approx(256, rel=1e-3)


# ---- machines ----


def test_every_chip_has_its_figures() -> None:
    for chip in CHIPS.values():
        assert 0 < chip.link < chip.read < chip.bf16 <= chip.fp8
        assert chip.fp4 == 0 or chip.fp4 > chip.fp8
    assert (hardware("h200x8").chip.read, hardware("h200x8").gpus) == (4.8e12, 8)
    assert hardware("H100").name == "h100" and hardware("b200x8").machine().gpus == ("NVIDIA B200",) * 8
    mi355x = hardware("mi355x8").machine()
    assert (mi355x.gpus, mi355x.chip) == (("AMD Instinct MI355X",) * 8, "cdna4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h300x8", ("h300x8: unknown", "h100", "h200", "h200x8")),
        ("tpu", ("tpu: unknown", "There is a100, h100")),
        ("h100x12", ("12 GPUs", "whole nodes of 8")),
        ("h100x0", ("0 GPUs",)),
        ("", ("unknown",)),
    ],
)
def test_unknown_machines(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        hardware(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_phase_of_several_layers_takes_as_long_as_they_do() -> None:
    one = StepPhase("x", 4.8e12, bf16=2 * 989e12)
    assert one.seconds(H200) == 2.0 and one.times(3).seconds(H200) == 6.0


def test_the_page_has_the_figures_of_the_catalog() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    for chip in CHIPS.values():
        fp8 = "–" if chip.capability == "8.0" else f"{chip.fp8 / 1e12:,.0f}"
        fp4 = f"{chip.fp4 / 1e12:,.0f}" if chip.fp4 else "–"
        read = f"{chip.read / 1e12:.2f}" if chip.name in ("a100", "h100") else f"{chip.read / 1e12:.1f}"
        memory = f"{chip.memory / 2**30:.1f}".removesuffix(".0")
        rates = f"{chip.bf16 / 1e12:,.0f} / {fp8} / {fp4} TFLOP/s"
        assert f"| `{chip.name}` | {memory} GiB | {read} TB/s | {rates} | {chip.link / 1e9:.0f} GB/s |" in page


QWEN_7B = QWEN | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}

# (config, slots, tokens of a step, rows and tokens of the largest recordings, and how many: bytes that starts on an
# H100 took for the largest step and for graphs; 0: not measured with these graphs)
STARTS = [
    (LITE, 256, 8192, 256, 35, 1_021_313_024, 0),
    (QWEN_7B, 256, 8192, 256, 35, 1_130_364_928, 0),
    (DEEPSEEK | {"num_hidden_layers": 5, "first_k_dense_replace": 1}, 256, 8192, 256, 35, 5_318_377_472, 0),
    (LITE, 129, 2048, 129, 20, 0, 486_539_264),
]  # fmt: skip


@pytest.mark.parametrize(("config", "slots", "budget", "rows", "buckets", "step", "graphs"), STARTS)
def test_steps_and_graphs_of_real_starts(
    config: dict[str, Any], slots: int, budget: int, rows: int, buckets: int, step: int, graphs: int
) -> None:
    engine = EngineConfig(
        model_path="",
        max_running_requests=slots,
        chunked_prefill_size=budget,
        cuda_graph_bs=(1,) * (buckets - 1) + (rows,),
        piecewise_cuda_graph_tokens=(16,) * 21 + (2048,),
    )
    if graphs:
        assert graph_bytes(facts(config), engine) == pytest.approx(graphs, rel=0.03)
    if step:
        assert step_bytes(facts(config), engine) == pytest.approx(step, rel=0.03)
    assert graph_bytes(facts(config), EngineConfig(model_path="")) == 0


def test_slots_of_a_real_start() -> None:
    later = 24 + 8 * 128  # bytes of a slot that those starts had not yet: a tree's root, ids to score
    assert slot_bytes(257, 163840) == 174_306_652 + 257 * later and slot_bytes(65, 8192) == 2_984_540 + 65 * later


def test_a_step_has_room_for_the_8_bit_copies_of_what_products_round() -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    top = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    engine, found = EngineConfig(model_path="", max_running_requests=1, chunked_prefill_size=1024), []
    for rounded in ({}, {"input_activations": inputs}):
        group = {"targets": ["Linear"], "weights": weights} | rounded
        config = LITE | {"first_k_dense_replace": 0, "quantization_config": top | {"config_groups": {"group_0": group}}}
        found.append(step_bytes(facts(config), engine))
    without, copies = found
    experts = 1024 * (2048 + 4) + 1024 * 8 * (1408 + 4)  # of tokens, and of eight choices each between the products
    assert copies - without == pytest.approx(1.8 * experts), "as the allocator's gaps grow them"


def test_several_nodes_send_less_over_the_network_than_between_gpus() -> None:
    """Sixteen GPUs on two nodes. A sum enters a node once, an eighth through each adapter; what is dispatched goes to
    each of the eight others by itself.
    """
    pair = hardware("h200x8", 2)
    assert (pair.gpus, pair.gpus_of_node) == (16, 8) and pair == hardware("h200x16")
    shape, tp16 = StepShape(256, 1, 4096), ParallelLayout(tp=16)
    reduce = {one.name: one for one in collectives(V3, shape, tp16)}["all-reduce"]
    assert reduce.sent == 2 * 15 / 16 * 256 * 14_336
    crossing = 256 * 14_336 / 8  # twice, of each node half
    assert reduce.seconds(pair) == pytest.approx(122 * (5e-6 + max(crossing / 50e9, reduce.sent / 450e9)))
    dp16 = ParallelLayout(tp=16, dp=16, ep=16)
    dispatch = {one.name: one for one in collectives(V3, shape, dp16)}["dispatch to experts"]
    assert dispatch.seconds(pair) == pytest.approx(58 * (5e-6 + dispatch.sent * 8 / 15 / 50e9))
    one_switch = dataclasses.replace(pair, gpus_of_node=16)
    assert dispatch.seconds(one_switch) == pytest.approx(58 * (5e-6 + dispatch.sent / 450e9))
    hop = {one.name: one for one in collectives(V3, shape, ParallelLayout(tp=4, pp=4))}["to the next stage"]
    assert hop.count == 3 and hop.seconds(pair) == pytest.approx(3 * (5e-6 + hop.sent / 3 / 50e9)), (
        "one of three crosses"
    )


def test_copies_lie_on_whole_nodes_or_inside_one() -> None:
    found = {layout.tp * layout.pp for layout in layouts(V3, 24, 8)}
    assert found == {1, 2, 4, 8, 24}
    assert {layout.tp * layout.pp for layout in layouts(V3, 6, 8)} == {1, 2, 3, 6}, "one node with six GPUs"
