"""The arithmetic of `thalweg plan` against the worked values for these shapes: totals to 1 %, components to the last digit that was printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thalweg.config.machines import CHIPS, hardware
from thalweg.config.model import ModelFacts, facts_of
from thalweg.core.errors import CannotServe
from thalweg.launch.planning.floors import (
    RECORD,
    Ceilings,
    Kept,
    Phase,
    Shape,
    absorbed,
    by_name,
    decompressed,
    drafting,
    expected,
    phases,
    seconds,
    uniform,
)
from thalweg.launch.planning.layouts import ONE, Layout, layouts, why_not
from thalweg.launch.planning.room import Extent, Room, graph_bytes, slot_bytes, step_bytes
from thalweg.launch.planning.search import Load, Served, Site, outcomes
from thalweg.launch.planning.traffic import collectives
from thalweg.launch.planning.weights import Widths, flops_a_token, held, inventory, parameters

H200 = Ceilings(4.8e12, 989e12, 1979e12)
H100 = Ceilings(3.35e12, 989e12, 1979e12)
TP8, DP8 = Layout(tp=8), Layout(tp=8, dp=8, ep=8)

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
INDEXER = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "quantization_config": None,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}


def facts(config: dict[str, Any], **more: Any) -> ModelFacts:
    return facts_of(config | more, "test")


V3, V32, LITE_FACTS, QWEN72 = facts(DEEPSEEK), facts(DEEPSEEK | INDEXER), facts(LITE), facts(QWEN)
FP8_INDEX = Kept.of(V32, index=Kept.fp8_index(V32))
FP8_BOTH = Kept.of(V32, index=Kept.fp8_index(V32), record=True)


def numbers(of: ModelFacts, name: str) -> int:
    return next(one.multiplied for one in inventory(of) if one.name == name)


# ---- inventory ----


def test_numbers_of_v3() -> None:
    heads, down = numbers(V3, "MLA, by heads"), numbers(V3, "MLA, down")
    assert heads + down == 187_105_280
    assert numbers(V3, "dense MLP") == 396_361_728
    assert numbers(V3, "experts") // 256 == numbers(V3, "shared experts") == 44_040_192
    assert numbers(V3, "router") == 1_835_008 and numbers(V32, "indexer") == 13_959_168
    assert numbers(V3, "head") == 926_679_040
    biases = 58 * 256  # of the router, which others count as no parameters
    assert parameters(inventory(V3)) - biases == 671_026_404_352
    assert parameters(inventory(V32)) - biases == 671_877_929_216


def test_numbers_of_others() -> None:
    assert parameters(inventory(LITE_FACTS)) == 15_706_484_224
    assert numbers(LITE_FACTS, "MLA, by heads") + numbers(LITE_FACTS, "MLA, down") == 13_762_560
    assert numbers(LITE_FACTS, "experts") // 64 == 8_650_752
    assert parameters(inventory(QWEN72)) == 72_706_203_648
    layer = sum(one.numbers for one in inventory(QWEN72) if one.layers == 80)
    assert layer // 80 == 877_684_736


def test_gigabytes_of_v3() -> None:
    widths = Widths.of(V32)
    each = {one.name: one.layers * widths.read(one) / 1e9 for one in inventory(V32)}
    assert each["MLA, by heads"] + each["MLA, down"] == pytest.approx(11.41, abs=0.005)
    assert each["dense MLP"] == pytest.approx(1.19, abs=0.005)
    assert each["shared experts"] == pytest.approx(2.55, abs=0.005)
    assert each["experts"] == pytest.approx(653.9, abs=0.05)
    assert each["router"] == pytest.approx(0.213, abs=0.0005)
    assert each["head"] == pytest.approx(1.853, abs=0.0005)
    assert each["indexer"] == pytest.approx(0.879, abs=0.0006)


def test_bytes_of_a_token() -> None:
    assert Kept.of(V3).a_token(V3) == 70_272
    assert Kept.of(V3, record=True).a_token(V3) == 61 * RECORD == 40_016
    assert FP8_INDEX.a_token(V32) == 78_324 and FP8_BOTH.a_token(V32) == 48_068
    assert 61 * FP8_INDEX.index == 8_052
    assert Kept.of(LITE_FACTS).a_token(LITE_FACTS) == 31_104
    assert Kept.of(QWEN72).a_token(QWEN72) == 327_680


def test_flops() -> None:
    assert flops_a_token(V3) == pytest.approx(73.25e9, rel=1e-4)
    assert flops_a_token(LITE_FACTS) == pytest.approx(4.90e9, rel=1e-3)
    assert flops_a_token(QWEN72) == pytest.approx(142.9e9, rel=1e-3)
    assert V3.mla is not None
    one = Shape(1, 1, 1)
    assert absorbed(V3.mla, 128, 1) == 278_528 and decompressed(V3.mla, 128, one) == 81_920
    index = by_name(phases(V32, Shape(1, 1, 1 << 17), kept=FP8_INDEX), Ceilings(1e99, 1e99, 1.0))["index"]
    assert index / (1 << 17) / 61 == 16_384


DISTINCT = {1: "8", 2: "15.8", 4: "30.5", 8: "57.4", 16: "102", 32: "163", 64: "222", 128: "252", 256: "255.9"}


@pytest.mark.parametrize(("tokens", "experts"), DISTINCT.items())
def test_distinct_experts(tokens: int, experts: str) -> None:
    assert V3.moe is not None
    digits = len(experts.partition(".")[2])
    assert f"{uniform(V3.moe, tokens):.{digits}f}" == experts


# ---- floors of decoding ----

# layout, requests on each attention, context: ms of V3, of V3.2, of V3.2 with an FP8 cache, as worked out for 8 x H200
WORKED = [
    (TP8, 1, 4096, "1.25", "1.41", "1.39"),
    (TP8, 1, 131072, "3.11", "1.62", "1.61"),
    (TP8, 8, 4096, "4.95", "4.95", "4.85"),
    (TP8, 8, 32768, "8.31", "5.34", "5.23"),
    (TP8, 32, 4096, "13.44", "12.88", "12.47"),
    (TP8, 32, 32768, "26.87", "14.42", "14.01"),
    (TP8, 128, 4096, "25.07", "22.29", "20.64"),
    (DP8, 1, 4096, "7.48", "7.63", "7.63"),
    (DP8, 8, 4096, "18.95", "18.90", "18.90"),
    (DP8, 8, 32768, "22.89", "19.29", "19.29"),
    (DP8, 32, 4096, "22.86", "22.14", "22.14"),
    (DP8, 64, 4096, "25.12", "23.49", "23.49"),
    (DP8, 128, 4096, "29.62", "26.18", "26.18"),
]


@pytest.mark.parametrize(("layout", "rows", "context", "dense", "sparse", "small"), WORKED)
def test_steps_on_eight_h200(layout: Layout, rows: int, context: int, dense: str, sparse: str, small: str) -> None:
    shape = Shape(rows, 1, context)
    made = [
        phases(V3, shape, layout, kept=Kept.of(V3)),
        phases(V32, shape, layout, kept=FP8_INDEX),
        phases(V32, shape, layout, kept=FP8_BOTH),
    ]
    assert [f"{1e3 * seconds(each, H200):.2f}" for each in made] == [dense, sparse, small]


@pytest.mark.parametrize(
    ("layout", "rows", "context", "of", "kept", "parts"),
    [
        (TP8, 1, 4096, V3, Kept.of(V3), ("1.19", "0.06", "0.00")),
        (TP8, 8, 4096, V32, FP8_INDEX, ("4.66", "0.24", "0.05")),
        (TP8, 128, 4096, V3, Kept.of(V3), ("17.39", "7.68", "0.00")),
        (TP8, 128, 4096, V32, FP8_INDEX, ("17.58", "3.84", "0.88")),
        (DP8, 1, 4096, V3, Kept.of(V3), ("7.41", "0.07", "0.00")),
        (DP8, 32, 4096, V3, Kept.of(V3), ("20.61", "2.25", "0.00")),
        (DP8, 64, 4096, V32, FP8_INDEX, ("20.80", "2.25", "0.44")),
        (DP8, 128, 4096, V3, Kept.of(V3), ("20.62", "9.01", "0.00")),
    ],
)
def test_parts_of_a_step(
    layout: Layout, rows: int, context: int, of: ModelFacts, kept: Kept, parts: tuple[str, str, str]
) -> None:
    found = by_name(phases(of, Shape(rows, 1, context), layout, kept=kept), H200)
    attention, index = found.pop("attention"), found.pop("index", 0.0)
    assert tuple(f"{1e3 * part:.2f}" for part in (sum(found.values()), attention, index)) == parts


def test_attention_of_many_heads_is_bound_by_products() -> None:
    """128 heads have 242 FLOPs a byte, above an H200's 206; a TP8 rank's 16 have 30."""
    for layout, ratio in ((DP8, 242), (TP8, 30)):
        part = next(one for one in phases(V3, Shape(1, 1, 4096), layout) if one.name == "attention")
        assert round(part.bf16 / part.bytes) == ratio


@pytest.mark.parametrize(
    ("top", "batch", "context", "expected"),
    [
        (H100, 1, 1024, "5.35"),
        (H100, 32, 4096, "6.94"),
        (H100, 128, 16384, "30.97"),
        (H200, 1, 4096, "3.76"),
        (H200, 32, 16384, "8.20"),
        (H200, 256, 1024, "5.96"),
    ],
)
def test_qwen_72b_on_eight(top: Ceilings, batch: int, context: int, expected: str) -> None:
    parts = phases(QWEN72, Shape(batch, 1, context), TP8)
    bytes_ = sum(part.bytes for part in parts)
    assert f"{1e3 * bytes_ / top.read:.2f}" == expected
    norms = 80 * 2 * 8192 * 2 / 8  # which the worked value counts, too
    assert f"{(bytes_ + norms - batch * context * 40_960) / 1e9:.2f}" == "17.87"


@pytest.mark.parametrize(
    ("batch", "experts", "gigabytes", "milliseconds"),
    [
        (1, "6.0", "4.90", ("1.47", "1.50", "1.62")),
        (8, "34.9", "17.89", ("5.42", "5.65", "6.56")),
        (32, "61.3", "29.76", ("9.19", "10.10", "13.75")),
        (128, "64.0", "30.99", ("10.47", "14.12", "28.72")),
        (256, "64.0", "30.99", ("11.69", "18.99", "48.19")),
    ],
)
def test_v2_lite_on_one_h100(batch: int, experts: str, gigabytes: str, milliseconds: tuple[str, ...]) -> None:
    assert LITE_FACTS.moe is not None and f"{uniform(LITE_FACTS.moe, batch):.1f}" == experts
    made = [phases(LITE_FACTS, Shape(batch, 1, context)) for context in (1024, 4096, 16384)]
    assert tuple(f"{1e3 * sum(part.bytes for part in each) / H100.read:.2f}" for each in made) == milliseconds
    assert f"{sum(part.bytes for part in made[0] if part.name != 'attention') / 1e9:.2f}" == gigabytes
    assert seconds(made[0], H100) == pytest.approx(sum(part.bytes for part in made[0]) / H100.read, rel=0.01)


@pytest.mark.parametrize(
    ("drafts", "rows", "ratio"),
    [
        (1, 1, "1.53"),
        (1, 8, "1.70"),
        (1, 32, "1.37"),
        (1, 128, "1.04"),
        (3, 1, "2.54"),
        (3, 8, "2.69"),
        (3, 32, "1.58"),
        (3, 128, "1.08"),
    ],
)
def test_what_drafts_of_nextn_cost(drafts: int, rows: int, ratio: str) -> None:
    """Weights that a step reads with and without drafts, the context not counted."""

    def weights(parts: list[Phase]) -> float:
        return sum(part.bytes for part in parts if part.name != "attention")

    shape = Shape(rows, 1, 1)
    assert f"{weights(drafting(V3, shape, drafts, TP8)) / weights(phases(V3, shape, TP8)):.2f}" == ratio
    with pytest.raises(ValueError, match="no NextN layer"):
        drafting(QWEN72, shape, 1)


# ---- prompts ----


def prompt_flops(of: ModelFacts, tokens: int, **kept: Any) -> dict[str, float]:
    """FLOPs on one device of a prompt whose every token is scored: what the worked values count."""
    found: dict[str, float] = {}
    for part in phases(of, Shape(1, tokens, tokens, scored=True), **kept):
        found[part.name] = found.get(part.name, 0.0) + part.bf16 + part.fp8
    return found


@pytest.mark.parametrize(("tokens", "products", "attention"), [(8192, 38, 21), (32768, 152, 339), (131072, 606, 5428)])
def test_prompts_of_v3(tokens: int, products: int, attention: int) -> None:
    """All products at FP8's rate, as the worked values have them: the plan's floor has the head once and 16-bit products at their own."""
    found = prompt_flops(V3, tokens)
    scores = found.pop("attention")
    assert round(1e3 * sum(found.values()) / (8 * 1979e12)) == pytest.approx(products, abs=1)
    assert 1e3 * scores / (8 * 989e12) == pytest.approx(attention, rel=0.01)
    total = sum(found.values()) / (8 * 1979e12) + scores / (8 * 989e12)
    assert 1e3 * total == pytest.approx(products + attention, rel=0.01)
    assert 8 * 1979e12 / flops_a_token(V3) == pytest.approx(216e3, rel=2e-3)


@pytest.mark.parametrize(("tokens", "scores", "chosen"), [(8192, 2.1, 31.5), (32768, 34, 140), (131072, 543, 572)])
def test_prompts_of_v32(tokens: int, scores: float, chosen: float) -> None:
    assert V32.mla is not None and V32.indexer is not None
    found = prompt_flops(V32, tokens, kept=FP8_INDEX)
    assert 1e3 * found["index"] / (8 * 1979e12) == pytest.approx(scores, rel=0.02)
    shape = Shape(1, tokens, tokens)
    sparse = 61 * absorbed(V32.mla, 128, shape.chosen(V32.indexer.topk))
    assert 1e3 * sparse / (8 * 989e12) == pytest.approx(chosen, rel=0.01)
    assert found["attention"] == pytest.approx(min(sparse, 61 * decompressed(V32.mla, 128, shape)))


def test_where_sparse_attention_begins_to_pay() -> None:
    """34.8 GFLOPs of 2,048 latents and 1.0 MFLOPs of index scores against 5.0 MFLOPs of keys, for each position: at 8.7 k of them."""
    assert V32.mla is not None and V32.indexer is not None
    flat = 61 * absorbed(V32.mla, 128, 2048)
    assert flat == pytest.approx(34.8e9, rel=1e-3)
    key = 61 * (decompressed(V32.mla, 128, Shape(1, 1, 1)) - 2 * V32.indexer.heads * V32.indexer.dim)
    assert flat / key == pytest.approx(8.7e3, rel=0.01)


def test_chosen_positions_are_counted_one_by_one() -> None:
    for new, context, most in ((1, 10, 4), (5, 9, 4), (8, 8, 3), (3, 4, 9), (4, 20, 30), (6, 12, 9)):
        seen = range(context - new + 1, context + 1)
        assert Shape(2, new, context).chosen(most) == 2 * sum(min(one, most) for one in seen)
        assert Shape(2, new, context).pairs == 2 * sum(seen)


# ---- memory ----


def test_memory_of_layouts() -> None:
    def published(of: ModelFacts, layout: Layout) -> float:
        return sum(held(of, Widths.of(of), layout, published=True).values())

    assert published(V3, TP8) / 1e9 == pytest.approx(85.1, abs=0.05)
    assert published(V3, DP8) / 1e9 == pytest.approx(100.8, abs=0.05)
    room = 0.9 * 141e9 - 6e9
    assert (room - published(V3, TP8)) / 70_272 == pytest.approx(509e3, rel=0.01)
    assert (room - published(V32, TP8)) / 78_324 == pytest.approx(446e3, rel=0.01)
    assert (room - published(V32, TP8)) / 48_068 == pytest.approx(726e3, rel=0.01)
    assert (room - published(V3, DP8)) / 70_272 == pytest.approx(286e3, rel=0.01)
    assert (room - published(V32, DP8)) / 48_068 == pytest.approx(399e3, rel=0.01)
    assert published(QWEN72, TP8) / 1e9 == pytest.approx(18.18, abs=0.005)
    assert published(LITE_FACTS, ONE) / 1e9 == pytest.approx(31.41, abs=0.005)


def test_stages_and_copies_divide_what_they_should() -> None:
    whole = sum(held(QWEN72, Widths.of(QWEN72)).values())
    half = sum(held(QWEN72, Widths.of(QWEN72), Layout(pp=2)).values())
    head = 2 * 152064 * 8192
    assert half == pytest.approx((whole - 2 * head) / 2 + head, rel=1e-4)
    assert sum(held(QWEN72, Widths.of(QWEN72), Layout(copies=4)).values()) == whole


# ---- what GPUs send each other ----


def test_traffic_of_expert_parallelism() -> None:
    """64 requests on each of 8: 9.74 MB a layer and GPU, 1.26 ms a step over 58 layers without what each collective costs anyway."""
    found = collectives(V3, Shape(64, 1, 4096), DP8)
    sent = {one.name: one for one in found}
    dispatch, combine = sent["dispatch to experts"], sent["combine"]
    assert dispatch.count == combine.count == 58 and "all-reduce" not in sent
    assert (dispatch.sent + combine.sent) / 1e6 == pytest.approx(9.74, abs=0.005)
    times = [58 * one.sent / hardware("h200x8").link(8) for one in (dispatch, combine)]
    assert 1e3 * sum(times) == pytest.approx(1.26, abs=0.005)


def test_traffic_of_tensor_parallelism() -> None:
    found = {one.name: one for one in collectives(V3, Shape(4, 1, 4096), TP8)}
    reduce = found["all-reduce"]
    assert reduce.count == 122 and reduce.sent == 2 * 7 / 8 * 4 * 14_336
    assert not collectives(V3, Shape(4, 1, 4096), ONE)
    assert hardware("h100x16").link(16) < hardware("h100x8").link(8)


def test_traffic_of_data_parallel_attention() -> None:
    """Two attentions of four GPUs: each receives the other's tokens, adds up a part of all, and shares it with its three."""
    found = {one.name: one for one in collectives(V3, Shape(16, 1, 4096), Layout(tp=8, dp=2))}
    row = 14_336
    assert found["all-gather of tokens"].sent == 16 * row, "the other attention's"
    assert found["reduce-scatter"].sent == 32 * row * 7 / 8
    assert found["all-gather within an attention"].sent == 16 * row * 3 / 4
    assert found["all-reduce"].count == 61 + 3 and found["all-reduce"].ranks == 4
    inner = collectives(V3, Shape(16, 1, 4096), Layout(tp=8, dp=2, ep=8))
    assert {one.name: one.sent for one in inner}["dispatch to experts"] == 4 * 8 * 7_408 * 7 / 8


