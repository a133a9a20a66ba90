"""`thalweg doctor`: each check on synthetic machines, and one run on this machine."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from thalweg.cli import main
from thalweg.config.machine import Machine
from thalweg.config.options import ListenOptions, Options
from thalweg.config.tree import options_of
from thalweg.kernels.gemm.toolchain import Compiler, ProbeResult
from thalweg.launch import doctor
from thalweg.launch.doctor import Finding, Peers, Torch
from thalweg.launch.wheels import WHEELS, within

ROOT = Path(__file__).parents[2]
GPUS = ("NVIDIA H100 80GB HBM3",) * 8
CPU = Torch("2.13.0+cpu")
GPU = Torch("2.13.0+cu130", "", "13.0", GPUS)
REQUIRED = [Requirement("torch<2.14,>=2.11"), Requirement("numpy>=1.26")]
WHEEL = {wheel.title: wheel for wheel in WHEELS}


def packages(**versions: str) -> Finding:
    return doctor.check_packages(REQUIRED, lambda name: versions.get(name, ""))


def memory(free: int) -> Finding:
    return doctor.check_memory(Machine("Some CPU", 8, 64 * 10**9, free))


def cache(is_writable: bool, free: int) -> Finding:
    return doctor.check_cache(Path("/models"), is_writable, free)


def peers(**fields: Any) -> list[Finding]:
    return list(doctor.check_peers(GPU, Peers(**{"nccl": "2.28.9"} | fields)))


def test_a_cpu_machine_passes() -> None:
    fine = [
        doctor.check_python("3.12.4"),
        doctor.check_torch(CPU),
        packages(torch="2.13.0+cpu", numpy="2.1.0"),
        memory(60 * 10**9),
        *peers(),
        doctor.check_shared_memory(64 << 20, 0),
        doctor.check_open_files(65536, 65536),
        doctor.check_port(ListenOptions(), "", ""),
        cache(True, 10**12),
        doctor.check_hub(""),
        doctor.check_model("m", ""),
    ]
    assert {one.level for one in fine} == {"ok"} and doctor.text(fine).endswith("nothing is missing")
    assert not doctor.check_wheel(WHEEL["flash-mla"], CPU, False, "").mend
    assert doctor.check_open_files(-1, -1).level == "ok", "without limits"


def test_a_gpu_machine_passes() -> None:
    found = doctor.check_gpu(GPU, GPUS, "580.65.06")
    assert found == Finding("gpu", "ok", "8 × NVIDIA H100 80GB HBM3, driver 580.65.06, usable")
    assert doctor.check_gpu(GPU, GPUS, "").found == "8 × NVIDIA H100 80GB HBM3, driver unknown, usable"
    assert all(one.level == "ok" for one in doctor.check_triton(GPU, "3.6.0", True))
    assert doctor.check_wheel(WHEEL["deep-gemm"], GPU, True, "") == Finding(
        "deep-gemm",
        "note",
        "not installed; optional: FP8 products on Hopper",
        "pip install 'sgl-deep-gemm==0.1.7'",
    )


def test_the_compiler_of_deep_gemm_is_named_or_what_installs_its_headers() -> None:
    nvcc = ProbeResult(Compiler("nvcc", "/cuda/bin/nvcc", "/cuda"), "12.4", "older than 12.9")
    nvrtc = ProbeResult(Compiler("NVRTC", "/lib/libnvrtc.so.13", "/cuda"), "13.0")
    found = doctor.check_deep_gemm_compiler([nvcc, nvrtc], GPU)
    assert found == Finding("nvcc or NVRTC", "ok", "NVRTC 13.0 (/lib/libnvrtc.so.13)")
    found = doctor.check_deep_gemm_compiler([nvcc], GPU)
    assert found.level == "warn" and found.found == "none works: nvcc 12.4 (/cuda/bin/nvcc): older than 12.9"
    assert found.mend == "pip install 'nvidia-cuda-cccl==13.0.*'"
    assert doctor.check_deep_gemm_compiler([], GPU).found == "none works: none found"


gpu = partial(doctor.check_gpu, gpus=GPUS)


@pytest.mark.parametrize(
    ("found", "check", "level", "said", "mend"),
    [
        (doctor.check_python("3.9.2"), "python", "fail", "3.9.2", "make PYTHON="),
        (doctor.check_torch(Torch()), "torch", "fail", "not installed", "make install"),
        (
            doctor.check_torch(Torch("2.13.0", "libgomp.so.1 is missing")),
            "torch", "fail", "libgomp", "--force-reinstall 'torch==2.13.0'",
        ),
        (packages(torch="2.13.0"), "packages", "fail", "numpy>=1.26: not installed", "pip install 'numpy>=1.26'"),
        (packages(torch="2.15.0", numpy="2.0"), "packages", "fail", "2.15.0 is installed", "'torch<2.14,>=2.11'"),
        (gpu(CPU, driver="580.65"), "gpu", "fail", "is a CPU build", "--force-reinstall 'torch==2.13.0'"),
        (gpu(GPU._replace(gpus=()), driver="550.54"), "gpu", "fail", "CUDA 13.0 needs driver 580", "nvidia-driver-580"),
        (gpu(GPU._replace(gpus=()), driver="580.65"), "gpu", "fail", "no device it may use", "ls -l /dev/nvidia*"),
        (gpu(Torch(), driver=""), "gpu", "note", "torch is missing", ""),
        (next(doctor.check_triton(GPU, "", True)), "triton", "fail", "not installed", "--force-reinstall 'torch=="),
        (list(doctor.check_triton(GPU, "3.6.0", False))[1], "compiler", "fail", "no C compiler", "apt-get install gcc"),
        (peers(apart=((0, 1),))[0], "peer access", "warn", "GPUs 0 and 1 do not address", "topo -p2p"),
        (peers(nccl="")[1], "nccl", "warn", "this torch has none", "--force-reinstall"),
        (peers(error="no driver API")[2], "symmetric memory", "warn", "none: no driver API", "--force-reinstall"),
        (doctor.check_shared_memory(64 << 20, 8), "/dev/shm", "warn", "0.1 GB", "remount,size=8g"),
        (doctor.check_open_files(1024, 65536), "open files", "warn", "1024", "ulimit -n 16384"),
        (doctor.check_open_files(1024, 4096), "open files", "warn", "1024", "sudo prlimit"),
        (doctor.check_port(ListenOptions(), "Address already in use", ""), "port", "fail", "already in", "--port 0"),
        (cache(False, 10**12), "hub cache", "warn", "cannot be written", "HF_HOME"),
        (cache(True, 10**9), "hub cache", "warn", "1.0 GB free", "hf cache prune"),
        (doctor.check_hub("https://hub does not answer: timed out"), "hub", "warn", "timed out", "curl"),
        (memory(10**9), "memory", "warn", "1.0 of 64.0 GB free", "ps aux"),
        (doctor.check_model("m", "m lacks b.safetensors"), "model", "fail", "lacks b.safe", "thalweg plan --model m"),
    ],
)  # fmt: skip
def test_each_problem_is_named_with_its_remedy(found: Finding, check: str, level: str, said: str, mend: str) -> None:
    assert (found.check, found.level) == (check, level) and said in found.found and mend in found.mend


@pytest.mark.parametrize(
    ("torch", "mla", "gemm"),
    [
        ("2.11.0", "pip install --no-deps 'sgl-flash-mla==1.0.0'", "sgl-deep-gemm==0.1.5.post1"),
        ("2.12.1+cu130", "pip install --no-deps 'sgl-flash-mla==1.0.0'", "sgl-deep-gemm==0.1.5.post1"),
        ("2.13.0+cu130", "pip install --no-deps 'sgl-flash-mla==1.0.0'", "sgl-deep-gemm==0.1.7"),
        ("2.14.1", "pip install 'sgl-flash-mla==1.0.0'", "sgl-deep-gemm==0.2.5"),
        ("2.16.0", "pip install 'sgl-flash-mla==1.0.0'", ""),
    ],
)
def test_wheels_go_with_torch(torch: str, mla: str, gemm: str) -> None:
    assert WHEEL["deep-gemm"].requirement(torch) == gemm
    assert WHEEL["flash-mla"].command(torch) == mla or not gemm
    found = doctor.check_wheel(WHEEL["deep-gemm"], GPU._replace(version=torch), True, "0.1.5.post1")
    right = gemm.endswith("0.1.5.post1")
    assert found.level == ("ok" if right else "warn") and (gemm in found.mend if not right else not found.mend)


def imported() -> set[str]:
    """Top-level modules that the package imports, or finds by name."""
    found = set()
    for path in (ROOT / "thalweg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    found |= {name.name for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module)
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                    found.add(module)
    return {name.partition(".")[0] for name in found} - {"thalweg", *sys.stdlib_module_names}


def test_the_libraries_it_lists_are_those_that_the_code_imports() -> None:
    """Missing from it may be only what another library brings, and what a benchmark asks for by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {"pyzmq": "zmq", "pyyaml": "yaml"}
    needed = {Requirement(one).name for one in project["dependencies"]}
    needed = {names.get(name, name.replace("-", "_")) for name in needed}
    optional = {wheel.module for wheel in WHEELS}
    brought, benchmarks = {"triton", "httpx2"}, {"matplotlib", "transformers", "lm_eval"}
    asked = {"deep_ep", "ray"}  # --moe-a2a-backend deepep and --launcher ray say how to get them
    found = imported()
    assert needed | optional <= found, "it lists a library that nothing imports"
    assert found - needed - optional <= brought | benchmarks | asked, "it does not list a library that is imported"


