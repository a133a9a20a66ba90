"""`thalweg doctor`: looks at the machine and says what is missing and the command that mends it.

`examine` asks the system. Each `check_...` judges what it is given and asks nothing, so that it can be tested.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from thalweg import __version__
from thalweg.config.machine import Machine
from thalweg.config.options import ListenOptions, Options
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.engine import caches
from thalweg.kernels.gemm.toolchain import ProbeResult, trials_here
from thalweg.launch.wheels import DEEP_GEMM, WHEELS, Wheel, within

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
GB = 10**9
OPEN_FILES = 16384  # --max-connections is 8,192, and each may have a body and an answer under way
SHM = 2**30  # what several processes that share a GPU's work keep in shared memory
CACHE_FREE = 20 * GB
DRIVERS = {12: 525, 13: 580}  # CUDA major → the first driver that runs it
TIMEOUT = 5.0  # seconds for the hub to answer


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: str  # ok; note: good to know; warn: works with a drawback; fail: serving would not start
    found: str
    mend: str = ""  # a command


class Torch(NamedTuple):
    version: str = ""  # "": not installed
    error: str = ""  # why it does not import
    cuda: str = ""  # that it was built for; "": the CPU
    gpus: tuple[str, ...] = ()  # names of those that it can use

    @property
    def reinstall(self) -> str:
        """The command that installs the same release again."""
        return f"pip install --force-reinstall 'torch=={self.version.partition('+')[0]}'"


class Peers(NamedTuple):
    """How several GPUs reach each other."""

    apart: tuple[tuple[int, int], ...] = ()  # pairs that do not address each other's memory
    nccl: str = ""  # version; "": this torch has none
    error: str = ""  # why there is no symmetric memory


VersionOf = Callable[[str], str]  # of a distribution; "" where it is not installed


def doctor(options: Options, rest: argparse.Namespace) -> int:
    """The command. rest: `json` and `online`. Returns 0 if serving can start, else 1."""
    findings = list(examine(options, rest.online))
    is_sick = any(finding.level == FAIL for finding in findings)
    if rest.json:
        report = {"ok": not is_sick, "version": __version__, "findings": list(map(asdict, findings))}
        print(json.dumps(report, indent=2))
    else:
        print(text(findings))
    return int(is_sick)


def text(findings: Sequence[Finding]) -> str:
    """The report for people: a line for each finding, its command below it, and a last line that sums up."""
    lines, count = [], Counter(finding.level for finding in findings)
    for one in findings:
        lines.append(f"{one.level.upper() if one.level == FAIL else one.level:<5}{one.check:<18}{one.found}")
        lines += [f"{'':<23}→ {one.mend}"] if one.mend else []
    advice = {FAIL: "to mend before serving", WARN: "to look at"}
    counts = [f"{count[level]} {what}" for level, what in advice.items() if count[level]]
    return "\n".join([*lines, "", ", ".join(counts) or "nothing is missing"])


def examine(options: Options, online: bool = False) -> Iterator[Finding]:
    """Findings about this machine, in the order in which to fix them. online: whether to ask the
    hub.
    """
    from huggingface_hub import constants

    machine, torch, model = Machine.here(), _torch(), options.model.model
    gpus = machine.gpus or torch.gpus  # some containers hide the driver's list
    yield check_python(platform.python_version())
    yield check_torch(torch)
    yield check_packages(_requirements(), _version)
    if gpus:
        has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
        yield check_gpu(torch, gpus, driver_version())
        yield from check_triton(torch, _version("triton"), has_compiler)
        if len(torch.gpus) > 1:
            yield from check_peers(torch, _peers(len(torch.gpus)))
    else:
        found = f"no NVIDIA GPU: models run on the CPU ({machine.cpu}, {machine.cores} cores)"
        yield Finding("gpu", NOTE, found)
    yield from (check_wheel(wheel, torch, bool(gpus), _version(wheel.name)) for wheel in WHEELS)
    if gpus and _version(DEEP_GEMM):
        caches.use("")
        yield check_deep_gemm_compiler(trials_here(), torch)
    yield check_memory(machine)
    if Path("/dev/shm").is_dir():
        yield check_shared_memory(shutil.disk_usage("/dev/shm").free, len(gpus))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_port(options.listen, _bind_error(options.listen), model)
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    yield check_cache(cache, os.access(existing, os.W_OK), shutil.disk_usage(existing).free)
    if online:
        yield check_hub(_hub_error(constants.ENDPOINT))
    if model:
        yield check_model(model, _model_error(options) if torch.version and not torch.error else "")


# ---- judging ----


def _judge(check: str, good: bool, found: str, mend: str, bad: str = FAIL) -> Finding:
    """mend: the command for what is not good. bad: its level."""
    return Finding(check, OK, found) if good else Finding(check, bad, found, mend)


def check_python(version: str) -> Finding:
    return _judge("python", within(version, ">=3.11"), version, "make PYTHON=python3.12 clean install")


def check_torch(torch: Torch) -> Finding:
    if not torch.version:
        return Finding("torch", FAIL, "not installed", "make install")
    build = f"built for {f'CUDA {torch.cuda}' if torch.cuda else 'the CPU'}"
    found = f"{torch.version} does not import: {torch.error}" if torch.error else f"{torch.version}, {build}"
    return _judge("torch", not torch.error, found, torch.reinstall)


def check_packages(requirements: Sequence[Requirement], version_of: VersionOf) -> Finding:
    wrong = {}
    for one in requirements:
        version = version_of(one.name)
        if not version or not within(version, one.specifier):
            wrong[str(one)] = f"{version} is installed" if version else "not installed"
    found = ", ".join(f"{name}: {why}" for name, why in wrong.items())
    found = found or f"all {len(requirements)} that Thalweg needs"
    return _judge("packages", not wrong, found, f"pip install {' '.join(map(shlex.quote, wrong))}")


def check_gpu(torch: Torch, gpus: Sequence[str], driver: str) -> Finding:
    """driver: version of NVIDIA's, "" where it cannot be read."""
    shown = f"{len(gpus)} × {gpus[0]}, driver {driver or 'unknown'}"
    needed = DRIVERS.get(int(torch.cuda.partition(".")[0] or 0), 0)
    if not torch.version or torch.error:
        return Finding("gpu", NOTE, f"{shown}: not tried, as torch is missing")
    if not torch.cuda:
        mend = f"{torch.reinstall} --index-url https://pypi.org/simple"
        return Finding("gpu", FAIL, f"{shown}: this torch is a CPU build and cannot use it", mend)
    if not torch.gpus and driver and not within(driver, f">={needed}"):
        mend = f"sudo apt-get install nvidia-driver-{needed} && sudo reboot"
        return Finding("gpu", FAIL, f"{shown}: CUDA {torch.cuda} needs driver {needed} or newer", mend)
    found = f"{shown}, usable" if torch.gpus else f"{shown}: torch finds no device it may use"
    return _judge("gpu", bool(torch.gpus), found, "nvidia-smi; ls -l /dev/nvidia*")


