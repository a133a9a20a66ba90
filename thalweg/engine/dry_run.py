"""Compiles ahead what the steps of the warm-up launch, without a GPU: `python -m thalweg.engine.dry_run`.

Tensors are fake (torch's FakeTensorMode): they have a shape and a device, and no memory. Triton compiles its kernels
into the cache folder and launches none. DeepGEMM compiles only where there is a GPU, so its calls are reported to the
engine (`compile_ahead`). Processes forked from this one take the steps in turn; the first that meets a kernel compiles
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from thalweg.engine import build
from thalweg.engine.calibration_memory import runner_without_cache
from thalweg.engine.calibration_warmup import Work, warm_up_work
from thalweg.engine.compile_ahead import DryRunMessage, Job
from thalweg.kernels.gemm import toolchain
from thalweg.kernels.gemm.deep_gemm_calls import SCHEDULE, encode
from thalweg.kernels.gqa import fa3
from thalweg.kernels.launch import SMS
from thalweg.kernels.tuned import TUNED
from thalweg.memory import hot
from thalweg.memory.planes import Planes
from thalweg.models.catalog import read_facts

DEVICE = torch.device("cuda", 0)


class FakeMemory(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fakes all tensors. A tensor made from numbers forgets them: torch would compute with it on the GPU."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def may_turn_const(self, t: Tensor) -> bool:
        return False


class Driver:
    """What Triton asks a driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        pretend(job)
        with FakeMemory():
            work = prepare(job)
            run_all(job, work)
    except Exception as error:  # noqa: BLE001 the engine goes on without this process, and logs its error
        send(DryRunMessage(error=f"{type(error).__name__}: {error}"))
    return 0


def send(message: DryRunMessage) -> None:
    """Writes a line at once, so that processes do not mix theirs."""
    os.write(1, msgspec.json.encode(message) + b"\n")


def pretend(job: Job) -> None:
    """Makes this process take itself for one with the engine's GPU."""
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from thalweg.kernels.compilations import use_stable_keys

    use_stable_keys()
    launch, launchers = JITFunction.run, set[str]()

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        _, keys, *_ = function.device_caches[0]
        keys.clear()  # it takes True for 1, whose kernels have two files: the engine may ask for either
        kernel = launch(function, *args, grid=grid, warmup=True, **options)
        if isinstance(kernel, CompiledKernel) and kernel.hash not in launchers:  # else another process compiles it
            launchers.add(kernel.hash)
            compile_launcher(kernel)
        return kernel

    driver.set_active(Driver(job.capability))
    JITFunction.run = compile_only
    triton.knobs.runtime.jit_cache_hook = partial(compiles_elsewhere, Path(job.claims))
    vars(torch.cuda)["get_device_capability"] = lambda device=None: job.capability
    # the allocator's blocks are aligned, so an address is as divisible as the offset in its block
    setattr(FakeTensor, "data_ptr", lambda self: self.storage_offset() * self.dtype.itemsize)  # noqa: B010
    setattr(Tensor, "pin_memory", lambda self: self)  # noqa: B010
    vars(hot).update(lock_pages=lambda address, size: None, unlock_pages=lambda address: None)
    replace_libraries()