def test_cuda_12_gets_no_cuda_13_wheels() -> None:
    found = doctor.check_wheel(WHEEL["flash-mla"], GPU._replace(cuda="12.8"), True, "")
    assert "there is none for CUDA 12.8" in found.found and not found.mend


def test_versions_are_compared_as_numbers() -> None:
    assert within("2.13.0+cu130", ">=2.11,<2.14") and not within("2.9.1", ">=2.11") and within("2.11", "==2.11.0")
    assert within("0.1.5.post1", ">=0.1.5") and not within("0.1.5", "==0.1.5.post1")


def test_looking_finds_a_taken_port_and_missing_weights(tmp_path: Path) -> None:
    for file in (ROOT / "models/tiny").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config: Options = options_of(model=str(tmp_path), port=taken.getsockname()[1])
        found = {one.check: one for one in doctor.examine(config)}
    assert found["port"].level == "fail" and "already in use" in found["port"].found
    assert found["model"].level == "fail" and "safetensors" in found["model"].found
    assert found["torch"].level == found["packages"].level == "ok"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = [sys.executable, "-m", "thalweg", "doctor", "--port", "0", "--json", "models/tiny"]
    good = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    report = json.loads(good.stdout)
    failed = [one for one in report["findings"] if one["level"] == "fail"]
    assert report["ok"] is (not failed) and good.returncode == len(failed[:1]), good.stderr
    assert {"check": "model", "level": "ok", "found": "models/tiny", "mend": ""} in report["findings"]
    assert main(["doctor", "--port", "0", "models/none"]) == 1
    said = capsys.readouterr().out
    assert "FAIL model" in said and "models/none: no such folder" in said and "1 to mend before serving" in said
