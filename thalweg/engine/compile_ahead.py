"""Compiles kernels in parallel processes while the engine starts, so that its warm-up finds them in the cache folder.

`dry_run` runs the warm-up without a GPU and compiles Triton's kernels. DeepGEMM's are compiled by `deep_gemm_calls` on
the engine's GPU. What fails here is compiled by the warm-up itself, one kernel after the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

import msgspec
import torch

from thalweg.config.engine import EngineConfig
from thalweg.config.machine import cores
from thalweg.engine import caches
from thalweg.kernels.gemm import toolchain

log = logging.getLogger("thalweg.engine")

FEWEST_CORES = 4  # with fewer the processes would take the time from the engine itself
MOST_PROCESSES = 16
GPU_PROCESS = 2 << 30  # bytes of the GPU that a process of DeepGEMM takes: its context and its block
GPU_RESERVE = 6 << 30  # bytes of the GPU for the engine beside its weights
PATIENCE = 600.0  # seconds

# Runs nvcc for the first process that asks for a source. For others it fails, so that they go on with another kernel,
# and removes the folder that DeepGEMM made for the result.
NVCC_ONCE = """\
#!/bin/sh
for word; do
    case "$word" in *.cu) ;; *) continue ;; esac
    mkdir "{claims}/$(sha256sum < "$word" | cut -c1-64)" 2>/dev/null && continue
    file=$(readlink -f "$word")
    case "$file" in "{unfinished}"/*/*) rm -r "${{file%/*}}" ;; esac
    exit 1
done
exec "{nvcc}" "$@"
"""


class Job(msgspec.Struct, frozen=True):
    """The dry run's standard input."""

    config: EngineConfig
    capability: tuple[int, int]  # of the GPU
    free: int  # bytes of the GPU before the weights
    workers: int  # processes
    claims: str  # folder with a file for each kernel that a process compiles


class DryRunMessage(msgspec.Struct, omit_defaults=True):
    """A line of its standard output."""

    weights: int = 0  # bytes of the model's parameters
    steps: int = 0  # of the warm-up
    done: int = 0  # 1: a step was run
    kernel: str = ""  # the name of one that Triton compiled
    call: Any = None  # of DeepGEMM
    error: str = ""  # a step that could not be run


class CompileAhead:
    """The processes of one start. `finish` waits for them; leaving the context ends them."""

    is_warm = False

    def __init__(self, config: EngineConfig) -> None:
        self.begun, self.workers = time.monotonic(), min(cores(), MOST_PROCESSES)
        self.folder = tempfile.TemporaryDirectory(prefix="thalweg-compile-", ignore_cleanup_errors=True)
        self.lock, self.is_closed = threading.Lock(), False
        self.free = int(torch.cuda.mem_get_info()[0])
        self.counts, self.errors = dict.fromkeys(("weights", "steps", "done", "kernel", "call"), 0), list[str]()
        self.calls: queue.Queue[bytes | None] = queue.Queue()
        self.processes, self.feeders = list[subprocess.Popen[bytes]](), list[threading.Thread]()
        job = Job(config, torch.cuda.get_device_capability(), self.free, self.workers, self._folder("triton"))
        process = self._start("thalweg.engine.dry_run", (), {"CUDA_VISIBLE_DEVICES": ""})
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        self.reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self.reader.start()

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes with what they have started, and gives back their memory of the GPU."""
        with self.lock:
            self.is_closed = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.reader.join()
        self.folder.cleanup()

    def finish(self, progress: Callable[[int, int], None]) -> None:
        """Waits until all is compiled. progress: called with (steps done, steps in all)."""
        while self.reader.is_alive() and time.monotonic() < self.begun + PATIENCE:
            self.reader.join(0.1)
            progress(self.counts["done"], self.counts["steps"])
        if self.reader.is_alive():
            self.errors.append(f"not done after {PATIENCE:.0f} s")
        self.close()  # start-up measures memory and times next
        log.info(
            "compiled ahead in %.0f s by %d processes: %d Triton kernels, %d products of DeepGEMM tried by %d%s",
            time.monotonic() - self.begun,
            self.workers,
            self.counts["kernel"],
            self.counts["call"],
            len(self.feeders),
            f"; {len(self.errors)} failed and are left to the warm-up, first: {self.errors[0]}" if self.errors else "",
        )

    def _folder(self, name: str) -> str:
        path = Path(self.folder.name, name)
        path.mkdir()
        return str(path)

    def _start(self, module: str, arguments: tuple[str, ...], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """Raises OSError, also after `close`."""
        with self.lock:
            if self.is_closed:
                raise OSError("the start is over")
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C is for the engine, which ends them
            )
            self.processes.append(process)
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Takes what the dry run reports, and gives DeepGEMM's calls to processes with the GPU."""
        assert process.stdout is not None
        calls = set[bytes]()
        for line in process.stdout:
            try:
                message = msgspec.json.decode(line, type=DryRunMessage)
            except msgspec.DecodeError:  # a library printed something
                continue
            self.counts["weights"] += message.weights
            self.counts["steps"] += message.steps
            self.counts["done"] += message.done
            self.counts["kernel"] += bool(message.kernel)
            if message.error:
                self.errors.append(message.error)
            if message.call is not None and (call := msgspec.json.encode(message.call)) not in calls:
                if not calls:
                    try:
                        self._start_feeders()
                    except OSError as error:
                        self.errors.append(str(error))
                calls.add(call)
                self.calls.put(call)
        if code := process.wait():
            self.errors.append(f"the dry run ended with exit code {code}")
        self.counts["call"] = len(calls)
        for _ in self.feeders:
            self.calls.put(None)
        for feeder in self.feeders:
            feeder.join()

    def _start_feeders(self) -> None:
        """Starts as many processes of DeepGEMM as the GPU has memory for beside the weights."""
        result = toolchain.trials_here()[-1:]
        room = (self.free - self.counts["weights"] - GPU_RESERVE) // GPU_PROCESS
        if not result or result[0].error or room < 1:
            return
        compiler = result[0].compiler
        variables = toolchain.variables(compiler, os.environ)
        variables["CUDA_HOME"] = toolchain.cuda_home(compiler, toolchain.choice_folder())
        if compiler.kind == toolchain.NVCC:
            nvcc = Path(self.folder.name, "nvcc")
            unfinished = Path(os.environ["DG_JIT_CACHE_DIR"], "tmp").resolve()
            claims = self._folder("deep_gemm")
            nvcc.write_text(NVCC_ONCE.format(claims=claims, unfinished=unfinished, nvcc=compiler.file))
            nvcc.chmod(0o755)
            variables["DG_JIT_NVCC_COMPILER"] = str(nvcc)
        arguments = (compiler.file,) if compiler.kind == toolchain.NVRTC else ()
        for _ in range(min(self.workers, room)):
            process = self._start("thalweg.kernels.gemm.deep_gemm_calls", arguments, variables)
            self.feeders.append(threading.Thread(target=self._feed, args=(process,), daemon=True))
            self.feeders[-1].start()

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        """Gives a process one call after the other, as long as it lives."""
        assert process.stdin is not None and process.stdout is not None
        while (call := self.calls.get()) is not None:
            try:
                process.stdin.write(call + b"\n")
                process.stdin.flush()
            except OSError:
                return
            if not process.stdout.readline():
                return
        process.stdin.close()
        process.wait()


class NothingAhead:
    """Stands for `CompileAhead` where nothing has to be compiled ahead."""

    def __init__(self, is_warm: bool = False) -> None:
        """is_warm: an earlier warm-up has filled the cache folder."""
        self.is_warm = is_warm

    def __enter__(self) -> NothingAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def finish(self, progress: Callable[[int, int], None]) -> None:
        pass


def compile_ahead(config: EngineConfig) -> CompileAhead | NothingAhead:
    """Starts to compile, unless the same warm-up filled the cache folder before."""
    is_useful = config.device == "cuda" and config.warmup and config.decode_attention_backend != "reference"
    is_useful = is_useful and config.processes == 1  # the dry run knows no rank; and all ranks run the same warm-up
    is_warm = is_useful and caches.is_warm(config)
    if not is_useful or cores() < FEWEST_CORES or is_warm:
        return NothingAhead(is_warm)
    try:
        return CompileAhead(config)
    except OSError as error:
        log.warning("kernels are not compiled ahead: %s", error)
        return NothingAhead()
