"""Writes the fixtures of this folder: matrices that the producers' own libraries packed, and the numbers that these
libraries unpack them to. Run once; the libraries are no dependency of the tests.

    python tests/cpu/data/formats/make.py FOLDER

FOLDER has these packages, unpacked without their dependencies: compressed-tensors 0.20.0 with loguru (ct), autoawq
0.2.7.post3, auto-gptq 0.7.1 (gptq), GPTQModel 7.7.0's sources (gptqmodel), nvidia-modelopt 0.47.0, amd-quark 0.13, and
compressed-tensors 0.9.4 with loguru (ct-0.9.4): later ones carry weight_g_idx, and do not read it.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

HERE = Path(__file__).parent
SIZE, COPIES = 64, 2
BOTH = ("awq", "gptq_asym", "ct_int4", "ct_int4_asym", "ct_nvfp4", "ct_mxfp4")  # of the others one matrix
Stored = tuple[dict[str, Tensor], Tensor]  # tensors by their name behind the module's, and numbers


class Absent:
    """Packages by their files alone, without what their `__init__` imports; other missing modules are mocks."""

    def __init__(self, folder: Path, roots: tuple[str, ...]) -> None:
        self.folder, self.roots = folder, roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.roots:
            return None
        place = self.folder.joinpath(*name.split("."))
        if place.is_dir():
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: _missing(name)


def _missing(name: str) -> Any:
    if name.startswith("__") and name != "__version__":
        raise AttributeError(name)
    return "0" if name == "__version__" else MagicMock()


def load(name: str, folder: Path) -> Any:
    """A module of a package in this folder; packages that are not there are mocks."""
    sys.meta_path.insert(0, Absent(folder, (name.split(".")[0],)))
    sys.path.insert(0, str(folder))
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name is not None and error.name.split(".")[0] != name.split(".")[0], error
            sys.modules[error.name] = MagicMock()


def linear(generator: torch.Generator, size: int = SIZE) -> nn.Linear:
    layer = nn.Linear(size, size, bias=False)
    layer.weight.data = torch.randn(size, size, generator=generator) * 0.05
    return layer


def groups(weight_NK: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [N, K / group] as GPTQ and AWQ round to 4 bits."""
    blocks = weight_NK.unflatten(1, (-1, group))
    if symmetric:
        scale = blocks.abs().amax(2) / 7
        return scale, torch.full_like(scale, 8)
    low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    scale = (high - low) / 15
    return scale, (-low / scale).round()


def awq(folder: Path, generator: torch.Generator) -> Stored:
    packing = load("awq.utils.packing_utils", folder)
    gemm = load("awq.modules.linear.gemm", folder)
    layer = linear(generator)
    scale, zero = groups(layer.weight.data, 32, False)
    packed = gemm.WQLinear_GEMM.from_linear(layer.half(), 4, 32, False, scale.t().half(), zero.t().half())
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return stored, packing.dequantize_gemm(*(stored[name] for name in ("qweight", "qzeros", "scales")), 4, 32).t()


def gptq(folder: Path, generator: torch.Generator, symmetric: bool, version: int = 1) -> Stored:
    quantized = load("auto_gptq.nn_modules.qlinear.qlinear_cuda_old", folder)
    layer = linear(generator).half()
    scale, zero = groups(layer.weight.data.float(), 32, symmetric)
    zero = zero.clamp(min=1)  # its words overflow at 0
    packed = quantized.QuantLinear(4, 32, SIZE, SIZE, False)
    packed.pack(layer, scale.half().float(), zero.clone(), None)
    codes = (
        (layer.weight.data.float().unflatten(1, (-1, 32)) + (zero * scale.half())[..., None]) / scale.half()[..., None]
    ).round()
    numbers = ((codes.int() & 15) - zero[..., None]) * scale.half().float()[..., None]
    stored = {name: getattr(packed, name).contiguous() for name in ("qweight", "qzeros", "scales", "g_idx")}
    stored["scales"] = stored["scales"].half()
    return stored, numbers.flatten(1)


