"""Published formats: matrices that the producers' libraries wrote (data/formats/make.py) load as these libraries read
them, alone, in slices and in a model; what is broken or unknown is refused by name.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoints import CONFIGS as WRITTEN
from benchmarks.checkpoints import SPELLINGS, write
from tests.cpu import reference_model, zoo
from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from thalweg import LLM, SamplingParams
from thalweg.config.model import facts_of
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.weight_only.ref import FOUR_BITS, Codes, KernelCodes, dequantize, pack_nibbles, unpack_nibbles
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.models.catalog import assemble, read_facts
from thalweg.quant import awq, gptq, pairs, weight_only
from thalweg.quant.catalog import METHODS, NEVER_QUANTIZED, Declared, Stored, format_of
from thalweg.quant.packing import ASCENDING, pack_words, unpack_words
from thalweg.quant.scheme import Quantized, Take, TensorSpec
from thalweg.quant.weight_only import WeightOnly
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors

FOLDER = Path(__file__).parent / "data/formats"
TINY = Path(__file__).parents[2] / "models/tiny"
IDS = list(range(20))
Config = dict[str, Any]


def compressed(written: str, **weights: Any) -> Config:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True} | weights}
    top = {"quant_method": "compressed-tensors", "format": written, "quantization_status": "compressed"}
    return top | {"config_groups": {"group_0": group}}


def quark(**weight: Any) -> Config:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None}, "export": {}}


GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8, FP4 = {"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 4}
CONFIGS: dict[str, Config] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq_asym": GPTQ | {"sym": False},
    "gptq_sym": GPTQ,
    "gptq_v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_v2_desc_act": GPTQ
    | {"sym": False, "checkpoint_format": "gptq_v2", "desc_act": True, "dynamic": {"-:.*\\.experts\\..*": {}}},
    "ct_int4": compressed("pack-quantized", strategy="group", group_size=32),
    "ct_int4_g128": compressed("pack-quantized", strategy="group", group_size=128),
    "ct_int4_asym": compressed("pack-quantized", strategy="group", group_size=32, symmetric=False),
    "ct_int4_actorder": compressed("pack-quantized", strategy="group", group_size=32, actorder="group"),
    "ct_int4_channel": compressed("pack-quantized", strategy="channel"),
    "ct_int8": compressed("int-quantized", strategy="channel", num_bits=8),
    "ct_fp8": compressed("float-quantized", strategy="tensor", **FP8),
    "ct_fp8_channel": compressed("float-quantized", strategy="channel", **FP8),
    "ct_fp8_block": compressed("float-quantized", strategy="block", block_structure=[32, 32], **FP8),
    "ct_nvfp4": compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **FP4),
    "ct_mxfp4": compressed("mxfp4-pack-quantized", strategy="group", group_size=32, **FP4),
    "ct_mxfp8": compressed("mxfp8-quantized", strategy="group", group_size=32, **FP8),
    "modelopt_nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "modelopt_fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt_fp8_channel": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt_mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "quark_mxfp4": quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
    "quark_fp8": quark(dtype="fp8_e4m3", qscheme="per_tensor"),
    "quark_fp8_channel": quark(dtype="fp8_e4m3", qscheme="per_channel"),
}
SCATTERED = ("gptq_v2_desc_act", "ct_int4_actorder")
# the smallest slices of 64 rows and columns that are legal
LEGAL = {"awq": (8, 32), "gptq_asym": (8, 32), "ct_int4_asym": (8, 32), "ct_int4_g128": (1, 128)}
LEGAL |= {"gptq_sym": (8, 32), "gptq_v2": (8, 32), "gptq_v2_desc_act": (8, 8), "ct_int4_actorder": (1, 8)}
LEGAL |= {f"{of}_fp8{channel}": (1, 1) for of in ("modelopt", "quark") for channel in ("", "_channel")}
LEGAL |= {"ct_int8": (1, 1), "ct_fp8": (1, 1), "ct_fp8_channel": (1, 1), "ct_fp8_block": (1, 1)}
LEGAL |= {"ct_int4_channel": (1, 8), "ct_nvfp4": (1, 16), "modelopt_nvfp4": (1, 16)}
ROUNDED = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # the libraries' results


@cache
def matrices(name: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Of each matrix: tensors by their names behind the module's, and the library's numbers."""
    found: list[tuple[dict[str, Tensor], Tensor]] = []
    for key, tensor in sorted(load_bytes(gzip.decompress((FOLDER / f"{name}.safetensors.gz").read_bytes())).items()):
        number, part = key.split(".", 1)
        if int(number) == len(found):
            found.append(({}, tensor))
        stored, _ = found[-1]
        if part == "numbers":
            found[-1] = stored, tensor
        else:
            stored[part] = tensor
    return found


