"""Layers in plain torch round activations as the checkpoint declares: W4AFP8's experts and INT8 products against the
formats' formulas, with torch's own e4m3 and its product of INT8 matrices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from tests.cpu.test_formats import compressed, model_config
from thalweg.config.model import MoeFacts, facts_of
from thalweg.kernels.fp8_block.ref import dequantize as dequantize_blocks
from thalweg.kernels.quantize.ref import Activations, rounded_rows
from thalweg.layers.linear import Linear, PackedShard
from thalweg.layers.reference import ReferenceLayers
from thalweg.layers.rounded import RoundedLinear
from thalweg.models.catalog import assemble
from thalweg.models.traced import TracedModel
from thalweg.quant.catalog import Declared, Stored, format_of
from thalweg.quant.scheme import TensorSpec
from thalweg.quant.weight_only import WeightOnly
from thalweg.weights.loader import load
from thalweg.weights.random import RandomStream, load_random, random_tensors
from thalweg.weights.table import table_of

CPU = torch.device("cpu")
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_INPUTS = INT8_INPUTS | {"type": "float"}


def with_inputs(config: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"input_activations": inputs}}}


CHANNEL = with_inputs(compressed("int-quantized", strategy="channel", num_bits=8), INT8_INPUTS)
INT4 = with_inputs(compressed("pack-quantized", strategy="group", group_size=128), FP8_INPUTS)
FP8 = {"num_bits": 8, "type": "float"}
FP8_CHANNEL, FP8_TENSOR = (
    with_inputs(compressed("float-quantized", strategy=strategy, **FP8), FP8_INPUTS)
    for strategy in ("channel", "tensor")
)
BLOCKS = {"quant_method": "blockwise_int8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quark_fp8(inputs: dict[str, Any] | None) -> dict[str, Any]:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}}


def factory(config: dict[str, Any]) -> ReferenceLayers:
    return ReferenceLayers(torch.float32, CPU, schemes=Declared(config))


def stored(module: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """Loads a random checkpoint, and returns its tensors."""
    table = table_of(module)
    stream = RandomStream(random_tensors(table, config, False), 1)
    load_random(module, table, config, 1, False)
    return {name: tensor.slice((), 1, CPU) for name, tensor in stream._tensors.items()}


def numbers() -> Tensor:
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    x[3, 7], x[5] = 90.0, 0.0
    return x


@pytest.mark.parametrize("config", [CHANNEL, {"quant_method": "w8a8_int8"}], ids=["compressed-tensors", "w8a8_int8"])
def test_int8_rows_are_multiplied_as_torch_multiplies_int8(config: dict[str, Any]) -> None:
    linear, x = factory(config).row("m", (128, 256)), numbers()
    tensors = stored(linear, config)
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-10) / 127
    products = torch._int_mm((x / scale).round().to(torch.int8), tensors["m.weight"].t())
    want = products.double() * scale.double() * tensors["m.weight_scale"].double().view(1, -1)
    assert isinstance(linear, RoundedLinear)
    assert torch.allclose(linear.forward(x).double(), want, rtol=1e-5, atol=1e-6)
    assert torch.allclose(linear.add_(x[:, :128].clone(), x).double(), want + x[:, :128], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [FP8_CHANNEL, FP8_TENSOR], ids=["channel", "tensor"])
def test_fp8_rows_are_multiplied_as_torch_multiplies_fp8(config: dict[str, Any]) -> None:
    linear, x = factory(config).row("m", (128, 256)), numbers()
    tensors = stored(linear, config)
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-4) / 448
    by_row = tensors["m.weight_scale"].float().view(1, -1).expand(1, 128)
    want = torch._scaled_mm(
        (x / scale).to(torch.float8_e4m3fn),
        tensors["m.weight"].t(),
        scale,
        by_row.contiguous(),
        out_dtype=torch.bfloat16,
    )
    assert isinstance(linear, RoundedLinear)
    assert torch.allclose(linear.forward(x), want.float(), rtol=1e-2, atol=1e-2 * float(want.abs().max()))
    plain = x @ (tensors["m.weight"].float() * by_row.t()).t()
    assert not torch.allclose(plain, linear.forward(x), rtol=1e-4, atol=1e-4), "activations are rounded"


def test_int8_blocks_are_summed_by_blocks() -> None:
    linear, x = factory(BLOCKS).row("m", (256, 256)), numbers()
    tensors = stored(linear, BLOCKS)
    groups, scale = x.view(40, 2, 128), tensors["m.weight_scale_inv"].double()
    by = groups.abs().amax(2).clamp_min(1e-10) / 127
    want = torch.zeros(40, 256, dtype=torch.float64)
    for g in range(2):
        codes = (groups[:, g] / by[:, g : g + 1]).round().to(torch.int8)
        products = torch._int_mm(codes, tensors["m.weight"][:, 128 * g : 128 * g + 128].t())
        want += products * by[:, g : g + 1].double() * scale[:, g].repeat_interleave(128)
    assert torch.allclose(linear.forward(x).double(), want, rtol=1e-5, atol=1e-6)


def test_parts_of_a_packed_layer_round_each_as_it_is_stored() -> None:
    config = CHANNEL | {"ignore": ["b"]}
    layers, x = factory(config), numbers()
    parts = [PackedShard(name, 64) for name in ("a", "b", "c")]
    linear = layers.packed(parts, 256)
    tensors = stored(linear, config)
    seen = rounded_rows(x, "int8", 0, None)
    numbers_of = {
        name: tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
        if name != "b"
        else tensors["b.weight"]
        for name in "abc"
    }
    for name, got in zip("abc", linear.split(x), strict=True):
        want = (x if name == "b" else seen) @ numbers_of[name].float().t()
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), name
    assert not torch.allclose(linear.split(x)[1], seen @ numbers_of["b"].float().t(), atol=1e-4)
    assert isinstance(layers.packed(parts[1:2], 256), Linear)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_w4afp8_experts_are_their_formula(scheme: str) -> None:
    """y = a · Σ_groups s[n, g] · Σ_k e4m3(x / a) · code, with a of each token or the largest input_scale."""
    config = {"quant_method": "w4afp8", "activation_scheme": scheme}
    moe = MoeFacts(experts=4, shared=0, topk=2, intermediate=128, method="greedy", renormalize=True, sparse=(True,))
    block = factory(config).moe(0, "mlp", moe, 256)
    tensors, x = stored(block, config), numbers()
    for name in ("w1", "w2", "w3"):
        assert (f"mlp.experts.0.{name}.input_scale" in tensors) == (scheme == "static")

    def static(*names: str) -> Tensor:
        return torch.stack([tensors[f"mlp.experts.{e}.{name}.input_scale"] for e in range(4) for name in names]).max()

    def seen(x: Tensor, *names: str) -> Tensor:
        a = static(*names) if scheme == "static" else x.abs().amax(1, keepdim=True).clamp_min(1e-4) / 448
        return (x / a).clamp(-448, 448).to(torch.float8_e4m3fn).double() * a.double()

    def weight(expert: int, half: str) -> Tensor:
        codes, scale = (tensors[f"mlp.experts.{expert}.{half}_proj.{part}"] for part in ("weight", "weight_scale_inv"))
        nibbles = torch.stack((codes << 4 >> 4, codes >> 4), -1).flatten(1)  # int8: shifts keep the sign
        return nibbles.double() * scale.double().repeat_interleave(128, 1)

    logits = x @ tensors["mlp.gate.weight"].float().t()
    share, ids = logits.softmax(1).topk(2)
    share, want = share / share.sum(1, keepdim=True), x.double()
    for expert in range(4):
        gate, up = (seen(x, "w1", "w3") @ weight(expert, half).t() for half in ("gate", "up"))
        y = seen((F.silu(gate) * up).float(), "w2") @ weight(expert, "down").t()
        want = want + y * (share * (ids == expert)).sum(1, keepdim=True).double()
    got = x.clone()
    block.add_(got, x, None)
    difference = (got.double() - want).norm() / (want - x.double()).norm()
    assert float(difference) < 2e-3  # a sum in another order moves a code
    plain = reference_of_codes(moe, config, x)
    assert float((plain - want).norm() / (want - x.double()).norm()) > 1e-2, "rounding shows"


def reference_of_codes(moe: MoeFacts, config: dict[str, Any], x: Tensor) -> Tensor:
    """The same experts with inputs as they are."""
    block = ReferenceLayers(torch.float32, CPU).moe(0, "mlp", moe, 256)
    load_random(block, table_of(block), config, 1, False)
    out = x.clone()
    block.add_(out, x, None)
    return out.double()


def test_static_scales_are_found_by_both_spellings() -> None:
    config = {"quant_method": "w4afp8", "activation_scheme": "static"}
    moe = MoeFacts(experts=2, shared=0, topk=1, intermediate=128, method="greedy", renormalize=True, sparse=(True,))
    tensors = stored(factory(config).moe(0, "mlp", moe, 128), config)
    for names in ({}, {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}):
        spelled = {".".join(names.get(part, part) for part in name.split(".")): tensors[name] for name in tensors}
        stream = InMemory(spelled)
        layers = ReferenceLayers(torch.float32, CPU, schemes=Stored(stream.specs, config))
        block = layers.moe(0, "mlp", moe, 128)
        load(block, table_of(block), stream, config)
        assert torch.equal(block.experts.inputs.scales[2, 1:], tensors["mlp.experts.1.w2.input_scale"])


def rounding_of(config: dict[str, Any], module: str = "model.layers.1.mlp.experts.0.up_proj") -> Activations | None:
    scheme = format_of(config).scheme(module)
    assert isinstance(scheme, WeightOnly)
    assert scheme.quantizes_activations == (scheme.activations is not None) and not scheme.reads_codes
    assert scheme.activations is not None or scheme.note or "input_activations" not in str(config)
    return scheme.activations


def test_what_is_declared_decides() -> None:
    e4m3, int8 = Activations("e4m3"), Activations("int8")
    assert rounding_of({"quant_method": "w4afp8"}) == e4m3
    assert rounding_of({"quant_method": "w4afp8", "activation_scheme": "static"}) == Activations("e4m3", 0, True)
    assert rounding_of({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}) == e4m3
    assert rounding_of(BLOCKS) == Activations("int8", 128) and rounding_of({"quant_method": "w8a8_int8"}) == int8
    assert rounding_of(CHANNEL) == int8 and rounding_of(INT4) == e4m3
    assert rounding_of(FP8_CHANNEL) == rounding_of(FP8_TENSOR) == e4m3
    assert rounding_of({"quant_method": "fp8", "activation_scheme": "dynamic"}) == e4m3
    assert rounding_of({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}) == e4m3
    assert rounding_of(quark_fp8({"is_dynamic": True, "qscheme": "per_channel"})) == e4m3
    assert rounding_of(quark_fp8(None)) is None
    for config in (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        quark_fp8({"is_dynamic": False, "qscheme": "per_tensor"}),
    ):
        scheme = format_of(config).scheme("m")
        assert isinstance(scheme, WeightOnly) and scheme.activations is None and "16-bit" in scheme.note, config
    assert rounding_of(compressed("pack-quantized", strategy="group", group_size=128)) is None  # W4A16
    blocks = compressed("int-quantized", strategy="block", block_structure=[128, 128], num_bits=8)
    by_block = INT8_INPUTS | {"strategy": "group", "group_size": 128}
    assert rounding_of(with_inputs(blocks, by_block)) == Activations("int8", 128)
    for config, inputs in (
        (CHANNEL, INT8_INPUTS | {"dynamic": False}),
        (CHANNEL, INT8_INPUTS | {"strategy": "tensor"}),
        (CHANNEL, INT8_INPUTS | {"symmetric": False}),
        (CHANNEL, by_block),
        (INT4, INT8_INPUTS),
        (FP8_TENSOR, FP8_INPUTS | {"strategy": "tensor", "dynamic": False}),
        (compressed("float-quantized", strategy="group", group_size=128, **FP8), FP8_INPUTS),
        (compressed("pack-quantized", strategy="group", group_size=64), FP8_INPUTS),
    ):
        scheme = format_of(with_inputs(config, inputs)).scheme("m")
        assert isinstance(scheme, WeightOnly) and scheme.activations is None
        assert "16-bit activations, and not its input_activations" in scheme.note
    for other in ({"is_dynamic": False}, {"activation_scheme": "static"}):
        scheme = format_of({"quant_method": "w8a8_int8"} | other).scheme("m")
        assert isinstance(scheme, WeightOnly) and scheme.activations is None and "16-bit" in scheme.note
    assert rounding_of({"quant_method": "blockwise_int8", "weight_block_size": [64, 64]}) is None


def test_weights_that_no_kernel_multiplies_round_nothing() -> None:
    """A GPU dequantizes them, and multiplies activations as they are."""
    scheme = format_of(INT4).scheme("m")
    assert isinstance(scheme, WeightOnly) and scheme.holds((), (64, 256), False)
    cut = (slice(None), slice(0, 64))
    assert not scheme.holds(cut, (64, 256), False)
    weight = TensorSpec("m.weight", (64, 256), torch.float32)
    assert factory(INT4).kernel_scheme(weight, cut) is None
    assert isinstance(factory(CHANNEL).row("m", (64, 96)), Linear)


@pytest.mark.parametrize("config", [CHANNEL, {"quant_method": "w4afp8", "activation_scheme": "static"}])
def test_a_captured_step_rounds_the_same(config: dict[str, Any]) -> None:
    facts = facts_of(model_config(128) | {"quantization_config": config}, "config.json")
    logits = []
    for is_traced in (False, True):
        model = assemble(facts, factory(config))
        load_random(model, model.table(), config, 1, False)
        bench = Bench(model, 1, trace=is_traced)
        assert isinstance(bench.model, TracedModel) == is_traced
        bench.step([(0, list(range(20)))])
        logits.append(bench.step([(0, [7])])[0])
    assert torch.equal(*logits)


def test_fp8_blocks_stay_as_they_are() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    linear, x = factory(config).row("m", (128, 256)), numbers()
    tensors = stored(linear, config)
    weight = dequantize_blocks(tensors["m.weight"], tensors["m.weight_scale_inv"], (128, 128), torch.float32)
    assert isinstance(linear, Linear) and torch.allclose(linear.forward(x), x @ weight.t(), rtol=1e-5, atol=1e-5)
