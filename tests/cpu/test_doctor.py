"""`thalweg doctor`: each check on synthetic machines, and one run on this machine."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import main
from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.config.tree import options_of
from thalweg.launch.doctor import Environment, Finding, examine, text
from thalweg.launch.wheels import WHEELS, within

ROOT = Path(__file__).parents[2]
GPUS = ("NVIDIA H100 80GB HBM3",) * 8
GOOD = Environment(
    python="3.12.4",
    machine=Machine("Some CPU", 8, 64 * 10**9, 60 * 10**9),
    driver="",
    torch="2.13.0+cpu",
    torch_error="",
    cuda="",
    reached=(),
    requires=("torch<2.14,>=2.11", "numpy>=1.26"),
    packages={"torch": "2.13.0+cpu", "numpy": "2.1.0"},
    compiler=False,
    shm=64 << 20,
    open_files=65536,
    open_files_most=65536,
    host="127.0.0.1",
    port=30000,
    port_error="",
    free_port=0,
    cache="/models",
    cache_writable=True,
    room=10**12,
    hub=None,
    model="",
    model_error="",
)
ON_GPU = dataclasses.replace(
    GOOD,
    machine=dataclasses.replace(GOOD.machine, gpus=GPUS),
    driver="580.65.06",
    torch="2.13.0+cu130",
    cuda="13.0",
    reached=GPUS,
    packages={"torch": "2.13.0+cu130", "numpy": "2.1.0", "triton": "3.6.0"},
    compiler=True,
    shm=64 << 30,
)


def seen(base: Environment = GOOD, **changes: Any) -> dict[str, Finding]:
    return {one.check: one for one in examine(dataclasses.replace(base, **changes))}


def test_a_cpu_machine_passes() -> None:
    found = seen()
    assert {one.level for one in found.values()} == {"ok", "note"} and not found["flash-mla"].mend
    assert found["gpu"].found.startswith("no NVIDIA GPU: models run on the CPU")
    assert "triton" not in found and "compiler" not in found, "of no matter without a GPU"
    assert text(list(found.values())).endswith("nothing is missing")


def test_a_gpu_machine_passes() -> None:
    found = seen(ON_GPU)
    assert {one.level for one in found.values()} == {"ok", "note"}
    assert found["gpu"].found == "8 × NVIDIA H100 80GB HBM3, driver 580.65.06, usable"
    assert found["deep-gemm"] == Finding(
        "deep-gemm",
        "note",
        "not installed; optional: FP8 products on Hopper",
        "pip install 'sgl-deep-gemm==0.1.7'",
    )


def test_a_gpu_that_the_container_hides_is_found_through_torch() -> None:
    found = seen(ON_GPU, machine=GOOD.machine, driver="")
    assert found["gpu"].found == "8 × NVIDIA H100 80GB HBM3, driver unknown, usable" and found["triton"].level == "ok"


@pytest.mark.parametrize(
    ("check", "level", "said", "mend", "base", "changes"),
    [
        ("python", "fail", "3.9.2", "make PYTHON=", GOOD, {"python": "3.9.2"}),
        ("torch", "fail", "not installed", "make install", GOOD, {"torch": ""}),
        ("torch", "fail", "libgomp", "--force-reinstall 'torch==2.13.0'", GOOD, {"torch_error": "libgomp.so.1 is missing"}),
        ("packages", "fail", "numpy>=1.26: not installed", "pip install 'numpy>=1.26'", GOOD, {"packages": {"torch": "2.13.0"}}),
        ("packages", "fail", "2.15.0 is installed", "'torch<2.14,>=2.11'", GOOD, {"packages": {"torch": "2.15.0", "numpy": "2.0"}}),
        ("gpu", "fail", "is a CPU build", "--force-reinstall 'torch==2.13.0'", ON_GPU, {"cuda": "", "reached": ()}),
        ("gpu", "fail", "CUDA 13.0 needs driver 580", "nvidia-driver-580", ON_GPU, {"driver": "550.54", "reached": ()}),
        ("gpu", "fail", "no device it may use", "ls -l /dev/nvidia*", ON_GPU, {"reached": ()}),
        ("triton", "fail", "not installed", "--force-reinstall 'torch==2.13.0'", ON_GPU, {"packages": GOOD.packages}),
        ("compiler", "fail", "no C compiler", "apt-get install gcc", ON_GPU, {"compiler": False}),
        ("/dev/shm", "warn", "0.1 GB", "remount,size=8g", ON_GPU, {"shm": 64 << 20}),
        ("open files", "warn", "1024", "ulimit -n 16384", GOOD, {"open_files": 1024}),
        ("open files", "warn", "1024", "sudo prlimit", GOOD, {"open_files": 1024, "open_files_most": 4096}),
        ("port", "fail", "Address already in use", "--port 30001", GOOD, {"port_error": "Address already in use", "free_port": 30001}),
        ("hub cache", "warn", "cannot be written", "HF_HOME", GOOD, {"cache_writable": False}),
        ("hub cache", "warn", "1.0 GB free", "hf cache prune", GOOD, {"room": 10**9}),
        ("hub", "warn", "timed out", "curl", GOOD, {"hub": "https://hub does not answer: timed out"}),
        ("memory", "warn", "1.0 of 64.0 GB free", "ps aux", GOOD, {"machine": dataclasses.replace(GOOD.machine, free=10**9)}),
        ("model", "fail", "lacks b.safetensors", "thalweg plan --model m", GOOD, {"model": "m", "model_error": "m lacks b.safetensors"}),
    ],
)  # fmt: skip
def test_each_problem_is_named_with_its_remedy(
    check: str, level: str, said: str, mend: str, base: Environment, changes: dict[str, Any]
) -> None:
    found, before = seen(base, **changes), seen(base)
    assert found[check].level == level and said in found[check].found and mend in found[check].mend
    worse = {name for name, one in found.items() if one.level in ("fail", "warn") and one != before.get(name)}
    assert worse <= {check, "packages"}, "and nothing else is blamed"


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
    wheels = {wheel.title: wheel for wheel in WHEELS}
    assert wheels["deep-gemm"].requirement(torch) == gemm
    assert wheels["flash-mla"].command(torch) == mla or not gemm
    installed = dict(ON_GPU.packages) | {"sgl-deep-gemm": "0.1.5.post1"}
    found = seen(ON_GPU, torch=torch, packages=installed)["deep-gemm"]
    right = gemm.endswith("0.1.5.post1")
    assert found.level == ("ok" if right else "warn") and (gemm in found.mend if not right else not found.mend)


def test_cuda_12_gets_no_cuda_13_wheels() -> None:
    found = seen(ON_GPU, cuda="12.8")
    assert "there is none for CUDA 12.8" in found["flash-mla"].found and not found["flash-mla"].mend
    assert found["humming"].mend == "pip install 'humming-kernels==0.1.19'", "which links no CUDA library"


def test_versions_are_compared_as_numbers() -> None:
    assert within("2.13.0+cu130", ">=2.11,<2.14") and not within("2.9.1", ">=2.11") and within("2.11", "==2.11.0")
    assert within("0.1.5.post1", ">=0.1.5") and not within("0.1.5", "==0.1.5.post1")


def test_looking_finds_a_taken_port_and_missing_weights(tmp_path: Path) -> None:
    for file in (ROOT / "models/tiny").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config: Options = options_of(model=str(tmp_path), port=taken.getsockname()[1])
        found = {one.check: one for one in examine(Environment.look(config))}
    assert found["port"].level == "fail" and f"--port {config.listen.port + 1}"[:9] in found["port"].mend
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
    assert "FAIL model" in said and "there is no folder models/none" in said and "1 to mend before serving" in said