def compile_launcher(kernel: Any) -> None:
    """Compiles the C function with which Triton launches a kernel. It takes a C compiler a quarter of a second, and
    Triton would ask for it at the first launch. What fails here the engine will see.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    with contextlib.suppress(AssertionError, ImportError, OSError, subprocess.SubprocessError, RuntimeError):
        CudaLauncher(kernel.src, kernel.metadata)


def compiles_elsewhere(claims: Path, *, key: str, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
    """Triton's hook: whether another process compiles this kernel. If so, this one does not ask again."""
    name = f"{fn.module}.{fn.name}"
    try:
        os.close(os.open(claims / hashlib.sha256(f"{name} {key}".encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        kernels, *_ = fn.jit_function.device_caches[compile["device"]]
        kernels[key] = claims  # any value but None
        return True
    send(DryRunMessage(kernel=name))
    return False


def replace_libraries() -> None:
    """Puts modules without computation in the place of libraries with compiled kernels. DeepGEMM's reports its calls,
    each once.
    """
    reported = set[bytes]()

    def report(name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # torch and inspect ask modules for their files
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            for kind in _kinds(name, args):
                message = DryRunMessage(call=[name, encode(kind), options])
                if (line := msgspec.json.encode(message)) not in reported:
                    reported.add(line)
                    send(message)
            return RESULTS[name](*args, **options) if name in RESULTS else None

        return call

    flash_mla, deep_gemm = ModuleType("flash_mla"), ModuleType("deep_gemm")
    vars(flash_mla).update(
        get_mla_metadata=lambda: (ModuleType("schedule"), None),
        get_mla_decoding_metadata=lambda *args, **options: (None, None),
        flash_mla_with_kvcache=_flash_mla,
        flash_mla_sparse_fwd=_flash_mla_sparse,
    )
    vars(deep_gemm).update(__getattr__=report, get_num_sms=lambda: SMS)
    sys.modules.update(flash_mla=flash_mla, deep_gemm=deep_gemm)
    vars(toolchain)["for_import"] = contextlib.nullcontext
    vars(fa3)["_operation"] = lambda: _fa3


def _flash_mla(query: Tensor, plane: Tensor, table: Any, lengths: Any, rank: int, *_: Any, **options: Any) -> Any:
    tokens, row, heads, _dim = query.shape
    out = query.new_empty(tokens, row, heads, rank, dtype=torch.bfloat16)
    return out, query.new_empty(tokens, heads, row, dtype=torch.float32)


def _flash_mla_sparse(query: Tensor, plane: Tensor, places: Tensor, scale: float, rank: int, **options: Any) -> Any:
    return query.new_empty(*query.shape[:2], rank), None, None


def _kinds(name: str, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments of each kernel that serving may need beside this call's. A schedule's kernel is of so many rows in
    whole blocks of 32, and a step may have fewer rows than this one.
    """
    if name == SCHEDULE:
        lengths, *rest = args
        for rows in range(32, len(lengths) + 32, 32):
            yield lengths.new_empty(rows, *lengths.shape[1:]), *rest
    else:
        yield args


def _schedule(lengths: Tensor, page: int, processors: int) -> Tensor:
    return lengths.new_empty(processors + 1, 2)


def _paged_logits(
    query: Tensor, plane: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, plan: Tensor, columns: int, **_: Any
) -> Tensor:
    return weights.new_empty(len(weights), columns)


def _logits(query: Tensor, keys: Any, weights: Tensor, *_: Tensor, max_seqlen_k: int, **options: Any) -> Tensor:
    return weights.new_empty(len(weights), max_seqlen_k)


# of DeepGEMM's functions that return a tensor
RESULTS: dict[str, Callable[..., Tensor]] = {
    "get_paged_mqa_logits_metadata": _schedule,
    "fp8_paged_mqa_logits": _paged_logits,
    "fp8_mqa_logits": _logits,
}


def _fa3(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    tokens, heads, _ = query.shape
    out = rest[3] if rest[3] is not None else query.new_empty(tokens, heads, value.shape[2])
    return out, query.new_empty(heads, tokens, dtype=torch.float32)


def prepare(job: Job) -> Sequence[Work]:
    """The steps of the warm-up of a model without weights, on planes without memory."""
    config = job.config
    facts = read_facts(Path(config.model_path), config.index_topk_pattern)
    torch.set_num_threads(1)
    TUNED.use(config.tuned_kernels)
    _, model, drafter = build.assemble(config, facts, DEVICE)
    modules = [one for one in (model, *drafter.modules(), *drafter.own_weight_modules()) if isinstance(one, nn.Module)]
    weights = sum({id(one): one.nbytes for module in modules for one in module.parameters()}.values())
    context = config.context_length
    if not config.num_pages:
        page = Planes.page_cost((*model.planes(), *drafter.planes()))
        context = max(min(context, (job.free - weights) // page * config.page_size), 1)
    work = warm_up_work(runner_without_cache(config, model, drafter, context, DEVICE), config, context)
    send(DryRunMessage(weights=weights, steps=len(work)))
    return work


def run_all(job: Job, work: Sequence[Work]) -> None:
    """Runs the steps in forked processes. The last ones come first: FP8 products, whose compilation takes longest."""
    context = multiprocessing.get_context("fork")
    left = context.Value("i", len(work))

    def run() -> None:
        with torch.inference_mode():
            while (step := _decrement(left)) >= 0:
                error = ""
                try:
                    work[step]()
                except DataDependentOutputException:
                    pass  # the step reads a result, after its last kernel
                except Exception as reason:  # noqa: BLE001 the warm-up will run into it
                    frame = traceback.extract_tb(reason.__traceback__)[-1]
                    error = f"{type(reason).__name__}: {reason} ({Path(frame.filename).name}:{frame.lineno})"[:500]
                send(DryRunMessage(done=1, error=error))

    processes = [context.Process(target=run) for _ in range(job.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _decrement(number: Any) -> int:
    with number.get_lock():
        number.value -= 1
        return int(number.value)


if __name__ == "__main__":
    sys.exit(main())
