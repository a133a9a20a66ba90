"""Every setting, changed from its default, changes what the engine or the front is built from; every field of these is
read.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.configs import config
from tests.cpu import zoo
from tests.cpu.test_formats import CONFIGS, W4AFP8
from tests.cpu.test_sharded_models import FP8
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.model import facts_of
from thalweg.config.server import ServerOptions
from thalweg.config.setting import Setting
from thalweg.config.tree import options_of, settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.launch import resolve as resolver
from thalweg.launch import tuned
from thalweg.launch.decisions import Decisions
from thalweg.launch.tuned import TunedCase, TunedFile
from thalweg.quant.catalog import quantization_names

ROOT = Path(__file__).resolve().parents[2]
TINY, HEAD = str(ROOT / "models" / "tiny"), str(ROOT / "models" / "tiny-eagle3")
GPU = Machine(
    "a CPU", 8, 200 << 30, 100 << 30, ("NVIDIA H100 80GB HBM3",), 70 << 30, "9.0", frozenset({"triton", "deep_gemm"})
)
CPU = dataclasses.replace(GPU, gpus=(), gpu_free=0, capability="")
ASSERTIONS = {
    "quantization",
    "node_rank",
    "launcher",
}  # settings that state a fact of the checkpoint, or of this machine
BASES: list[tuple[Machine, dict[str, Any]]] = [  # a setting has to have its effect in one of them
    (CPU, {"model": TINY}),
    (GPU, {"model": "LARGE"}),
    (GPU, {"model": TINY, "attention_backend": "triton_sparse"}),
    (GPU, {"model": TINY, "attention_backend": "triton_sparse", "enable_hisparse": True}),
    (GPU, {"model": "SPARSE", "kv_cache_dtype": "fp8_ds_mla"}),
    (GPU, {"model": TINY, "dtype": "bfloat16"}),
    (CPU, {"model": TINY, "speculative_algorithm": "NEXTN"}),
    (CPU, {"model": TINY, "speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2}),
    (CPU, {"model": TINY, "speculative_algorithm": "NEXTN", "speculative_acceptance": "relaxed"}),
    (CPU, {"model": TINY, "speculative_algorithm": "NEXTN", "speculative_simulate_accept_length": 1.5}),
    (CPU, {"model": TINY, "speculative_algorithm": "NEXTN", "allow_simulated_acceptance": True}),
    (CPU, {"model": TINY, "tp_size": 2, "dist_init_addr": "10.0.0.1:29500"}),
    (CPU, {"model": TINY, "tp_size": 2, "nnodes": 2, "dist_init_addr": "10.0.0.2:29500"}),
]
TEXTS = {  # of settings without choices that are no number
    "model": "LARGE",
    "revision": "v1",
    "hf_token": "token",
    "chat_template": "deepseek-r1",
    "index_topk_pattern": "FFSF",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen25",
    "cache_dir": "kernels",
    "attention_backend": "reference",
    "dist_init_addr": "10.0.0.1:29500",
    "dsa_prefill_backend": "torch",
    "dsa_decode_backend": "torch",
    "dsa_topk_backend": "torch",
    "dsa_paged_mqa_logits_backend": "triton",
    "moe_runner_backend": "deep_gemm",
    "fp8_gemm_backend": "deep_gemm",
    "speculative_draft_model_path": HEAD,
    "cuda_graph_bs": "3",
    "piecewise_cuda_graph_tokens": "96",
    "crash_dump_folder": "steps",
}
FRONT = ("listen", "server")  # sections that the server takes as they are
ALL = settings()
BUILT_FROM = [
    name
    for name, one in ALL.items()
    if (one.section not in FRONT or name in EngineConfig.__struct_fields__) and len(one.choices) != 1
]


def others(one: Setting) -> Iterator[Any]:
    """Values of a setting that are not its default."""
    if one.name in TEXTS:
        yield one.parse(TEXTS[one.name])
        return
    start = one.default if isinstance(one.default, (int, float)) else one.least or 0
    numbers = [
        start + 1,
        start + 0.25,
        start + 64,
        2 * start,
        (one.least or 0) + (one.most or 1) / 2,
        one.least,
        one.most,
    ]
    values = [True, False] if one.kind is bool else one.choices or numbers
    for value in values:
        try:
            parsed = one.parse(value)
        except UnsupportedConfig:
            continue
        if value is not None and parsed != one.default:
            yield parsed


def observed(machine: Machine, located: list[Any], **values: Any) -> dict[str, Any]:
    """What is built from these settings. Reports are left out: they may say what nothing does."""
    located.clear()
    resolved = resolver.resolve(options_of(**values), machine, progress=False)
    return {
        **{name: value for name, value in msgspec.structs.asdict(resolved.engine).items() if name != "report"},
        "names": resolved.names,
        "sampling defaults": resolved.sampling,
        "chat": (resolved.chat.encoder.name, resolved.chat.formats, resolved.chat.strip),
        "located": list(located),
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that all kernels serve, without an indexer and with one; their weights are not read."""
    sizes = {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_head_dim": 128, "intermediate_size": 2048, "moe_intermediate_size": 1024,
    }  # fmt: skip
    config = json.loads((Path(TINY) / "config.json").read_text()) | sizes
    folders = {name: tmp_path_factory.mktemp(name.lower()) for name in ("LARGE", "SPARSE")}
    for folder, of in zip(
        folders.values(),
        ({k: v for k, v in config.items() if "index" not in k}, config | {"index_n_heads": 64}),
        strict=True,
    ):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(TINY) / name, folder)
        (folder / "config.json").write_text(json.dumps(of))
    return folders