# ---- layouts ----


def test_layouts_that_blocks_allow() -> None:
    assert why_not(V3, Layout(tp=16)) == ""
    assert "blocks of 128" in why_not(V3, Layout(tp=32)) and "heads" in why_not(QWEN72, Layout(tp=128))
    assert "dealt out" in why_not(V3, Layout(tp=8, ep=4))
    assert "copies" in why_not(QWEN72, Layout(tp=8, dp=8))
    names = {one.name for one in layouts(V3, 8)}
    assert {"TP8", "TP8 DP8 EP8", "TP4 PP2", "2 x TP4", "8 x 1 GPU"} <= names
    assert all(one.gpus == 8 and not why_not(V3, one) for one in layouts(V3, 8))


def served(of: ModelFacts, name: str, load: Load) -> Site:
    where = hardware(name)
    widths, kept = Widths.of(of), Kept.of(of)

    def room(layout: Layout) -> Room:
        weights = sum(held(of, widths, layout).values())
        cut = 1 if of.mla is not None else min(layout.attention, of.kv_heads)
        return Room(0.9 * 141e9, 0.0, weights, 6e9, 0.0, 0.0, 0.0, 64 * kept.a_token(of) / cut / layout.pp)

    return Site(where, Ceilings(where.chip.read, where.chip.bf16, where.chip.fp8), widths, kept, room)


