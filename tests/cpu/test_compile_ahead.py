"""Kernels that are compiled before the warm-up needs them: the dry run without a GPU, the processes, their messages."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.gpu import shapes
from thalweg.config.engine import EngineConfig
from thalweg.core.step_times import StepTimes
from thalweg.engine import caches, compile_ahead
from thalweg.engine.calibration_checks import with_compiler
from thalweg.engine.compile_ahead import NVCC_ONCE, CompileAhead, DryRunMessage, Job, NothingAhead
from thalweg.kernels.gemm import deep_gemm_calls, toolchain

# torch for a CPU has no guard for the devices of fake tensors; one for CUDA makes its own where it sees no GPU
GUARD = """\
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
DRY_RUN = """\
import sys, torch
torch.ops.load_library(sys.argv[1])
from thalweg.engine import dry_run
sys.exit(dry_run.main())
"""
SMALL: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "device": "cuda",
    "decode_attention_backend": "triton",
    "prefill_attention_backend": "triton",
    "fp8_gemm_backend": "deep_gemm",
    "max_running_requests": 2,
    "chunked_prefill_size": 2,
    "context_length": 64,
    "max_total_tokens": 0,
}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or torch.version.cuda or shutil.which("gcc") is None:
        pytest.skip("needs a C++ compiler, and torch for a CPU")
    folder = tmp_path_factory.mktemp("guard")
    (folder / "guard.cpp").write_text(GUARD)
    root, library = Path(torch.__file__).parent, folder / "guard.so"
    paths = [f"-I{root}/include", f"-L{root}/lib", "-lc10"]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(folder / "guard.cpp"), "-o", str(library), *paths]
    subprocess.run(command, check=True)
    return library