def gptqmodel(folder: Path, generator: torch.Generator, is_scattered: bool) -> Stored:
    """In the format gptq_v2, which the library packs and unpacks itself. is_scattered: as with desc_act."""
    name = "gptqmodel.nn_modules.qlinear"
    sys.meta_path.insert(0, Absent(folder, ("gptqmodel",)))
    place = folder.joinpath(*name.split("."))
    spec = importlib.util.spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])
    assert spec is not None and spec.loader is not None
    for needed in ("adapter.adapter", "models._const", "quantization", "utils.backend", "utils.env", "utils.logger"):
        sys.modules[f"gptqmodel.{needed}"] = MagicMock()
    for needed in ("planar_packing", "safe"):
        sys.modules[f"gptqmodel.utils.{needed}"] = MagicMock()
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    packed = module.PackableQuantLinear.__new__(module.PackableQuantLinear)
    nn.Module.__init__(packed)
    fields = {"bits": 4, "maxq": 15, "planar": False, "enable_wf_unsqueeze": True, "dequant_dtype": torch.int8}
    fields |= {"pack_dtype_bits": 32, "pack_factor": 8, "pack_np_math_dtype": np.uint32, "pack_np_dtype": np.int32}
    vars(packed).update(fields | {"in_features": SIZE, "out_features": SIZE})
    layer, order = linear(generator), torch.arange(SIZE)
    if is_scattered:
        order = torch.randperm(SIZE, generator=generator)
    scale, zero = groups(layer.weight.data[:, order], 32, False)
    index = torch.empty(SIZE, dtype=torch.int32)
    index[order] = torch.arange(SIZE, dtype=torch.int32) // 32
    module.THREADPOOLCTL.threadpool_limits.return_value.__enter__.return_value = None
    packed.pack_original(layer, scale.half().float(), zero, index)
    packed._init_wf_unsqueeze_buffers()
    stored = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    return stored, packed.dequantize_weight().t()


def scattered(folder: Path, generator: torch.Generator) -> Stored:
    """compressed-tensors' pack-quantized with actorder "group"."""
    sys.path.insert(0, str(folder))
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    arguments = QuantizationArgs(num_bits=4, strategy="group", group_size=32, actorder="group")
    weight, order = linear(generator).weight.data, torch.randperm(SIZE, generator=generator)
    index = torch.empty(SIZE, dtype=torch.int32)
    index[order] = torch.arange(SIZE, dtype=torch.int32) // 32
    scale = weight[:, order].unflatten(1, (-1, 32)).abs().amax(2) / 7.5
    zero = torch.zeros_like(scale, dtype=torch.int8)
    compressor = PackedQuantizationCompressor()
    stored = compressor.compress_weight(weight, scale, arguments, zero, index)
    stored |= {"weight_scale": scale, "weight_g_idx": index}
    return stored, compressor.decompress_weight(stored, arguments)


