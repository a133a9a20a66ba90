"""What an engine is built from: plain data, so that it can cross to the engine's process. The resolver makes it; nothing edits it."""

from __future__ import annotations

import msgspec

from thalweg.core.kernels import KernelConfig, TunedKernel
from thalweg.core.tree import CHAIN, TreeShape


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """path: checkpoint folder. dtype: "float32" or "bfloat16". device: "cpu" or "cuda". kernels: what the model runs on. graphs: rows of the
    steps that are recorded whole as CUDA graphs; mixed_graphs: whether prompt tokens may be such rows. pieces: tokens of the steps whose
    static parts are recorded; trim: less the largest, where eager steps are faster. torch_compile: see `models.compiled`. load_format: "auto"
    (safetensors) or "dummy". threads: of torch's CPU pool. depth: steps in flight at most (1 synchronous, 2 overlap). pages: pages of the
    cache, the null page not counted; 0 is as many as a GPU has room for beside all else. least_context: tokens of a sequence that they must
    hold. slots: running requests at most. budget: tokens a step. beside: see `scheduler.limits.Limits`; None lets the engine choose from times
    that it measures. drafter: one of `spec.catalog.DRAFTERS`, "" for none; drafter_path: the folder of its own weights, "" where the
    checkpoint has them; left_out: whether one was asked for, and there is no room for it; width: tokens it drafts a step at most; tree: how
    they part ways. times: see `scheduler.widths.MeasuredWidth`; () is always that width, None lets the engine measure. imposed: see
    `sampling.imposed`, 0 is off; for measuring speed only. acceptance: the rule that judges drafts, see `sampling.catalog.ruled`; relaxed:
    candidates and delta of the lossy one. context: longest sequence in tokens, less where the pages hold less. policy: "fcfs", "lpm" or
    "priority". eos_ids: tokens that end a sequence. seed: of the seeds drawn for requests that name none. queue: requests waiting at most,
    0 = no limit. progress: whether loading shows a bar. log_level, log_format: of the engine's own process. crash_dump_folder: where
    recordings are written, "" for none. watchdog_timeout: seconds without a step, while there is work, after which the engine counts as
    wedged; 0 is never. cache_dir: where compiled kernels are kept, "" for the usual place. warm: whether every kind of step runs once
    before the first request. tuned: tiles that replace those of the kernels' tables. updates: folders whose weights replace those of
    `path`, in this order. report: the resolved choices with their reasons, as a JSON object."""

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    kernels: KernelConfig = KernelConfig()
    graphs: tuple[int, ...] = ()
    mixed_graphs: bool = False
    pieces: tuple[int, ...] = ()
    trim: bool = False
    torch_compile: bool = False
    load_format: str = "auto"
    threads: int = 1
    depth: int = 1
    pages: int = 1024
    least_context: int = 0
    slots: int = 64
    budget: int = 2048
    beside: tuple[tuple[int, int], ...] | None = ()
    drafter: str = ""
    drafter_path: str = ""
    left_out: bool = False
    width: int = 0
    tree: TreeShape = CHAIN
    times: tuple[tuple[int, int, tuple[float, ...]], ...] | None = ()
    imposed: float = 0.0
    acceptance: str = "race"
    relaxed: tuple[int, float] = (10, 0.6)
    context: int = 4096
    policy: str = "fcfs"
    radix: bool = True
    eos_ids: tuple[int, ...] = ()
    seed: int = 0
    queue: int = 0
    progress: bool = True
    log_level: str = "info"
    log_format: str = "text"
    cache_dir: str = ""
    warm: bool = True
    tuned: tuple[TunedKernel, ...] = ()
    updates: tuple[str, ...] = ()
    crash_dump_folder: str = ""
    watchdog_timeout: float = 300.0
    report: str = "{}"