@pytest.fixture(autouse=True)
def located(large: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records where checkpoints are looked for, brings a tuned kernel, and fixes the seed that is drawn."""
    calls: list[Any] = []
    real = resolver.locate

    def locate(name: str, revision: str | None = None, token: str | None = None) -> Any:
        calls.append((name, revision, token))
        return real(str(large.get(name, name)))

    case = TunedCase("case", (1,), (2,), 1.0, 2.0, 3)
    monkeypatch.setattr(tuned, "read", lambda *_: [TunedFile("gemm", (1,), "", {}, "", (case,))])
    monkeypatch.setattr(resolver, "locate", locate)
    monkeypatch.setattr(resolver, "fetch_weights", lambda *_: None)
    monkeypatch.setattr("secrets.randbits", lambda bits: 5)
    return calls


@pytest.mark.parametrize("name", BUILT_FROM)
def test_a_setting_changes_what_is_built(name: str, located: list[Any]) -> None:
    one, reasons, tried = ALL[name], list[str](), 0
    for machine, base in BASES:
        try:
            before = observed(machine, located, **base)
        except UnsupportedConfig as error:
            before = {"error": str(error)}
        for value in others(one):
            tried += 1
            try:
                after = observed(machine, located, **base | {name: value})
            except UnsupportedConfig as error:
                if one.section == "parallel" and name in str(error):
                    return  # nothing of it is served, so it must be refused
                if name in ASSERTIONS and str(error).startswith(f"{name}: "):
                    return  # another value than the checkpoint's is refused
                reasons.append(str(error))
                continue
            if (after[name] != before.get(name)) if name in after else (after != before):
                return
            reasons.append(f"{value!r}: {name in after}")
    raise AssertionError(f"{name} has no effect: {tried} values; {reasons}")


# ---- every field is read


@functools.cache
def trees(*rooms: str) -> tuple[ast.Module, ...]:
    """The sources of these rooms or files of the package."""
    paths = [ROOT / "thalweg" / room for room in rooms]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return tuple(ast.parse(file.read_text(encoding="utf-8")) for file in files)


def reads(bases: set[str], *rooms: str) -> set[str]:
    """Names x of `base.x` where it is read. bases: last words of the expression before the dot; empty: any."""
    return {
        node.attr
        for tree in trees(*rooms)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and (not bases or getattr(node.value, "attr", getattr(node.value, "id", "")) in bases)
    }


def read_through_properties(kind: type, direct: set[str], file: str = "config/engine.py") -> set[str]:
    """`direct`, and what the properties of `kind` among it read. file: where `kind` is defined."""
    found, before = set(direct), set[str]()
    while found != before:
        before = set(found)
        for name in before & {name for name, value in vars(kind).items() if isinstance(value, property)}:
            source = next(
                node
                for tree in trees(file)
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef) and node.name == name
            )
            found |= {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    return found


def test_every_field_of_the_engines_configuration_is_read_by_the_engine() -> None:
    direct = reads({"config", "settings", "wish"}, "engine")
    unread = set(EngineConfig.__struct_fields__) - read_through_properties(EngineConfig, direct)
    assert not unread, f"no engine reads {unread}"


def test_every_kernel_choice_is_read_by_layers() -> None:
    unread = set(KernelConfig.__struct_fields__) - reads({"kernels"}, "layers", "quant", "engine/build.py")
    assert not unread, f"no layer reads {unread}"


@pytest.mark.parametrize("name", KernelConfig.__struct_fields__)
def test_a_kernel_choice_of_the_engine_reaches_the_layers(name: str) -> None:
    default = getattr(KernelConfig(), name)
    others = {bool: not default, int: 1}
    kernels = KernelConfig(**{name: others.get(type(default), "another")})
    assert config(model_path="", kernels=kernels).kernels == kernels


def test_every_option_of_the_server_is_read_by_the_server() -> None:
    readers = read_through_properties(ServerOptions, reads(set(), "server", "launch", "cli.py"), "config/server.py")
    fields = {name for name, one in ALL.items() if one.section in FRONT}
    unread = fields - readers - set(EngineConfig.__struct_fields__)
    assert not unread, f"the server does not read {unread}"


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
STORED: list[tuple[dict[str, Any], set[str]]] = [  # a quantization_config, and the values that are true of it
    ({}, {"none"}),
    (FP8, {"fp8"}),
    (CONFIGS["awq"], {"awq", "awq_marlin", "moe_wna16"}),
    (CONFIGS["gptq_asym"], {"gptq", "gptq_marlin", "moe_wna16"}),
    (CONFIGS["ct_int4"], {"compressed-tensors"}),
    (CONFIGS["quark_mxfp4"], {"quark"}),
    (W4AFP8, {"w4afp8"}),
    ({"quant_method": "w8a8_int8"}, {"w8a8_int8"}),
    ({"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, {"blockwise_int8"}),
    ({"quant_method": "mxfp4"}, {"mxfp4", "gpt_oss_mxfp4"}),
    (MODELOPT, {"modelopt", "modelopt_fp8"}),
    (MODELOPT | {"quant_algo": "NVFP4"}, {"modelopt", "modelopt_fp4"}),
    (MODELOPT | {"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, {"modelopt", "modelopt_fp4"}),
    (MODELOPT | {"quant_algo": "MXFP8"}, {"modelopt", "modelopt_mxfp8"}),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, {"modelopt", "modelopt_mixed", "w4afp8"}),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, {"modelopt", "modelopt_fp4"}),
    (
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"*mlp*": {"quant_algo": "NVFP4"}}},
        {"modelopt", "modelopt_mixed"},
    ),
]


@pytest.mark.parametrize(("config", "true"), STORED)
def test_names_of_formats_are_taken_where_the_checkpoint_has_them(config: dict[str, Any], true: set[str]) -> None:
    """Also those of vLLM and SGLang; the report has the name that is used here."""
    facts = facts_of(zoo.draw_config("v3", 3) | {"quantization_config": config}, "config.json")
    for asked in ALL["quantization"].choices:
        decisions = Decisions()
        if asked in true:
            resolver._check_quantization(asked, facts, decisions)
            (noted,) = decisions.entries
            assert noted.value in true and (noted.value == asked or f"{asked} is called {noted.value}" in noted.reason)
        else:
            message = f"quantization: {asked} was asked for, and .* says {quantization_names(config)[0]}"
            with pytest.raises(UnsupportedConfig, match=message):
                resolver._check_quantization(asked, facts, decisions)