def compressed(folder: Path, generator: torch.Generator, preset: str, size: int = SIZE, **changed: Any) -> Stored:
    """preset: of the library, with some of its weights' arguments changed."""
    sys.path.insert(0, str(folder))
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=changed)
    weight, arguments = linear(generator, size).weight.data, scheme.weights
    state, total = {"weight": weight}, None
    if arguments.strategy == "tensor_group":
        total = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = total
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.view(size // rows, rows, size // columns, columns).transpose(1, 2).flatten(2)
    else:
        columns = arguments.group_size or size
        blocks = weight.view(size, -1, columns) if arguments.strategy != "tensor" else weight.reshape(1, 1, -1)
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), arguments, global_scale=total)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if arguments.strategy == "tensor":
        state |= {"weight_scale": scale.reshape(1), "weight_zero_point": zero.reshape(1)}
    kind = infer_module_format(nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(kind.value)
    stored = compressor.compress(state, scheme)
    numbers = compressor.decompress({name: tensor.clone() for name, tensor in stored.items()}, scheme)["weight"]
    stored.pop("weight_zero_point") if arguments.symmetric and "weight_zero_point" in stored else None
    return stored, numbers


def modelopt(folder: Path, generator: torch.Generator, kind: str) -> Stored:
    core = load("modelopt.torch.quantization.utils.core_utils", folder)
    vars(sys.modules["modelopt.torch.quantization.utils"]).update(vars(core))
    module = load(f"modelopt.torch.quantization.qtensor.{kind.partition('_')[0]}_tensor", folder)
    weight = linear(generator).weight.data
    if kind == "nvfp4":
        made, scale, total = module.NVFP4QTensor.quantize(weight, 16)
        numbers = made.dequantize(torch.float32, scale=scale, double_scale=total, block_sizes={-1: 16})
        return {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": total}, numbers
    if kind.startswith("fp8"):
        made, scale = module.FP8QTensor.quantize(weight, axis=0 if kind == "fp8_channel" else None)
        numbers = made.dequantize(torch.float32, scale=scale)
        return {"weight": made._quantized_data, "weight_scale": scale.squeeze(), "input_scale": torch.ones(())}, numbers
    if kind == "mxfp8":
        made, scale = module.MXFP8QTensor.quantize(weight)
        return {"weight": made._quantized_data, "weight_scale": scale}, made.dequantize(torch.float32, scale=scale)
    made, scale = module.MXFP4QTensor.quantize(weight, 32)
    numbers = made.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    return {"weight": made._quantized_data, "weight_scale": scale.view(SIZE, -1)}, numbers


def quark(folder: Path, generator: torch.Generator) -> Stored:
    """The library packs codes; it stores scales as bytes."""
    pack = load("quark.torch.utils.pack", folder).Pack_fp4(None, "fp4")
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = levels[torch.randint(0, 16, (SIZE, SIZE), generator=generator)]
    scale = torch.randint(119, 124, (SIZE, SIZE // 32), generator=generator, dtype=torch.uint8)
    packed = pack.pack(codes, False)
    numbers = pack.unpack(packed, False) * (scale.float() - 127).exp2().repeat_interleave(32, 1)
    return {"weight": packed, "weight_scale": scale}, numbers


def quark_fp8(folder: Path, generator: torch.Generator, is_channel: bool) -> Stored:
    """The library divides, rounds, and multiplies again; it stores what it rounded to."""
    sys.modules["quark.torch.kernel.hw_emulation.extensions"] = MagicMock()  # compiled for a GPU
    kernel = load("quark.torch.kernel.hw_emulation.hw_emulation_interface", folder)
    weight = linear(generator).weight.data
    if is_channel:
        scale = weight.abs().amax(1) / 448
        numbers = kernel.fake_quantize_fp8_e4m3_per_channel_with_scale(weight, scale, 0)
    else:
        scale = weight.abs().amax() / 448
        numbers = kernel.fake_quantize_fp8_e4m3_per_tensor_with_scale(weight, scale)
    codes = kernel.quant_fp8_e4m3(weight / (scale[:, None] if is_channel else scale))
    return {"weight": codes, "weight_scale": scale}, numbers


def formats(folder: Path) -> Iterator[tuple[str, Callable[[torch.Generator], Stored]]]:
    """folder: has a folder for each package."""

    def ct(preset: str, **changed: Any) -> Callable[[torch.Generator], Stored]:
        return lambda generator: compressed(folder / "ct", generator, preset, **changed)

    yield "awq", lambda generator: awq(folder / "autoawq-0.2.7.post3-py3-none-any.whl.d", generator)
    yield "gptq_asym", lambda generator: gptq(folder / "gptq", generator, False)
    yield "ct_int4", ct("W4A16", group_size=32)
    yield "ct_int4_g128", ct("W4A16", size=128)
    yield "ct_int4_asym", ct("W4A16_ASYM", group_size=32)
    yield "ct_int4_channel", ct("W4A16", group_size=None, strategy="channel")
    yield "ct_int8", ct("W8A8")
    yield "ct_fp8", ct("FP8")
    yield "ct_fp8_channel", ct("FP8_DYNAMIC")
    yield "ct_fp8_block", ct("FP8_BLOCK", block_structure=[32, 32])
    yield "ct_nvfp4", ct("NVFP4")
    yield "ct_mxfp4", ct("MXFP4")
    yield "ct_mxfp8", ct("MXFP8")
    place = folder / "nvidia_modelopt-0.47.0-py3-none-any.whl.d"
    for kind in ("nvfp4", "mxfp8"):
        yield f"modelopt_{kind}", lambda generator, kind=kind: modelopt(place, generator, kind)
    amd = folder / "amd_quark-0.13-py3-none-any.whl.d"
    yield "quark_mxfp4", lambda generator: quark(amd, generator)
    yield "gptq_sym", lambda generator: gptq(folder / "gptq", generator, True)
    for name, is_scattered in (("gptq_v2", False), ("gptq_v2_desc_act", True)):
        yield name, lambda generator, own=is_scattered: gptqmodel(folder / "gptqmodel", generator, own)
    yield "ct_int4_actorder", lambda generator: scattered(folder / "ct-0.9.4", generator)
    for kind in ("fp8", "fp8_channel"):
        yield f"modelopt_{kind}", lambda generator, kind=kind: modelopt(place, generator, kind)
    for name, is_channel in (("quark_fp8", False), ("quark_fp8_channel", True)):
        yield name, lambda generator, own=is_channel: quark_fp8(amd, generator, own)


def main(folder: Path, wanted: str) -> None:
    for number, (name, make) in enumerate(formats(folder)):
        if not wanted:  # mocks of one library are another's missing packages
            subprocess.run([sys.executable, __file__, str(folder), name], check=True)
        if name != wanted:
            continue
        made: dict[str, Tensor] = {}
        for copy in range(COPIES if name in BOTH else 1):
            stored, numbers = make(torch.Generator().manual_seed(number * COPIES + copy))
            made |= {f"{copy}.{part}": tensor.detach().contiguous() for part, tensor in stored.items()}
            made[f"{copy}.numbers"] = numbers.detach().contiguous()
        (HERE / f"{name}.safetensors.gz").write_bytes(gzip.compress(save(made), 9, mtime=0))
        print(name, {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in made.items() if part[0] == "0"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), (sys.argv[2:] or [""])[0])