def test_few_requests_are_served_by_tensor_parallelism_and_many_by_data_parallel_attention() -> None:
    def best(requests: int) -> Layout:
        load = Load(4096, 1024, concurrency=requests)
        return outcomes(V3, served(V3, "h200x8", load), load, 8)[0].layout

    assert best(1) == TP8
    assert best(1024).dp == 8
    crossing = Served(V3, served(V3, "h200x8", Load(4096, 1)), TP8, Load(4096, 1)), Shape(64, 1, 4096)
    assert seconds(phases(V3, crossing[1], TP8), H200) == pytest.approx(19.3e-3, rel=0.01)


def test_targets_and_rates() -> None:
    wished = Load(1024, 512, tpot=0.02)
    site = served(QWEN72, "h100x8", wished)
    first = outcomes(QWEN72, site, wished, 8)[0]
    assert first.tpot <= 0.02 and not first.trouble
    more = Served(QWEN72, site, first.layout, wished).tpot(first.requests + 1)[0]
    assert more > 0.02, "one request more would miss the target"
    rate = Load(1024, 512, rate=3.0)
    calm = outcomes(QWEN72, site, rate, 8)[0]
    makes = Served(QWEN72, site, calm.layout, rate)
    assert makes.finished(calm.requests) >= 3.0 > makes.finished(calm.requests - 1)
    busy = outcomes(QWEN72, site, Load(1024, 512, rate=1e5), 8)
    assert all("at most" in one.trouble for one in busy if one.fits)
    slow = outcomes(QWEN72, site, Load(1024, 512, concurrency=1, tpot=1e-4), 8)
    assert all("a token takes" in one.trouble for one in slow if one.fits)