def check_triton(torch: Torch, version: str, has_compiler: bool) -> Iterator[Finding]:
    found = version or "not installed: it brings the GPU's kernels"
    yield _judge("triton", bool(version), found, torch.reinstall)
    found = "found" if has_compiler else "no C compiler, which triton needs"
    yield _judge("compiler", has_compiler, found, "sudo apt-get install gcc")


def check_peers(torch: Torch, peers: Peers) -> Iterator[Finding]:
    """NCCL is needed. The rest makes sums over tensor-parallel ranks, and exchanges between experts, faster."""
    count, pairs = len(torch.gpus), ", ".join(f"{a} and {b}" for a, b in peers.apart)
    apart = f"GPUs {pairs} do not address each other's memory: their sums take NCCL"
    together = f"all {count} GPUs address each other's memory"
    yield _judge("peer access", not pairs, apart if pairs else together, "nvidia-smi topo -p2p r", WARN)
    found = peers.nccl or "this torch has none: models run on one GPU"
    yield _judge("nccl", bool(peers.nccl), found, torch.reinstall, WARN)
    found = f"none: {peers.error}; sums take NCCL" if peers.error else "torch makes it"
    yield _judge("symmetric memory", not peers.error, found, torch.reinstall, WARN)


def check_wheel(wheel: Wheel, torch: Torch, has_gpu: bool, version: str) -> Finding:
    """Never a failure, a warning where the installed release is one for another torch."""
    on = torch.version or "0"
    right = wheel.requirement(on)
    if version and not right:
        return Finding(wheel.title, WARN, f"{version} does not load on torch {on}", f"pip uninstall --yes {wheel.name}")
    if version:
        fits = "==" not in right or within(version, Requirement(right).specifier)
        found = wheel.use if fits else f"torch {on} goes with {right.partition('==')[2]}"
        return _judge(wheel.title, fits, f"{version}: {found}", wheel.command(on), WARN)
    if wheel.cuda and not has_gpu:
        return Finding(wheel.title, NOTE, f"not installed, and of no use without a GPU ({wheel.use})")
    if not right or (wheel.cuda and torch.cuda and not torch.cuda.startswith(f"{wheel.cuda}.")):
        other = f"CUDA {torch.cuda}" if right else f"torch {on}"
        return Finding(wheel.title, NOTE, f"not installed, and there is none for {other} ({wheel.use})")
    return Finding(wheel.title, NOTE, f"not installed; optional: {wheel.use}", wheel.command(on))