def decoded(config: Config, tensors: Mapping[str, Tensor], shape: tuple[int, int], take: Take = ()) -> Tensor:
    """The slice of the matrix `x`, by its own stored tensors."""
    weight, stream = TensorSpec("x.weight", shape, torch.bfloat16), InMemory(dict(tensors))
    scheme = Stored(stream.specs, config).of(weight)
    return scheme.decode(weight, list(stream.deliver(scheme.reads(weight, take), torch.device("cpu"))), take)


def of_module(stored: Mapping[str, Tensor], module: str = "x") -> dict[str, Tensor]:
    return {f"{module}.{part}": tensor for part, tensor in stored.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_matrix_is_what_its_producers_library_reads(name: str) -> None:
    for stored, numbers in matrices(name):
        got = decoded(CONFIGS[name], of_module(stored), tuple(numbers.shape))
        assert torch.allclose(got, numbers.float(), rtol=ROUNDED[numbers.dtype], atol=1e-6)
        assert len(got.unique()) > 8


@pytest.mark.parametrize("name", CONFIGS)
def test_a_slice_of_a_rank_is_read_by_itself(name: str) -> None:
    stored, numbers = matrices(name)[0]
    shape, size = (len(numbers), numbers.shape[1]), len(numbers)
    whole, (rows, columns) = decoded(CONFIGS[name], of_module(stored), shape), LEGAL.get(name, (1, 32))
    for take in ((slice(rows, 3 * rows),), (slice(None), slice(size - columns, size)), (slice(rows, None),)):
        assert torch.equal(decoded(CONFIGS[name], of_module(stored), shape, take), whole[take])
    if columns > 1:
        with pytest.raises(
            CheckpointError, match=rf"x\.weight is .* cuts \d+ columns .* let 1.* ranks share its {size}"
        ):
            decoded(CONFIGS[name], of_module(stored), shape, (slice(None), slice(columns // 2, columns)))


def swapped_nibbles(codes: Codes) -> Codes:
    return codes._replace(codes=codes.codes << 4 | codes.codes >> 4) if codes.kind in FOUR_BITS else codes


def without_zero_point(codes: Codes) -> Codes:
    if codes.kind not in ("int4", "uint4"):
        return codes
    zero = torch.zeros_like(codes.codes[:, :1]) if codes.scale is None else torch.zeros_like(codes.scale)
    scale = codes.scale if codes.scale is not None else torch.ones_like(zero, dtype=torch.float32)
    return codes._replace(kind="uint4", scale=scale, zero=zero.to(torch.uint8))


def transposed_scales(codes: Codes) -> Codes:
    scale = None if codes.scale is None else codes.scale.t().reshape(codes.scale.shape).contiguous()
    return codes._replace(scale=scale, row=None if codes.row is None else codes.row.flip(0))


FOUR = {name for name in CONFIGS if any(kind in name for kind in ("awq", "gptq", "int4", "nvfp4", "mxfp4"))}
ONE_SCALE = {"ct_fp8", "modelopt_fp8", "quark_fp8", "ct_int4_g128"}  # of the tensor, or of each row of the fixture
MUTATIONS: dict[str, tuple[Callable[[Codes], Codes], set[str]]] = {  # a wrong decoder, and the formats that it is of
    "nibble order": (swapped_nibbles, FOUR),
    "zero point": (without_zero_point, FOUR - {name for name in FOUR if "fp4" in name}),
    "scales": (transposed_scales, set(CONFIGS) - ONE_SCALE - {"ct_fp8_block"}),
}


def is_read_right(name: str, config: Config) -> bool:
    stored, numbers = matrices(name)[0]
    got = decoded(config, of_module(stored), tuple(numbers.shape))
    return torch.allclose(got, numbers.float(), rtol=ROUNDED[numbers.dtype], atol=1e-6)


def plant(patch: pytest.MonkeyPatch, mutate: Callable[[Codes], Codes]) -> None:
    for module in (weight_only, pairs, gptq):
        patch.setattr(module, "dequantize", lambda codes: dequantize(mutate(codes)))


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_wrong_decoder_is_caught_in_every_format(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, affected = MUTATIONS[bug]
    plant(monkeypatch, mutate)
    assert {name for name in CONFIGS if not is_read_right(name, CONFIGS[name])} == affected


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("gptq")])
def test_zero_points_of_the_other_version_of_gptq_are_caught(name: str) -> None:
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[CONFIGS[name].get("checkpoint_format", "gptq")]
    assert is_read_right(name, CONFIGS[name]) and not is_read_right(name, CONFIGS[name] | {"checkpoint_format": other})


@pytest.mark.parametrize("order", [ASCENDING[::-1], (1, 0, 3, 2, 5, 4, 7, 6), awq.NIBBLE])
def test_another_order_in_words_is_caught(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of codes, and of zero points, which compressed-tensors alone has in words."""
    wrong = ASCENDING if order == awq.NIBBLE else order
    monkeypatch.setattr(awq, "NIBBLE", wrong)
    for module in (gptq, pairs):
        monkeypatch.setattr(module, "unpack_words", lambda words, dim: unpack_words(words, dim, order))
    caught = {name for name in CONFIGS if not is_read_right(name, CONFIGS[name])}
    assert caught == {"awq", "ct_int4_asym", *(name for name in CONFIGS if name.startswith("gptq"))}


@pytest.mark.parametrize("bug", ["", *MUTATIONS])
def test_a_wrong_decoder_of_w4afp8_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups in a row, in two's complement; the wrong zero point is none of the format's 8."""
    generator = torch.Generator().manual_seed(6)
    nibbles = torch.randint(-8, 8, (64, 256), generator=generator)
    scale, expert = torch.rand(64, 2, generator=generator) + 0.1, "model.layers.1.mlp.experts.0.up_proj"
    pairs_of_codes = (nibbles[:, ::2] & 15 | (nibbles[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    stream = InMemory(of_module({"weight": pairs_of_codes, "weight_scale_inv": scale}, expert))
    weight = TensorSpec(f"{expert}.weight", (64, 256), torch.bfloat16)
    scheme = Stored(stream.specs, {"quant_method": "w4afp8", "group_size": 128}).of(weight)
    if bug:
        plant(monkeypatch, MUTATIONS[bug][0])
    got = scheme.decode(weight, list(stream.deliver(scheme.reads(weight, ()), torch.device("cpu"))), ())
    assert torch.equal(got, nibbles * scale.repeat_interleave(128, 1)) == (not bug)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the bundled model in a format."""
    root = tmp_path_factory.mktemp("written")

    @cache
    def folder(name: str) -> Path:
        write(TINY, root / name, WRITTEN[name])
        return root / name

    return folder


@pytest.mark.parametrize("bug", ["", *MUTATIONS])
def test_a_model_that_is_decoded_wrong_cannot_add(
    bug: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug:
        plant(monkeypatch, MUTATIONS[bug][0])
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 34), (905, 77), (481, 519))]
    with LLM(str(written("awq"))) as llm:
        texts = [out.outputs[0].text for out in llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=40))]
    right = [
        text == sum_ for text, sum_ in zip(texts, ("12 + 34 = 46", "905 + 77 = 982", "481 + 519 = 1000"), strict=True)
    ]
    assert all(right) if not bug else not any(right), texts


@pytest.mark.parametrize("names", SPELLINGS, ids="-".join)
def test_spellings_of_a_format_have_the_same_numbers(names: Sequence[str], written: Callable[[str], Path]) -> None:
    """So one of them is evaluated."""
    models = []
    for name in names:
        facts = read_facts(written(name))
        model = reference_model.build(facts, torch.float32)
        with Safetensors(written(name)) as stream:
            load(model, model.table(), stream, facts.quantization_config)
        models.append(dict(model.named_parameters()))
    for other in models[1:]:
        assert all(torch.equal(models[0][key], value) for key, value in other.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_holds_the_codes_that_kernels_multiply_by(name: str) -> None:
    stored, numbers = matrices(name)[0]
    weight, stream = TensorSpec("x.weight", tuple(numbers.shape), torch.bfloat16), InMemory(of_module(stored))
    scheme = Stored(stream.specs, CONFIGS[name]).of(weight)
    if name == "ct_fp8_block" or name in SCATTERED:  # blocks of 32 and scattered groups, which no kernel multiplies by
        assert isinstance(scheme, Quantized) and not scheme.holds((), weight.shape, False)
        return
    assert isinstance(scheme, WeightOnly) and scheme.holds((), weight.shape, False)
    tensors = list(stream.deliver(scheme.reads(weight, ()), torch.device("cpu")))
    held = scheme.pack(weight, tensors, ())
    assert {suffix: (tuple(t.shape), t.dtype) for suffix, t in held.items()} == scheme.parameters(weight.shape)
    parts = [held.get(suffix) for suffix in ("", "_scale", "_zero", "_row")]
    codes = natural(KernelCodes(scheme.codes.kind, *parts))  # type: ignore[arg-type]
    assert torch.equal(dequantize(codes), scheme.decode(weight, tensors, ()))


def natural(held: KernelCodes) -> Codes:
    """The inverse of `arranged`, element by element."""
    codes = held.codes
    if held.kind in FOUR_BITS:
        block, nibbles = 64 if held.columns % 128 else 128, unpack_nibbles(held.codes)
        places = [
            c // block * block + (c % block % (block // 4) // 2) * 8 + (c % 2) * 4 + c % block // (block // 4)
            for c in range(held.columns)
        ]
        codes = pack_nibbles(nibbles[..., places])
    scale, zero = (None if each is None else each.transpose(-1, -2) for each in (held.scale, held.zero))
    return Codes(held.kind, codes, scale, zero, held.row)


def test_layers_of_kernels_hold_experts_and_products_as_codes() -> None:
    """Experts of INT4 in stacks of codes, beside shared ones of another format, which are an MLP of their own."""
    int4, fp8 = matrices("ct_int4")[0], matrices("ct_fp8_channel")[0]
    config = compressed("mixed-precision")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config["config_groups"] = {
        "a": {"targets": ["re:.*experts\\.\\d.*"], "format": "pack-quantized", "weights": weights},
        "b": {"targets": ["re:.*shared.*"], "format": "float-quantized", "weights": FP8 | {"strategy": "channel"}},
    }
    facts = facts_of(model_config(64) | {"quantization_config": config}, "config.json")
    stored = dict[str, Tensor]()
    for source in reference_model.build(facts, torch.float32).table().sources():
        module = source.name.removesuffix(".weight")
        made = int4 if ".experts." in module else fp8 if "shared_experts" in module else None
        stored |= of_module(made[0], module) if made else {source.name: torch.zeros(source.shape)}
    stream, kernels = InMemory(stored), KernelConfig(decode="triton", prefill="triton")
    layers = KernelLayers(torch.bfloat16, torch.device("cpu"), kernels, schemes=Stored(stream.specs, config))
    model = assemble(facts, layers)
    load(model, model.table(), stream, config)
    moe = model.layers[1].mlp
    stacks = moe.experts.stacks()
    assert torch.equal(dequantize(natural(stacks.w13))[3], torch.cat([int4[1], int4[1]]))
    assert stacks.w2.codes.dtype == torch.uint8
    assert moe.shared.down.weight.dtype == torch.float8_e4m3fn and moe.shared.down.weight_row.shape == (64,)


def model_config(size: int) -> Config:
    """A DeepSeek-V3 most of whose matrices have this many rows and columns."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    small = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": size // 4, "v_head_dim": size // 4}
    small |= {"qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    small |= {"n_shared_experts": 1, "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    return zoo.draw_config("v3", 3) | dict.fromkeys(sizes, size) | small


Pack = Callable[[str, int], tuple[dict[str, Tensor], Tensor] | None]  # (module, number) → stored tensors by name


def check_model(config: Config, size: int, pack: Pack) -> None:
    """A model with packed matrices is the one with their numbers."""
    facts = facts_of(model_config(size) | {"quantization_config": config}, "config.json")
    quantized, plain = (reference_model.build(facts, torch.float32) for _ in range(2))
    generator, stored, numbers = torch.Generator().manual_seed(1), dict[str, Tensor](), dict[str, Tensor]()
    for number, source in enumerate(quantized.table().sources()):
        made = None
        if source.shape == (size, size) and not NEVER_QUANTIZED.search(source.name):
            made = pack(source.name.removesuffix(".weight"), number)
        if made is None:
            numbers[source.name] = stored[source.name] = torch.randn(source.shape, generator=generator) * 0.1
        else:
            numbers[source.name] = made[1].float()
            stored |= made[0]
    assert len(stored) > len(numbers) or len(stored) < len(numbers)  # some are packed
    load(quantized, quantized.table(), InMemory(stored), config)
    load(plain, plain.table(), InMemory(numbers))
    for (name, got), want in zip(quantized.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=8e-3, atol=1e-6), name
    logits = [Bench(model, 1).step([(0, IDS)])[0] for model in (quantized, plain)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 5e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_packed_weights_is_the_one_of_their_numbers(name: str) -> None:
    found = matrices(name)

    def pack(module: str, number: int) -> tuple[dict[str, Tensor], Tensor] | None:
        if "desc_act" in name and ".experts." in module:
            return None
        stored, numbers = found[number % len(found)]
        return of_module(stored, module), numbers

    check_model(CONFIGS[name], len(found[0][1]), pack)


W4AFP8 = {"quant_method": "w4afp8", "group_size": 128}


def w4afp8(stored: Mapping[str, Tensor], module: str, code: bool, scale: bool) -> dict[str, Tensor]:
    """compressed-tensors' codes are W4AFP8's with an offset. code, scale: whether they are named w1, w2 and w3."""
    experts, _, half = module.rpartition(".")
    other = f"{experts}.{ {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}[half] }"
    codes = (stored["weight_packed"].view(torch.uint8) ^ 0x88).view(torch.int8)
    return {
        f"{other if code else module}.weight": codes,
        f"{other if scale else module}.weight_scale_inv": stored["weight_scale"],
        f"{other}.input_scale": torch.ones(1),
    }


@pytest.mark.parametrize(("code", "scale"), [(False, False), (False, True), (True, True)])
def test_w4afp8_has_two_spellings(code: bool, scale: bool) -> None:
    stored, numbers = matrices("ct_int4_g128")[0]

    def pack(module: str, number: int) -> tuple[dict[str, Tensor], Tensor] | None:
        return (w4afp8(stored, module, code, scale), numbers) if ".experts." in module else None

    check_model(W4AFP8, 128, pack)


@pytest.mark.parametrize("bug", ["", "nibble order", "scales"])
def test_the_layout_of_gpt_oss_is_what_transformers_reads(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts in one tensor, gate and up rows interleaved; a wrong decoder is caught."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = matrices("quark_mxfp4")[0][0]
    codes, scales = stored["weight"].view(64, 2, 16), stored["weight_scale"]
    blocks = torch.stack([codes.roll(shift, 0) for shift in range(8)])
    made = {"gate_up_proj": (blocks.view(4, 128, 2, 16), torch.stack([scales] * 8).view(4, 128, 2))}
    made["down_proj"] = blocks[:4], torch.stack([scales] * 4)
    numbers = {
        half: convert_moe_packed_tensors(*(t.clone() for t in pair), dtype=torch.bfloat16).mT
        for half, pair in made.items()
    }

    def pack(module: str, number: int) -> tuple[dict[str, Tensor], Tensor] | None:
        if (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj", module)) is None:
            return None
        fused = {
            f"{found[1]}.{half}_{part}": tensor
            for half, pair in made.items()
            for part, tensor in zip(("blocks", "scales"), pair, strict=True)
        }
        rows = numbers["down_proj" if found[3] == "down" else "gate_up_proj"][int(found[2])]
        return fused, rows if found[3] == "down" else rows[0 if found[3] == "gate" else 1 :: 2]

    if bug:
        plant(monkeypatch, MUTATIONS[bug][0])
    with pytest.raises(AssertionError) if bug else nullcontext():
        check_model({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 64, pack)


def test_gptq_of_scattered_groups_and_of_both_versions() -> None:
    generator = torch.Generator().manual_seed(3)
    codes_KN, zero_GN = (torch.randint(0, 16, (rows, 64), generator=generator) for rows in (64, 2))
    scale_GN, index = torch.rand(2, 64, generator=generator).half(), torch.randint(0, 2, (64,), generator=generator)
    want = ((codes_KN - zero_GN[index]) * scale_GN[index].float()).t()
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    for version, shift in (("gptq", -1), ("gptq_v2", 0)):  # a zero point of 0 is stored as 15
        words = pack_words(codes_KN, 0), pack_words(zero_GN + shift & 15, 1)
        stored = dict(zip(("qweight", "qzeros", "scales", "g_idx"), (*words, scale_GN, index.int()), strict=True))
        for take in ((), (slice(8, 24), slice(40, 64))):
            got = decoded(config | {"checkpoint_format": version}, of_module(stored), (64, 64), take)
            assert torch.equal(got, want[take])
    stored["g_idx"] = stored["g_idx"] + 1
    with pytest.raises(CheckpointError, match=r"x\.g_idx names a group beyond the 2"):
        decoded(config | {"checkpoint_format": version}, of_module(stored), (64, 64))


@pytest.mark.parametrize(
    ("config", "kind", "scale"),
    [
        ({"quant_method": "blockwise_int8", "weight_block_size": [16, 32]}, torch.int8, (4, 2)),
        ({"quant_method": "w8a8_int8"}, torch.int8, (64, 1)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, torch.float8_e4m3fn, ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, torch.float8_e4m3fn, ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, torch.float8_e4m3fn, (64,)),
        (quark(dtype="fp8_e4m3", qscheme="per_channel"), torch.float8_e4m3fn, (64,)),
    ],
)  # fmt: skip
def test_eight_bits_with_every_shape_of_scales(config: Config, kind: torch.dtype, scale: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(-100, 100, (64, 64), generator=generator).to(kind)
    scales = torch.rand(scale, generator=generator) + 0.1
    suffix = "weight_scale_inv" if config["quant_method"] == "blockwise_int8" else "weight_scale"
    rows, columns = (64 // (scale[0] if scale else 1), 64 // (scale[1] if len(scale) > 1 else 1))
    wide = scales.reshape(64 // rows, 64 // columns).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    stored = of_module({"weight": codes, suffix: scales, "input_scale": torch.ones(())})
    assert torch.equal(decoded(config, stored, (64, 64)), codes.float() * wide)
    take = slice(16, 40), slice(32, 64)
    assert torch.equal(decoded(config, stored, (64, 64), take), (codes.float() * wide)[take])


def test_rules_of_names_decide_by_each_producers_syntax() -> None:
    def kinds(config: Config, *modules: str) -> list[str]:
        found = format_of(config)
        return [found.scheme(module).name for module in modules]

    mixed = compressed("mixed-precision") | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    mixed["config_groups"] = {
        "a": {"targets": ["Linear"], "format": "pack-quantized", "weights": weights},
        "b": {"targets": ["re:.*shared.*"], "format": "float-quantized", "weights": FP8 | {"strategy": "channel"}},
    }
    layer = "model.layers.1"
    assert kinds(mixed, f"{layer}.self_attn.o_proj", f"{layer}.mlp.shared_experts.up_proj", f"{layer}.mlp.up_proj") == [
        "unquantized", "float-quantized", "pack-quantized"
    ]  # fmt: skip
    layers = {
        f"{layer}.mlp.experts": {"quant_algo": "W4A8_AWQ"},
        f"{layer}.self_attn.*": {"quant_algo": "FP8_BLOCK_SCALES"},
    }
    modelopt = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    }
    modelopt["quantization"] |= {"exclude_modules": ["*.kv_b_proj"]}
    names = f"{layer}.mlp.experts.3.up_proj", f"{layer}.self_attn.o_proj", f"{layer}.self_attn.kv_b_proj", "lm_head"
    assert kinds(modelopt, *names) == [
        "w4afp8", "fp8_block", "unquantized", "unquantized"
    ]  # fmt: skip
    gptq = CONFIGS["gptq_asym"] | {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"group_size": 64}}}
    assert kinds(gptq, "a.down_proj", "a.gate_proj") == ["unquantized", "gptq"]
    assert format_of(gptq).scheme("a.up_proj").group == 64  # type: ignore[attr-defined]
    awq = CONFIGS["awq"] | {"modules_to_not_convert": ["mlp.gate"]}
    assert kinds(awq, "model.layers.1.mlp.gate", "model.layers.1.mlp.up_proj") == ["unquantized", "awq"]
    assert kinds(W4AFP8, f"{layer}.mlp.experts.0.w1", f"{layer}.mlp.shared_experts.up_proj") == ["w4afp8", "fp8_block"]


@pytest.mark.parametrize("nested", [True, False])
def test_files_beside_config_json(tmp_path: Path, nested: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(64)))
    modelopt = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    file = "hf_quant_config.json" if nested else "quantize_config.json"
    (tmp_path / file).write_text(json.dumps(modelopt if nested else {"bits": 4, "group_size": 64, "desc_act": False}))
    found = format_of(read_facts(tmp_path).quantization_config)
    assert found.scheme("model.layers.1.mlp.up_proj").name == ("NVFP4" if nested else "gptq")
    if nested:
        config = model_config(64) | {"quantization_config": CONFIGS["modelopt_mxfp8"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            CheckpointError, match=r"hf_quant_config\.json says quant_algo 'NVFP4', and config\.json 'MXFP8'"
        ):
            read_facts(tmp_path)


@pytest.mark.parametrize(
    ("file", "theirs", "ours", "message"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "awq", "quant_algo 'NVFP4', .* 'awq'"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "MIXED_PRECISION"}}, "fp8", "quant_algo .* 'fp8'"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4", "group_size": 32}},
            "modelopt_nvfp4",
            "group_size 32, .* 16",
        ),
        ("quantize_config.json", {"bits": 4, "desc_act": True}, "gptq_asym", "desc_act True, .* False"),
        ("quantize_config.json", {"bits": 8}, "gptq_asym", "bits 8, .* 4"),
    ],
)
def test_files_that_contradict_config_json_are_named(
    tmp_path: Path, file: str, theirs: Config, ours: str, message: str
) -> None:
    stated = CONFIGS.get(ours, {"quant_method": ours, "weight_block_size": [128, 128]})
    (tmp_path / "config.json").write_text(json.dumps(model_config(64) | {"quantization_config": stated}))
    (tmp_path / file).write_text(json.dumps(theirs))
    with pytest.raises(CheckpointError, match=rf"{file} says {message}: remove the one that is wrong"):
        read_facts(tmp_path)


def test_an_unknown_format_names_its_first_tensor(tmp_path: Path) -> None:
    config = model_config(64) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.norm.weight": torch.ones(64),
        "model.layers.0.mlp.up_proj.weight": torch.ones(8, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"'bitsandbytes' is not supported; .* first quantized tensor is model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(CheckpointError, match=message):
        read_facts(tmp_path)


def changed(name: str, **change: Any) -> Config:
    return json.loads(json.dumps(CONFIGS[name])) | change


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' is not supported; there is fp8"),
        (changed("awq", version="gemv"), "version 'gemv' is not supported; there is gemm"),
        (changed("awq", bits=3), "bits 3 is not supported"),
        (changed("gptq_asym", bits=8), "bits 8 is not supported"),
        (changed("gptq_asym", checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (changed("gptq_asym", dynamic={"+:(": {}}), "no regular expression"),
        (changed("ct_int4", format="marlin-24"), "format 'marlin-24' is not supported; there is pack-quantized"),
        (changed("ct_int4", format="nvfp4-pack-quantized"), "type 'int' is not supported in nvfp4-pack-quantized"),
        (changed("ct_int4", config_groups={}), "config_groups must be an object"),
        (compressed("int-quantized", strategy="channel", num_bits=8, symmetric=False), "symmetric false"),
        (compressed("float-quantized", strategy="channel", num_bits=8), "8 bits of 'int' are not float-quantized"),
        (changed("modelopt_nvfp4", quant_algo="W4A16_AWQ"), "quant_algo 'W4A16_AWQ' is not supported; there is FP8"),
        (quark(dtype="int4", qscheme="per_group", group_size=32), r"int4 per_group.* is not supported; there is"),
        (W4AFP8 | {"group_size": 64}, "group_size 64 is not supported: w4afp8 has 128"),
        ({"quant_method": "fp8", "activation_scheme": "wrong"}, "activation_scheme 'wrong'"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_supported_names_the_field(config: Config, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        format_of(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_truncated_or_missing_tensor_is_named(name: str) -> None:
    stored, numbers = matrices(name)[0]
    read = {
        part: t for part, t in stored.items() if part not in ("g_idx", "weight_g_idx", "weight_shape", "input_scale")
    }
    for part, tensor in read.items():
        for damaged in (None, torch.cat([tensor.flatten(), tensor.flatten()[:1]]).clone()):
            broken = (
                {**stored, part: damaged} if damaged is not None else {p: t for p, t in stored.items() if p != part}
            )
            if damaged is None and len(broken) and not any(p.startswith(("weight", "qweight")) for p in broken):
                continue
            message = rf"x\.{part}\b.*(download|config\.json)" if damaged is not None else r"x\b.*"
            with pytest.raises(CheckpointError, match=message):
                check_loads(CONFIGS[name], of_module(broken), tuple(numbers.shape))


@pytest.mark.parametrize("name", [name for name in CONFIGS if LEGAL.get(name) != (1, 1)])
def test_scales_in_another_order_are_refused(name: str) -> None:
    """As many numbers, in rows that are not the format's."""
    stored, numbers = matrices(name)[0]
    part = "scales" if "scales" in stored else "weight_scale"
    scales = stored[part].t() if stored[part].shape[0] != stored[part].shape[1] else stored[part].reshape(1, -1)
    with pytest.raises(CheckpointError, match=rf"x\.{part}: .* x\.weight .*: download both again"):
        check_loads(CONFIGS[name], of_module({**stored, part: scales.contiguous()}), tuple(numbers.shape))


def test_a_packed_tensor_that_ends_early_names_its_file(tmp_path: Path) -> None:
    config, stored = CONFIGS["ct_int4"], matrices("ct_int4")[0][0]
    (tmp_path / "config.json").write_text(json.dumps(model_config(64) | {"quantization_config": config}))
    save_file(of_module(stored, "model.layers.0.mlp.up_proj"), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, len(whole) // 2):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated .*: download it again"):
            Safetensors(tmp_path)


def test_experts_with_groups_in_another_order_are_refused_by_name() -> None:
    """Kernels of experts read groups in order. Other weights of such a checkpoint are dequantized."""
    config = CONFIGS["gptq_asym"] | {"desc_act": True}
    stored, numbers = matrices("gptq_asym")[0]
    assert decoded(config, of_module(stored), (64, 64)).shape == (64, 64)
    weight = TensorSpec("model.layers.1.mlp.experts.0.up_proj.weight", (64, 64), torch.bfloat16)
    stream = InMemory(of_module(stored, weight.name.removesuffix(".weight")))
    for schemes in (Stored(stream.specs, config), Declared(config)):
        with pytest.raises(CheckpointError, match=rf"{weight.name}: gptq with desc_act true .* desc_act false"):
            schemes.of(weight).reads(weight, ())


def check_loads(config: Config, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    """Loads the matrix `x` as the only one of a module."""
    from thalweg.weights.table import WeightRule, WeightTable

    module = torch.nn.Linear(shape[1], shape[0], bias=False)
    table = WeightTable([WeightRule(TensorSpec("x.weight", shape, torch.float32), "weight")])
    load(module, table, InMemory(dict(tensors)), config)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("awq", "ct_int4", r"x\.qweight: config\.json says that x\.weight is pack-quantized"),
        ("ct_int4", "awq", r"x\.weight_packed: config\.json says that x\.weight is awq"),
        ("ct_int8", "ct_fp8", r"x\.weight is torch\.int8; float-quantized weights are"),
        ("ct_nvfp4", "ct_mxfp4", r"x\.weight_scale: torch\.float8_e4m3fn .* mxfp4-pack-quantized"),
        ("modelopt_nvfp4", "quark_mxfp4", r"x\.weight_scale: .* does not fit"),
        ("ct_int4", "ct_int4_asym", r"x is pack-quantized, but x\.weight_zero_point is missing"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_configuration_are_named(name: str, config: str, message: str) -> None:
    stored, numbers = matrices(name)[0]
    with pytest.raises(CheckpointError, match=message):
        check_loads(CONFIGS[config], of_module(stored), tuple(numbers.shape))


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_of_every_format_are_sane(name: str) -> None:
    config = {**CONFIGS[name], "group_size": 32} if name == "gptq_asym" else CONFIGS[name]
    if name == "ct_int4_g128":
        config = W4AFP8 | {}
    size = 128 if config["quant_method"] == "w4afp8" else 64
    facts = facts_of(model_config(size) | {"quantization_config": config, "v_head_dim": 32}, "config.json")
    model = reference_model.build(facts, torch.float32)
    load_random(model, model.table(), config, 1, False)
    hidden = Bench(model, 1).hidden([(0, [i % facts.vocab for i in range(40)])])[0]
    assert hidden.isfinite().all() and 0.2 < float(hidden.std()) < 4


def test_every_method_has_a_test() -> None:
    tested = {config["quant_method"] for config in CONFIGS.values()} | {
        "w4afp8",
        "mxfp4",
        "fp8",
        "blockwise_int8",
        "w8a8_int8",
    }
    assert {method.partition("_mixed")[0].partition("_fp4")[0] for method in METHODS} == tested