def dry_run(guard: Path, config: EngineConfig, claims: Path) -> list[DryRunMessage]:
    claims.mkdir()
    job = msgspec.json.encode(Job(config, (9, 0), 70 << 30, 2, str(claims)))
    done = subprocess.run([sys.executable, "-c", DRY_RUN, str(guard)], input=job, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [msgspec.json.decode(line, type=DryRunMessage) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all dry runs of the module: they compile a kernel that several models share once."""
    return tmp_path_factory.mktemp("triton")


def cubins(triton_cache: Path) -> set[Path]:
    return set(triton_cache.rglob("*.cubin"))


def test_all_kernels_of_the_warm_up_are_compiled_once(
    guard: Path, triton_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    path, before = str(shapes.folder("v3", tmp_path)), cubins(triton_cache)
    messages = dry_run(guard, EngineConfig(model_path=path, **SMALL), tmp_path / "claims")
    total = sum(message.steps for message in messages)
    assert [message.error for message in messages if message.error] == []
    assert total > 10 and sum(message.done for message in messages) == total
    kernels = [message.kernel for message in messages if message.kernel]
    compiled = cubins(triton_cache) - before
    assert len(compiled) == len(kernels) == len(list((tmp_path / "claims").iterdir()))
    assert {"thalweg.kernels.gemm.triton._gemv", "thalweg.kernels.sample.triton._pick_token"} <= set(kernels)
    assert messages[0].weights > 2 * 128 * 7168 * 128, "two layers' output projections at least"
    calls = [message.call for message in messages if message.call is not None]
    assert {call[0] for call in calls} == {"fp8_gemm_nt"}
    assert any(call[1][1][0]["shape"] == [7168, 16384] for call in calls)


@pytest.mark.parametrize("shape", ["v3-w4afp8", "v3-int8"])
def test_kernels_that_round_activations_are_compiled_ahead(
    shape: str, guard: Path, triton_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    config = EngineConfig(model_path=str(shapes.folder(shape, tmp_path)), **SMALL)
    messages = dry_run(guard, config, tmp_path / "claims")
    assert [message.error for message in messages if message.error] == []
    kernels = [message.kernel for message in messages if message.kernel]
    codes, quantize = "thalweg.kernels.weight_only.triton.", "thalweg.kernels.quantize.triton."
    wanted = {f"{codes}_up", f"{codes}_down", f"{quantize}_quantize_rows"}
    assert wanted | ({f"{codes}_linear"} if shape == "v3-int8" else {f"{quantize}_quantize"}) <= set(kernels)
    assert len(list((tmp_path / "claims").iterdir())) == len(kernels) <= len(cubins(triton_cache))


def test_names_of_compiled_kernels_do_not_depend_on_the_order_of_launches() -> None:
    pytest.importorskip("triton")
    script = """
import sys
from thalweg.kernels.compilations import use_stable_keys
from thalweg.kernels.quantize.triton import _quantize
from thalweg.kernels.router.triton import _logits
use_stable_keys()

first, second = (_quantize, _logits) if sys.argv[1] else (_logits, _quantize)
first.cache_key, second.cache_key
print(_quantize.cache_key, _logits.cache_key)
"""
    orders = [subprocess.run([sys.executable, "-c", script, order], capture_output=True) for order in ("", "other")]
    assert orders[0].stdout == orders[1].stdout and len(orders[0].stdout) == 2 * 64 + 2


def test_a_dry_run_that_cannot_start_says_why(guard: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    messages = dry_run(guard, EngineConfig(model_path=str(tmp_path), **SMALL), tmp_path / "claims")
    assert len(messages) == 1 and "config.json" in messages[0].error


def test_nvcc_runs_once_for_each_source(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    sources = {"tmp/1/kernel.cu": "int a;", "tmp/2/kernel.cu": "int a;", "b.cu": "int b;", "same.cu": "int b;"}
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = tmp_path / "nvcc"
    names = {"claims": tmp_path / "claims", "unfinished": tmp_path / "tmp", "nvcc": "/bin/echo"}
    script.write_text(NVCC_ONCE.format(**names))
    script.chmod(0o755)

    def status(*words: str) -> int:
        return subprocess.run([str(script), *words], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode

    assert [status(name, "-cubin") for name in sources] == [0, 1, 0, 1]
    assert [status("--version"), status("--version")] == [0, 0]
    assert (tmp_path / "tmp/1/kernel.cu").exists() and not (tmp_path / "tmp/2").exists(), "what failed is removed"
    assert (tmp_path / "same.cu").exists(), "nothing is removed elsewhere"


def test_operands_lie_on_one_block_of_memory() -> None:
    block = torch.empty(128, dtype=torch.uint8)
    scales = torch.empty(4, 6).t()[:3]
    ends = torch.ones(5, dtype=torch.int32)
    written = msgspec.json.decode(msgspec.json.encode(deep_gemm_calls.encode(((scales, ends), "mn", None))))
    (made, zeros), text, nothing = deep_gemm_calls.decode(written, block, True)
    assert (made.shape, made.stride(), made.dtype) == (scales.shape, scales.stride(), scales.dtype)
    assert made.data_ptr() == block.data_ptr() and (text, nothing) == ("mn", None)
    assert zeros.dtype == torch.int32 and not zeros.any()
    with pytest.raises(ValueError, match="more than the block has"):
        deep_gemm_calls.decode(deep_gemm_calls.encode(torch.empty(33)), block, True)
    lengths, plane = ends, torch.empty(2, 64, dtype=torch.uint8)
    written = msgspec.json.decode(msgspec.json.encode(deep_gemm_calls.encode((lengths, plane))))
    ones, made = deep_gemm_calls.decode(written, block, True, 1)
    assert torch.equal(ones, torch.ones(5, dtype=torch.int32))
    assert made.data_ptr() == block.data_ptr() and made.shape == plane.shape, "pages of bytes take no memory"


class Scripted(CompileAhead):
    """Its processes run scripts: the dry run reports these lines, DeepGEMM's note what they get and answer."""

    lines: tuple[DryRunMessage, ...] = ()
    seen: Path

    def _start(self, module: str, arguments: tuple[str, ...], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        if module == "thalweg.engine.dry_run":
            text = b"".join(msgspec.json.encode(line) + b"\n" for line in self.lines)
            script = f"import sys; sys.stdin.read(); sys.stdout.buffer.write({text!r})"
        else:
            script = f"import sys\nfor line in sys.stdin: open({str(self.seen)!r}, 'a').write(line); print(flush=True)"
        command = [sys.executable, "-c", script]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.processes[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the engine's process asks of a GPU with 20 GiB free, and of a machine with 3 cores and nvcc."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(compile_ahead, "cores", lambda: 3)
    result = toolchain.ProbeResult(toolchain.Compiler(toolchain.NVCC, "/bin/echo", "/cuda"), "13.0")
    monkeypatch.setattr(toolchain, "trials_here", lambda: (result,))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setattr(Scripted, "seen", tmp_path / "seen", raising=False)


@pytest.mark.parametrize(("weights", "processes"), [(1 << 30, 3), (11 << 30, 1), (13 << 30, 0)])
def test_each_call_is_made_once_by_as_many_processes_as_fit_the_gpu(
    weights: int, processes: int, gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = DryRunMessage(call=["fp8_gemm_nt", [1], {}])
    lines = (
        DryRunMessage(weights=weights, steps=2),
        DryRunMessage(kernel="k"),
        call,
        call,
        DryRunMessage(call=["other", [], {}]),
    )
    monkeypatch.setattr(
        Scripted, "lines", (*lines, DryRunMessage(done=1), DryRunMessage(done=1, error="RuntimeError: no"))
    )
    shown = list[tuple[int, int]]()
    with caplog.at_level(logging.INFO), Scripted(EngineConfig(model_path="m")) as ahead:
        ahead.finish(lambda done, total: shown.append((done, total)))
        assert len(ahead.feeders) == processes and shown[-1] == (2, 2)
        folder = Path(ahead.folder.name)
    assert all(process.poll() is not None for process in ahead.processes) and not folder.exists()
    made = sorted(Scripted.seen.read_text().splitlines()) if processes else []
    assert made == (['["fp8_gemm_nt",[1],{}]', '["other",[],{}]'] if processes else [])
    assert f"1 Triton kernels, 2 products of DeepGEMM tried by {processes}; 1 failed" in caplog.text


def test_leaving_ends_the_processes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "lines", ())
    with pytest.raises(KeyError), Scripted(EngineConfig(model_path="m")) as ahead:
        raise KeyError
    assert all(process.poll() is not None for process in ahead.processes)


def test_a_warm_folder_is_not_compiled_again(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        shapes.folder("qwen3", folder)
    config = EngineConfig(model_path=str(one), **SMALL)
    assert not caches.is_warm(config)
    times = StepTimes(((1, 0.01),), ((1, ((64, 0.02),)),), 100, 0.0, 0.0)
    caches.mark_warm(config, times)
    real = msgspec.structs.replace(config, model_path=str(other), load_format="auto", random_seed=3)
    assert caches.is_warm(config) and caches.is_warm(real), "serving after thalweg warmup, from another folder"
    assert caches.step_times(config) == times and caches.step_times(real) is None, "its weights are not random"
    caches.mark_warm(real, msgspec.structs.replace(times, context=7))
    assert caches.step_times(config) == times and getattr(caches.step_times(real), "context", 0) == 7
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: ())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert caches.is_warm(real) and caches.step_times(real) is None, "kernels of another GPU, not its times"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    next((tmp_path / "triton").iterdir()).write_text("")
    assert caches.is_warm(real) and caches.step_times(real) is None, "a mark without times"
    assert not caches.is_warm(msgspec.structs.replace(config, max_running_requests=3))
    shutil.rmtree(tmp_path / "deep_gemm")  # whose kernels this configuration uses
    assert not caches.is_warm(config)
    caches.mark_warm(config)
    (one / "config.json").write_text("{}")
    assert not caches.is_warm(config)
    monkeypatch.setattr(compile_ahead, "cores", lambda: 8)
    assert isinstance(compile_ahead.compile_ahead(real), NothingAhead)
    assert isinstance(compile_ahead.compile_ahead(msgspec.structs.replace(real, device="cpu")), NothingAhead)


def test_the_report_names_the_compiler_and_what_failed_before() -> None:
    nvcc = toolchain.ProbeResult(toolchain.Compiler(toolchain.NVCC, "/bin/nvcc", "/"), "12.4", "older than 12.9")
    nvrtc = toolchain.ProbeResult(toolchain.Compiler(toolchain.NVRTC, "/lib/libnvrtc.so.13", "/"), "13.0")
    made = with_compiler(EngineConfig(model_path="m"), [nvcc, nvrtc]).report.current()["deep_gemm_compiler"]
    assert made.value == "NVRTC 13.0 (/lib/libnvrtc.so.13)"
    assert made.reason.endswith("failed: nvcc 12.4 (/bin/nvcc): older than 12.9")


@pytest.mark.parametrize(
    ("backend", "is_fp8", "scores"),
    [
        pytest.param("triton_sparse", False, "triton", marks=pytest.mark.soak),
        ("triton_sparse", True, "triton"),
        pytest.param("triton_sparse", True, "deep_gemm", marks=pytest.mark.soak),
        pytest.param("flashmla_sparse", False, "triton", marks=pytest.mark.soak),
        pytest.param("flashmla_kv", True, "triton", marks=pytest.mark.soak),
    ],
)
def test_kernels_of_sparse_attention_are_compiled_ahead(
    backend: str,
    is_fp8: bool,
    scores: str,
    guard: Path,
    triton_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    shape = shapes.SPARSE | {"index_topk": 64, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    by = {"decode_attention_backend": backend, "prefill_attention_backend": backend}
    by["dsa_paged_mqa_logits_backend"] = scores
    keys = {"kv_cache_dtype": "fp8_ds_mla", "fp8_index_keys": True} if is_fp8 else {}
    small = SMALL | by | keys | {"context_length": 512, "chunked_prefill_size": 130 if scores == "deep_gemm" else 96}
    messages = dry_run(guard, EngineConfig(model_path=str(tmp_path), **small), tmp_path / "claims")
    assert [message.error for message in messages if message.error] == []
    kernels = {message.kernel.rpartition(".")[2] for message in messages if "dsa" in message.kernel}
    attends = "_attend" if backend == "triton_sparse" else "_places"
    assert kernels == {"_write", "_scores", "_choose_or_bound", "_mark", attends}
    logits = {"get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits"}
    assert {message.call[0] for message in messages if message.call} == (logits if scores == "deep_gemm" else set())