def test_what_does_not_fit_comes_last() -> None:
    load = Load(4096, 1024, concurrency=64)
    found = outcomes(V3, served(V3, "h200x8", load), load, 8)
    unfit = [one for one in found if not one.fits]
    assert unfit and unfit == found[-len(unfit) :]
    assert {one.layout for one in unfit} >= {Layout(copies=8), Layout(tp=4, copies=2)}
    assert all("do not fit" in one.trouble for one in unfit)


def test_skewed_experts_are_fewer() -> None:
    assert V3.moe is not None
    assert expected(V3.moe, 32) == uniform(V3.moe, 32)
    skewed = [expected(V3.moe, 32, skew) for skew in (0.0, 0.5, 1.0, 2.0)]
    assert skewed == sorted(skewed, reverse=True) and skewed[-1] < 0.5 * skewed[0]
    assert expected(V3.moe, 1, 1.0) == pytest.approx(8), "a token chooses eight, whichever they are"
    assert expected(V3.moe, 10**6, 2.0) == pytest.approx(256, rel=1e-3)


# ---- machines ----


def test_every_chip_has_its_figures_and_their_sources() -> None:
    for chip in CHIPS.values():
        assert {name for name, source in chip.sources if source} == {"memory", "read", "bf16", "fp8", "link"}
        assert 0 < chip.link < chip.read < chip.bf16 <= chip.fp8
    assert (hardware("h200x8").chip.read, hardware("h200x8").gpus) == (4.8e12, 8)
    assert hardware("H100").name == "h100" and hardware("b200x8").machine().gpus == ("NVIDIA B200",) * 8


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
    with pytest.raises(CannotServe) as caught:
        hardware(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_phase_of_several_layers_takes_as_long_as_they_do() -> None:
    one = Phase("x", 4.8e12, bf16=2 * 989e12)
    assert one.seconds(H200) == 2.0 and one.times(3).seconds(H200) == 6.0


def test_the_page_has_the_figures_of_the_catalog() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    for chip in CHIPS.values():
        fp8 = "–" if chip.capability == "8.0" else f"{chip.fp8 / 1e12:,.0f}"
        read = f"{chip.read / 1e12:.2f}" if chip.name in ("a100", "h100") else f"{chip.read / 1e12:.1f}"
        memory = f"{chip.memory / 2**30:.1f}".removesuffix(".0")
        rates = f"{chip.bf16 / 1e12:,.0f} / {fp8} TFLOP/s"
        assert f"| `{chip.name}` | {memory} GiB | {read} TB/s | {rates} | {chip.link / 1e9:.0f} GB/s |" in page


QWEN_7B = QWEN | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}

