"""The arithmetic of `thalweg plan` against worked values: totals to 1 %, components to the last printed digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.plan_models import (
    DEEPSEEK,
    DP8,
    FP8_BOTH,
    FP8_INDEX,
    H100,
    H200,
    LITE_FACTS,
    QWEN72,
    RECORD,
    TP8,
    V3,
    V32,
    facts,
    phases,
    planned,
    rank,
)
from thalweg.config.machines import CHIPS
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.launch.planning import roofline
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafting
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import (
    Ceilings,
    StepPhase,
    StepShape,
    absorbed,
    by_name,
    decompressed,
    expected,
    seconds,
    verified,
)
from thalweg.launch.planning.weights import KVBytes, PlannedModel, WeightGroup

NEXTN = PlannedModel(facts(DEEPSEEK, num_nextn_predict_layers=1))


def groups(of: str, phase: str, is_routed: bool = False) -> WeightGroup:
    (group,) = (one for one in planned(of).on(ONE).groups if (one.phase, one.is_routed) == (phase, is_routed))
    return group


def numbers(of: str, phase: str, is_routed: bool = False) -> float:
    group = groups(of, phase, is_routed)
    return group.low + group.high


def parameters(of: str) -> int:
    return sum(group.parameters for group in planned(of).on(ONE).groups)


# ---- weights ----


def test_numbers_of_v3() -> None:
    assert numbers("V3", "projections") == 61 * 187_105_280
    assert numbers("V3", "mlp") == 3 * 396_361_728
    assert numbers("V3", "experts", is_routed=True) == 58 * 256 * 44_040_192
    assert numbers("V3", "experts") == 58 * (44_040_192 + 1_835_008), "shared experts and routers"
    assert numbers("V32", "projections") == 61 * (187_105_280 + 13_959_168)
    assert numbers("V3", "head") == 926_679_040
    biases = 58 * 256  # of the router, which others count as no parameters
    assert parameters("V3") - biases == 671_026_404_352
    assert parameters("V32") - biases == 671_877_929_216


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "*gate", "lm_head"]},
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
            },
            "exclude": ["*self_attn*", "*gate", "lm_head"],
        },
    ],
    ids=["nvfp4", "mxfp4"],
)
def test_fp4_weights_are_multiplied_at_its_rate_where_a_machine_has_one(config: dict[str, Any]) -> None:
    model = PlannedModel(facts(DEEPSEEK, quantization_config=config)).on(ONE)
    (routed,) = (group for group in model.groups if group.is_routed)
    assert (routed.low, routed.high, routed.fp4) == (0, 0, 58 * 256 * 44_040_192)
    assert routed.read == routed.fp4 / 2
    shape = StepShape(1, 1 << 15, 1 << 15)
    flops = 2.0 * shape.tokens * 58 * (8 + 1) * 44_040_192  # routed and shared
    router = 2.0 * shape.tokens * 58 * 1_835_008
    for name, rate in (("b200", 9000e12), ("mi355", 10066.3e12), ("h200", 989e12)):
        chip = CHIPS[name]
        top = Ceilings(chip.read, chip.bf16, chip.fp8, chip.fp4)
        found = by_name(roofline.phases(model, shape), top)["experts"]
        assert found == pytest.approx(flops / rate + router / chip.bf16, rel=1e-6), name


def test_numbers_of_others() -> None:
    assert parameters("LITE") == 15_706_484_224
    assert numbers("LITE", "projections") == 27 * 13_762_560
    assert numbers("LITE", "experts", is_routed=True) == 26 * 64 * 8_650_752
    assert parameters("QWEN72") == 72_706_203_648
    layers = sum(group.parameters for group in planned("QWEN72").on(ONE).groups if group.is_in_layers)
    assert layers // 80 == 877_684_736


def test_gigabytes_of_v3() -> None:
    def gigabytes(of: str, phase: str, is_routed: bool = False) -> float:
        return groups(of, phase, is_routed).read / 1e9

    assert gigabytes("V3", "projections") == pytest.approx(11.41, abs=0.005)
    assert gigabytes("V3", "mlp") == pytest.approx(1.19, abs=0.005)
    assert gigabytes("V3", "experts") == pytest.approx(2.55 + 0.213, abs=0.006)
    assert gigabytes("V3", "experts", is_routed=True) == pytest.approx(653.9, abs=0.05)
    assert gigabytes("V3", "head") == pytest.approx(1.853, abs=0.0005)
    assert gigabytes("V32", "projections") - gigabytes("V3", "projections") == pytest.approx(0.879, abs=0.0006)


def test_bytes_of_a_token() -> None:
    assert planned("V3").on(ONE).kv_bytes() == 70_272
    assert rank("V3", kv=KVBytes(RECORD)).kv_bytes() == 40_016
    both = [rank("V32", kv=kv).kv_bytes() for kv in (FP8_INDEX, FP8_BOTH)]
    assert both == [78_324, 48_068] and 61 * FP8_INDEX.index == 8_052
    kernels = KernelConfig(kv="fp8_ds_mla", fp8_index=True)
    assert PlannedModel(planned("V32").facts, kernels=kernels).on(ONE).kv_bytes() == 48_068
    assert planned("LITE").on(ONE).kv_bytes() == 31_104
    assert planned("QWEN72").on(ONE).kv_bytes() == 327_680
    assert planned("QWEN72").on(TP8).kv_bytes() == 327_680 / 8 and planned("V3").on(TP8).kv_bytes() == 70_272


def test_flops() -> None:
    assert planned("V3").on(ONE).flops_a_token() == pytest.approx(73.25e9, rel=1e-4)
    assert planned("LITE").on(ONE).flops_a_token() == pytest.approx(4.90e9, rel=1e-3)
    assert planned("QWEN72").on(ONE).flops_a_token() == pytest.approx(142.9e9, rel=1e-3)
    assert V3.mla is not None
    one = StepShape(1, 1, 1)
    assert absorbed(V3.mla, 128, 1) == 278_528 and decompressed(V3.mla, 128, one) == 81_920
    index = by_name(phases("V32", StepShape(1, 1, 1 << 17), kv=FP8_INDEX), Ceilings(1e99, 1e99, 1.0))["index"]
    assert index / (1 << 17) / 61 == 16_384


DISTINCT = {1: "8", 2: "15.8", 4: "30.5", 8: "57.4", 16: "102", 32: "163", 64: "222", 128: "252", 256: "255.9"}


@pytest.mark.parametrize(("tokens", "experts"), DISTINCT.items())
def test_distinct_experts(tokens: int, experts: str) -> None:
    assert V3.moe is not None
    digits = len(experts.partition(".")[2])
    assert f"{expected(V3.moe, tokens):.{digits}f}" == experts


# ---- lower bounds of decode steps ----

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
def test_steps_on_eight_h200(
    layout: ParallelLayout, rows: int, context: int, dense: str, sparse: str, small: str
) -> None:
    shape = StepShape(rows, 1, context)
    made = [
        phases("V3", shape, layout),
        phases("V32", shape, layout, FP8_INDEX),
        phases("V32", shape, layout, FP8_BOTH),
    ]
    assert [f"{1e3 * seconds(each, H200):.2f}" for each in made] == [dense, sparse, small]


@pytest.mark.parametrize(
    ("layout", "rows", "context", "of", "kept", "parts"),
    [
        (TP8, 1, 4096, "V3", None, ("1.19", "0.06", "0.00")),
        (TP8, 8, 4096, "V32", FP8_INDEX, ("4.66", "0.24", "0.05")),
        (TP8, 128, 4096, "V3", None, ("17.39", "7.68", "0.00")),
        (TP8, 128, 4096, "V32", FP8_INDEX, ("17.58", "3.84", "0.88")),
        (DP8, 1, 4096, "V3", None, ("7.41", "0.07", "0.00")),
        (DP8, 32, 4096, "V3", None, ("20.61", "2.25", "0.00")),
        (DP8, 64, 4096, "V32", FP8_INDEX, ("20.80", "2.25", "0.44")),
        (DP8, 128, 4096, "V3", None, ("20.62", "9.01", "0.00")),
    ],
)
def test_parts_of_a_step(
    layout: ParallelLayout, rows: int, context: int, of: str, kept: KVBytes | None, parts: tuple[str, str, str]
) -> None:
    found = by_name(phases(of, StepShape(rows, 1, context), layout, kept), H200)
    attention, index = found.pop("attention"), found.pop("index", 0.0)
    assert tuple(f"{1e3 * part:.2f}" for part in (sum(found.values()), attention, index)) == parts


def test_attention_of_many_heads_is_bound_by_products() -> None:
    """128 heads have 242 FLOPs a byte, above an H200's 206; a TP8 rank's 16 have 30."""
    for layout, ratio in ((DP8, 242), (TP8, 30)):
        part = next(one for one in phases("V3", StepShape(1, 1, 4096), layout) if one.name == "attention")
        assert round(part.bf16 / part.bytes) == ratio


@pytest.mark.parametrize(
    ("top", "batch", "context", "expected"),
    [
        (H100, 1, 1024, "5.36"),
        (H100, 32, 4096, "6.95"),
        (H100, 128, 16384, "30.99"),
        (H200, 1, 4096, "3.77"),
        (H200, 32, 16384, "8.21"),
        (H200, 256, 1024, "5.97"),
    ],
)
def test_qwen_72b_on_eight(top: Ceilings, batch: int, context: int, expected: str) -> None:
    parts = phases("QWEN72", StepShape(batch, 1, context), TP8)
    bytes_ = sum(part.bytes for part in parts)
    assert f"{1e3 * bytes_ / top.read:.2f}" == expected
    norms = 80 * 2 * 8192 * 2 / 8  # which the worked value counts, too
    assert f"{(bytes_ + norms - batch * context * 40_960) / 1e9:.2f}" == "17.93", (
        "of 231 blocks of an MLP's columns the largest part has 29"
    )


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
    assert LITE_FACTS.moe is not None and f"{expected(LITE_FACTS.moe, batch):.1f}" == experts
    made = [phases("LITE", StepShape(batch, 1, context)) for context in (1024, 4096, 16384)]
    assert tuple(f"{1e3 * sum(part.bytes for part in each) / H100.read:.2f}" for each in made) == milliseconds
    assert f"{sum(part.bytes for part in made[0] if part.name != 'attention') / 1e9:.2f}" == gigabytes
    assert seconds(made[0], H100) == pytest.approx(sum(part.bytes for part in made[0]) / H100.read, rel=0.01)


@pytest.mark.parametrize(
    ("drafts", "rows", "ratio"),
    [
        (1, 1, "1.49"),
        (1, 8, "1.69"),
        (1, 32, "1.36"),
        (1, 128, "1.04"),
        (3, 1, "2.44"),
        (3, 8, "2.66"),
        (3, 32, "1.58"),
        (3, 128, "1.08"),
    ],
)
def test_what_drafts_of_nextn_cost(drafts: int, rows: int, ratio: str) -> None:
    """Weights that a step reads with and without drafts, the context not counted. Each GPU has an eighth of eh_proj."""

    shape, made = StepShape(rows, 1, 1), DrafterPlanner("NEXTN", 3)
    drafted = drafting(NEXTN, TP8, shape, drafts, made)
    assert f"{weights(drafted) / weights(phases('V3', shape, TP8)):.2f}" == ratio
    with pytest.raises(CheckpointError, match="no NextN layer"):
        drafting(planned("QWEN72"), TP8, shape, drafts, made)


def weights(parts: list[StepPhase]) -> float:
    return sum(part.bytes for part in parts if part.name != "attention")


def test_what_is_looked_up_costs_its_verification(batch: int = 4) -> None:
    shape = StepShape(batch, 1, 1024)
    made = drafting(planned("QWEN72"), ONE, shape, 3, DrafterPlanner("NGRAM", 4))
    assert made == phases("QWEN72", verified(shape, 3))


def test_what_drafts_of_other_weights_cost(tmp_path: Path) -> None:
    """Bytes of the head's and of the small model's own tensors, above those of the verification."""
    hidden, inner, vocab = QWEN72.hidden, 1024, 2048
    head = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": QWEN72.vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    }  # fmt: skip
    shape = StepShape(1, 1, 1)
    layer = 2 * 8 * 64 * hidden + 2 * 2 * 64 * hidden + 3 * hidden * inner

    def own(name: str, fields: dict[str, Any], drafts: int) -> float:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(head | fields))
        made = DrafterPlanner(name, 4, str(path))
        whole = weights(phases("QWEN72", verified(shape, drafts)))
        return weights(drafting(planned("QWEN72"), ONE, shape, drafts, made)) - whole

    assert own("STANDALONE", {}, 2) == 2 * 2 * (layer + QWEN72.vocab * hidden)
    assert own("EAGLE", {}, 2) == 2 * 2 * (layer + QWEN72.vocab * hidden + 2 * hidden * hidden)
    wider = hidden * 64 * (8 + 2 * 2)  # queries, keys and values of two vectors side by side
    each, once = layer + wider + vocab * hidden, 3 * hidden * hidden
    for drafts in (1, 3):
        assert own("EAGLE3", {"draft_vocab_size": vocab}, drafts) == 2 * (drafts * each + once)


# ---- prompts ----


def prompt_flops(of: str, tokens: int, kv: KVBytes | None = None) -> dict[str, float]:
    """FLOPs on one device of a prompt whose every token is scored: what the worked values count."""
    found: dict[str, float] = {}
    for part in phases(of, StepShape(1, tokens, tokens, scored=True), kv=kv):
        found[part.name] = found.get(part.name, 0.0) + part.bf16 + part.fp8
    return found


@pytest.mark.parametrize(("tokens", "products", "attention"), [(8192, 38, 21), (32768, 152, 339), (131072, 606, 5428)])
def test_prompts_of_v3(tokens: int, products: int, attention: int) -> None:
    """All products at FP8's rate, as the worked values have them: the plan's bound has the head once and 16-bit
    products at their own.
    """
    found = prompt_flops("V3", tokens)
    scores = found.pop("attention")
    assert round(1e3 * sum(found.values()) / (8 * 1979e12)) == pytest.approx(products, abs=1)
    assert 1e3 * scores / (8 * 989e12) == pytest.approx(attention, rel=0.01)
    total = sum(found.values()) / (8 * 1979e12) + scores / (8 * 989e12)
    assert 1e3 * total == pytest.approx(products + attention, rel=0.01)
    assert 8 * 1979e12 / planned("V3").on(ONE).flops_a_token() == pytest.approx(216e3, rel=2e-3)


@pytest.mark.parametrize(("tokens", "scores", "chosen"), [(8192, 2.1, 31.5), (32768, 34, 140), (131072, 543, 572)])
def test_prompts_of_v32(tokens: int, scores: float, chosen: float) -> None:
    assert V32.mla is not None and V32.indexer is not None
    found = prompt_flops("V32", tokens, FP8_INDEX)
    assert 1e3 * found["index"] / (8 * 1979e12) == pytest.approx(scores, rel=0.02)
    shape = StepShape(1, tokens, tokens)
    sparse = 61 * absorbed(V32.mla, 128, shape.chosen(V32.indexer.topk))
    assert 1e3 * sparse / (8 * 989e12) == pytest.approx(chosen, rel=0.01)
    assert found["attention"] == pytest.approx(min(sparse, 61 * decompressed(V32.mla, 128, shape)))


def test_where_sparse_attention_begins_to_pay() -> None:
    """34.8 GFLOPs of 2,048 latents and 1.0 MFLOPs of index scores against 5.0 MFLOPs of keys, for each position: at 8.7
    k of them.
    """
    assert V32.mla is not None and V32.indexer is not None
    flat = 61 * absorbed(V32.mla, 128, 2048)
    assert flat == pytest.approx(34.8e9, rel=1e-3)
    key = 61 * (decompressed(V32.mla, 128, StepShape(1, 1, 1)) - 2 * V32.indexer.heads * V32.indexer.dim)
    assert flat / key == pytest.approx(8.7e3, rel=0.01)


def test_chosen_positions_are_counted_one_by_one() -> None:
    for new, context, most in ((1, 10, 4), (5, 9, 4), (8, 8, 3), (3, 4, 9), (4, 20, 30), (6, 12, 9)):
        seen = range(context - new + 1, context + 1)
        assert StepShape(2, new, context).chosen(most) == 2 * sum(min(one, most) for one in seen)
        assert StepShape(2, new, context).pairs == 2 * sum(seen)