def check_deep_gemm_compiler(trials: Sequence[ProbeResult], torch: Torch) -> Finding:
    """trials: what was tried, up to the first compiler that works. NVRTC comes with torch, the headers do not."""
    works = [str(trial) for trial in trials if not trial.error]
    found = works[0] if works else f"none works: {'; '.join(map(str, trials)) or 'none found'}"
    headers = f"nvidia-cuda-cccl=={torch.cuda}.*" if torch.cuda else "nvidia-cuda-cccl"
    return _judge("nvcc or NVRTC", bool(works), found, f"pip install '{headers}'", WARN)


def check_memory(machine: Machine) -> Finding:
    found = f"{machine.free / GB:.1f} of {machine.memory / GB:.1f} GB free"
    return _judge("memory", machine.free >= 2 * GB, found, "ps aux --sort=-rss | head", WARN)


def check_shared_memory(free: int, gpus: int) -> Finding:
    mend = "sudo mount -o remount,size=8g /dev/shm   (docker run --shm-size 8g)"
    return _judge("/dev/shm", free >= SHM or gpus < 2, f"{free / GB:.1f} GB free", mend, WARN)


def check_open_files(soft: int, hard: int) -> Finding:
    enough, may_raise = (limit >= OPEN_FILES or limit == resource.RLIM_INFINITY for limit in (soft, hard))
    found = f"{soft}" + ("" if enough else ": fewer connections at a time than --max-connections allows")
    mend = f"ulimit -n {OPEN_FILES}" if may_raise else f"sudo prlimit --pid $$ --nofile={OPEN_FILES}:{OPEN_FILES}"
    return _judge("open files", enough, found, mend, WARN)


def check_port(listen: ListenOptions, error: str, model: str) -> Finding:
    """error: why a server cannot listen there."""
    mend = f"thalweg serve {model or 'MODEL'} --port 0  # picks a free one"
    return _judge("port", not error, error or f"{listen.host} port {listen.port}: free", mend)


def check_cache(folder: Path, is_writable: bool, free: int) -> Finding:
    """Checks the hub's cache folder; never a failure, since a model may be a local folder."""
    if not is_writable:
        return Finding("hub cache", WARN, f"{folder} cannot be written", "export HF_HOME=$HOME/models")
    return _judge("hub cache", free >= CACHE_FREE, f"{folder}: {free / GB:.1f} GB free", "hf cache prune", WARN)


def check_hub(error: str) -> Finding:
    mend = "curl -sSI https://huggingface.co   (behind a proxy: set HTTPS_PROXY or HF_ENDPOINT)"
    return _judge("hub", not error, error or "answers", mend, WARN)


def check_model(model: str, error: str) -> Finding:
    return _judge("model", not error, error or model, f"thalweg plan --model {model}")


# ---- looking ----


def _torch() -> Torch:
    if not (version := _version("torch")):
        return Torch()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that is missing or of another machine
        return Torch(version, str(error))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Torch(version, "", torch.version.cuda or "", tuple(map(torch.cuda.get_device_name, range(count))))


def _peers(gpus: int) -> Peers:
    """gpus: how many torch can use."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    apart = tuple(pair for pair in combinations(range(gpus), 2) if not torch.cuda.can_device_access_peer(*pair))
    has_nccl, error = dist.is_available() and dist.is_nccl_available(), ""
    try:
        symmetric.empty(1, dtype=torch.int64, device=torch.device("cuda"))
    except RuntimeError as failure:
        error = str(failure).partition("\n")[0]
    version: tuple[int, ...] = torch.cuda.nccl.version() if has_nccl else ()  # type: ignore[no-untyped-call]
    return Peers(apart, ".".join(map(str, version)), error)


def _requirements() -> list[Requirement]:
    """Requirements of Thalweg itself, without its extras."""
    try:
        given = importlib.metadata.requires("thalweg") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a folder that is not installed
        return []
    return [Requirement(one) for one in given if "extra ==" not in one]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version() -> str:
    """The version of NVIDIA's driver; "" where its file is hidden, as in some containers."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text() if path.is_file() else "")
    return found[1] if found else ""


def _bind_error(listen_at: ListenOptions) -> str:
    """Why a server cannot listen there; "" where it can."""
    from thalweg.launch.serve import listen

    try:
        listen(listen_at).close()
    except UnsupportedConfig as error:
        return str(error)
    return ""


def _hub_error(endpoint: str) -> str:
    """Why the hub does not answer; "" where it does, if only with a refusal."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return f"{endpoint} does not answer: {error}"
    return ""


def _model_error(options: Options) -> str:
    """Why a checkpoint cannot be served here, "" where it can. Weights are looked for, not read."""
    from thalweg.launch.hub import missing_weights
    from thalweg.launch.resolve import resolve

    model = options.model.model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return f"{model}: no such folder; doctor looks at folders only (thalweg plan reads a model of the hub)"
    try:
        resolve(options, weights=False)
        lost = missing_weights(folder)
    except ThalwegError as error:
        return str(error)
    return f"{model} lacks {', '.join(lost[:3])}{' …' if len(lost) > 3 else ''}" if lost else ""