# (config, slots, tokens of a step, rows and tokens of the largest recordings, and how many: bytes that starts on an H100 took for the largest step
# and for recordings)
STARTS = [
    (LITE, 256, 8192, 256, 35, 1_021_313_024, 471_859_200),
    (QWEN_7B, 256, 8192, 256, 35, 1_130_364_928, 624_951_296),
    (DEEPSEEK | {"num_hidden_layers": 5, "first_k_dense_replace": 1}, 256, 8192, 256, 35, 5_318_377_472, 864_026_624),
    (LITE, 64, 0, 64, 11, 0, 333_447_168),
]  # fmt: skip


@pytest.mark.parametrize(("config", "slots", "budget", "rows", "buckets", "step", "graphs"), STARTS)
def test_steps_and_graphs_of_real_starts(
    config: dict[str, Any], slots: int, budget: int, rows: int, buckets: int, step: int, graphs: int
) -> None:
    extent = Extent(slots, budget, 8192, (1,) * (buckets - 1) + (rows,), (16,) * 21 + (2048,))
    assert graph_bytes(facts(config), extent) == pytest.approx(graphs, rel=0.03)
    if step:
        assert step_bytes(facts(config), extent) == pytest.approx(step, rel=0.03)
    none = Extent(slots, budget, 8192)
    assert graph_bytes(facts(config), none) == 0


def test_slots_of_a_real_start() -> None:
    assert slot_bytes(257, 163840) == 174_306_652 and slot_bytes(65, 8192) == 2_984_540
