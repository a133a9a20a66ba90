"""`thalweg doctor`: looks at the machine and says what is missing and the command that mends it.

`Environment.look` asks the system; `examine` judges what it found and asks nothing, so that every judgement can be
tested.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import re
import resource
import shlex
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from thalweg import __version__
from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.core.errors import ThalwegError
from thalweg.launch.wheels import WHEELS, Wheel, within

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
GB, GIB = 10**9, 2**30
OPEN_FILES = 16384  # --max-connections is 8,192, and each may have a body and an answer under way
SHM = GIB  # what several processes that share a GPU's work keep in shared memory
CACHE_ROOM = 20 * GB
DRIVERS = {12: 525, 13: 580}  # CUDA major → the first driver that runs it
TRIES = 64  # ports that are tried for a free one
WAIT = 5.0  # seconds for the hub to answer
ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: str  # ok; note: good to know; warn: works with a drawback; fail: serving would not start
    found: str
    mend: str = ""  # a command


@dataclass(frozen=True, slots=True)
class Environment:
    """What the doctor looks at. An empty text is "none"."""

    python: str
    machine: Machine
    driver: str  # version of NVIDIA's
    torch: str  # version
    torch_error: str  # why it does not import
    cuda: str  # that torch was built for
    reached: tuple[str, ...]  # names of the GPUs that torch can use
    requires: tuple[str, ...]
    packages: Mapping[str, str]  # versions of distributions that are required or known
    compiler: bool
    shm: int  # free bytes; -1: there is no such place
    open_files: int
    open_files_most: int
    host: str
    port: int
    port_error: str  # why host:port cannot be bound
    free_port: int  # one that can be; 0: none
    cache: str
    cache_writable: bool
    room: int  # free bytes of the hub's cache
    hub: str | None  # what the hub answered; None: it was not asked
    model: str
    model_error: str  # why `model` cannot be served

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs: the driver's list, which some containers hide, else torch's."""
        return self.machine.gpus or self.reached

    @property
    def reinstall(self) -> str:
        """The command that installs the same torch again."""
        return f"pip install --force-reinstall 'torch=={self.torch.partition('+')[0]}'"

    @staticmethod
    def look(config: Options, online: bool = False) -> Environment:
        """Looks at this machine for the model, host and port of `config`. online: whether to ask the hub."""
        torch, error, cuda, reached = _torch()
        from huggingface_hub import constants

        requires, listen = _requires(), config.listen
        names = ["triton", *(Requirement(one).name for one in requires)]
        names += [name for wheel in WHEELS for name in wheel.names]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        port_error = _bind(listen.host, listen.port)
        cache = Path(constants.HF_HUB_CACHE)
        existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
        return Environment(
            python=sys.version.split()[0],
            machine=Machine.here(),
            driver=_driver(),
            torch=torch,
            torch_error=error,
            cuda=cuda,
            reached=reached,
            requires=requires,
            packages={name: version for name in names if (version := _version(name))},
            compiler=any(shutil.which(name) for name in ("cc", "gcc", "clang")),
            shm=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else -1,
            open_files=soft,
            open_files_most=hard,
            host=listen.host,
            port=listen.port,
            port_error=port_error,
            free_port=_free_port(listen.host, listen.port) if port_error else 0,
            cache=str(cache),
            cache_writable=os.access(existing, os.W_OK),
            room=shutil.disk_usage(existing).free,
            hub=_ask(constants.ENDPOINT) if online else None,
            model=config.model.model,
            model_error=_model_error(config) if torch and not error else "",
        )


