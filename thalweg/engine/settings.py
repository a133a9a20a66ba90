"""What an engine is built from: plain data, so that it can cross to the engine's process. The resolver makes it; nothing edits it."""

from __future__ import annotations

import msgspec

from thalweg.core.kernels import KernelChoice


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """path: checkpoint folder. dtype: "float32" or "bfloat16". device: "cpu" or "cuda". kernels: what the model
    runs on. graphs: rows of the decode steps that are recorded as CUDA graphs. load_format: "auto" (safetensors) or
    "dummy". threads: of torch's CPU pool. depth: steps in flight at most (1 synchronous, 2 overlap). pages: pages of the cache, the null page
    not counted. slots: running requests at most. budget: tokens a step. context: longest sequence in tokens. policy: "fcfs", "lpm" or
    "priority". eos_ids: tokens that end a sequence. seed: of the seeds drawn for requests that name none. queue: requests waiting at most, 0 =
    no limit. progress: whether loading shows a bar. log_level, log_format: of the engine's own process. crash_dump_folder: where recordings are
    written, "" for none. watchdog_timeout: seconds without a step, while there is work, after which the engine counts as wedged; 0 is never.
    report: the resolved choices with their reasons, as a JSON object."""

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    kernels: KernelChoice = KernelChoice()
    graphs: tuple[int, ...] = ()
    load_format: str = "auto"
    threads: int = 1
    depth: int = 1
    pages: int = 1024
    slots: int = 64
    budget: int = 2048
    context: int = 4096
    policy: str = "fcfs"
    radix: bool = True
    eos_ids: tuple[int, ...] = ()
    seed: int = 0
    queue: int = 0
    progress: bool = True
    log_level: str = "info"
    log_format: str = "text"
    crash_dump_folder: str = ""
    watchdog_timeout: float = 300.0
    report: str = "{}"