def doctor(config: Options, rest: argparse.Namespace) -> int:
    """The command. rest: `json` and `online`. Returns 0 if serving can start, else 1."""
    findings = list(examine(Environment.look(config, rest.online)))
    sick = any(one.level == FAIL for one in findings)
    if rest.json:
        report = {"ok": not sick, "version": __version__, "findings": [asdict(one) for one in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(text(findings))
    return int(sick)


def text(findings: list[Finding]) -> str:
    """The report for people: a line for each finding, its command below it, and a last line that sums up."""
    lines, count = [], Counter(one.level for one in findings)
    for one in findings:
        lines.append(f"{one.level.upper() if one.level == FAIL else one.level:<5}{one.check:<16}{one.found}")
        lines += [f"{'':<21}→ {one.mend}"] if one.mend else []
    advice = {FAIL: "to mend before serving", WARN: "to look at"}
    counts = [f"{count[level]} {what}" for level, what in advice.items() if count[level]]
    return "\n".join([*lines, "", ", ".join(counts) or "nothing is missing"])


# ---- judging ----


def _judge(check: str, good: bool, found: str, mend: str = "", bad: str = FAIL) -> Finding:
    """mend: the command for what is not good. bad: its level."""
    return Finding(check, OK, found) if good else Finding(check, bad, found, mend)


def examine(seen: Environment) -> Iterator[Finding]:
    """What is good and what is not, in the order in which it should be mended."""
    yield _judge("python", within(seen.python, ">=3.11"), seen.python, "make PYTHON=python3.12 clean install")
    yield from _packages(seen)
    yield from _gpu(seen)
    yield from (_wheel(seen, wheel) for wheel in WHEELS)
    yield from _limits(seen)
    place = f"{seen.host} port {seen.port}"
    serve = f"thalweg serve {seen.model or 'MODEL'} --port {seen.free_port}"  # 0 picks a free one
    yield _judge("port", not seen.port_error, f"{place}: {seen.port_error or 'free'}", serve)
    yield from _cache(seen)
    if seen.model:
        plan = f"thalweg plan --model {seen.model}"
        yield _judge("model", not seen.model_error, seen.model_error or seen.model, plan)


def _packages(seen: Environment) -> Iterator[Finding]:
    build = f"{seen.torch}, built for {f'CUDA {seen.cuda}' if seen.cuda else 'the CPU'}"
    if not seen.torch:
        yield Finding("torch", FAIL, "not installed", "make install")
    else:
        found = f"{seen.torch} does not import: {seen.torch_error}" if seen.torch_error else build
        yield _judge("torch", not seen.torch_error, found, seen.reinstall)
    wrong = {}
    for one in map(Requirement, seen.requires):
        have = seen.packages.get(one.name, "")
        if not (have and within(have, one.specifier)) and (seen.torch or one.name != "torch"):
            wrong[str(one)] = f"{have} is installed" if have else "not installed"
    found = ", ".join(f"{one}: {have}" for one, have in wrong.items())
    found = found or f"all {len(seen.requires)} that Thalweg needs"
    yield _judge("packages", not wrong, found, f"pip install {' '.join(map(shlex.quote, wrong))}")


def _gpu(seen: Environment) -> Iterator[Finding]:
    """Driver, torch's build and triton, which matter only where there is a GPU."""
    if not seen.gpus:
        cpu = f"{seen.machine.cpu}, {seen.machine.cores} cores"
        yield Finding("gpu", NOTE, f"no NVIDIA GPU: models run on the CPU ({cpu})")
        return
    shown = f"{len(seen.gpus)} × {seen.gpus[0]}, driver {seen.driver or 'unknown'}"
    driver = DRIVERS.get(int(seen.cuda.partition(".")[0] or 0), 0)
    if not seen.torch or seen.torch_error:
        yield Finding("gpu", NOTE, f"{shown}: not tried, as torch is missing")
    elif not seen.cuda:
        mend = f"{seen.reinstall} --index-url https://pypi.org/simple"
        yield Finding("gpu", FAIL, f"{shown}: this torch is a CPU build and cannot use it", mend)
    elif not seen.reached and seen.driver and not within(seen.driver, f">={driver}"):
        mend = f"sudo apt-get install nvidia-driver-{driver} && sudo reboot"
        yield Finding("gpu", FAIL, f"{shown}: CUDA {seen.cuda} needs driver {driver} or newer", mend)
    else:
        found = f"{shown}, usable" if seen.reached else f"{shown}: torch finds no device it may use"
        yield _judge("gpu", bool(seen.reached), found, "nvidia-smi; ls -l /dev/nvidia*")
    triton = seen.packages.get("triton", "")
    yield _judge("triton", bool(triton), triton or "not installed: it brings the GPU's kernels", seen.reinstall)
    found = "found" if seen.compiler else "no C compiler, which triton needs"
    yield _judge("compiler", seen.compiler, found, "sudo apt-get install gcc")


def _wheel(seen: Environment, wheel: Wheel) -> Finding:
    """An optional library: never a failure, a warning where the installed release is one for another torch."""
    torch, name = seen.torch or "0", next((name for name in wheel.names if name in seen.packages), "")
    right = wheel.requirement(torch)
    has_cuda = not (wheel.cuda and seen.cuda) or seen.cuda.startswith(f"{wheel.cuda}.")
    if name:
        have = seen.packages[name]
        if not right:
            return Finding(wheel.title, WARN, f"{have} does not load on torch {torch}", f"pip uninstall --yes {name}")
        fits = name != wheel.names[0] or "==" not in right or within(have, Requirement(right).specifier)
        found = wheel.use if fits else f"torch {torch} goes with {right.partition('==')[2]}"
        return _judge(wheel.title, fits, f"{have}: {found}", wheel.command(torch), WARN)
    if wheel.gpu and not seen.gpus:
        return Finding(wheel.title, NOTE, f"not installed, and of no use without a GPU ({wheel.use})")
    if not right or not has_cuda:
        other = f"CUDA {seen.cuda}" if right else f"torch {torch}"
        return Finding(wheel.title, NOTE, f"not installed, and there is none for {other} ({wheel.use})")
    return Finding(wheel.title, NOTE, f"not installed; optional: {wheel.use}", wheel.command(torch))


def _limits(seen: Environment) -> Iterator[Finding]:
    memory = f"{seen.machine.free / GB:.1f} of {seen.machine.memory / GB:.1f} GB free"
    yield _judge("memory", seen.machine.free >= 2 * GB, memory, "ps aux --sort=-rss | head", WARN)
    if seen.shm >= 0:
        enough = seen.shm >= SHM or len(seen.gpus) < 2
        mend = "sudo mount -o remount,size=8g /dev/shm   (docker run --shm-size 8g)"
        yield _judge("/dev/shm", enough, f"{seen.shm / GB:.1f} GB free", mend, WARN)
    enough = seen.open_files >= OPEN_FILES
    found = f"{seen.open_files}" + ("" if enough else ": fewer connections at a time than --max-connections allows")
    may_raise = seen.open_files_most >= OPEN_FILES or seen.open_files_most == resource.RLIM_INFINITY
    mend = f"ulimit -n {OPEN_FILES}" if may_raise else f"sudo prlimit --pid $$ --nofile={OPEN_FILES}:{OPEN_FILES}"
    yield _judge("open files", enough, found, mend, WARN)


def _cache(seen: Environment) -> Iterator[Finding]:
    """Where models of the hub are kept: of no matter for a model that is a folder, hence never a failure."""
    if seen.cache_writable:
        found = f"{seen.cache}: {seen.room / GB:.1f} GB free"
        yield _judge("hub cache", seen.room >= CACHE_ROOM, found, "hf cache prune", WARN)
    else:
        yield Finding("hub cache", WARN, f"{seen.cache} cannot be written", "export HF_HOME=$HOME/models")
    if seen.hub is not None:
        mend = "curl -sSI https://huggingface.co   (behind a proxy: set HTTPS_PROXY or HF_ENDPOINT)"
        yield _judge("hub", seen.hub == ANSWERS, seen.hub, mend, WARN)


# ---- looking ----


def _torch() -> tuple[str, str, str, tuple[str, ...]]:
    """(version, why it does not import, CUDA of the build, names of the GPUs that it reaches)"""
    version = _version("torch")
    if not version:
        return "", "", "", ()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that is missing or of another machine
        return version, str(error), "", ()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return version, "", torch.version.cuda or "", tuple(torch.cuda.get_device_name(i) for i in range(count))


def _requires() -> tuple[str, ...]:
    """Requirements of Thalweg itself, without those of its extras."""
    try:
        given = importlib.metadata.requires("thalweg") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a folder that is not installed
        return ()
    return tuple(one for one in given if "extra ==" not in one)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """NVIDIA's driver: from its file, else the first that has the CUDA of libcuda; "" where there is none."""
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
        return found[1] if found else ""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return ""
    library.cuDriverGetVersion(ctypes.byref(number))
    return str(DRIVERS.get(number.value // 1000, ""))


def _bind(host: str, port: int) -> str:
    """Why a server cannot listen there; "" where it can."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _free_port(host: str, port: int) -> int:
    return next((other for other in range(port + 1, min(port + TRIES, 65536)) if not _bind(host, other)), 0)


def _ask(endpoint: str) -> str:
    """Asks the hub for its first page: ANSWERS, or what went wrong."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=WAIT):
            return ANSWERS
    except urllib.error.HTTPError:
        return ANSWERS  # with a refusal, but it is there
    except (OSError, ValueError) as error:
        return f"{endpoint} does not answer: {error}"


def _model_error(config: Options) -> str:
    """Why a checkpoint cannot be served here, "" where it can or none is named. Weights are looked for, not read."""
    model = config.model.model
    if not model:
        return ""
    from thalweg.launch.hub import missing_weights
    from thalweg.launch.resolve import resolve

    folder = Path(model).expanduser()
    if not folder.is_dir():
        return f"there is no folder {model}; doctor looks at folders only (thalweg plan reads a model of the hub)"
    try:
        resolve(config, weights=False)
        lost = missing_weights(folder)
    except ThalwegError as error:
        return str(error)
    return f"{model} lacks {', '.join(lost[:3])}{' …' if len(lost) > 3 else ''}" if lost else ""
