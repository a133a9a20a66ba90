"""The rate of an engine alone on one core, without a server: the reference of `thalweg bench load`.

A program of its own (`python -m thalweg.bench.pinned_engine`), so that the engine has a process to itself: a
`PinnedTask` in JSON comes on stdin, a `StepRate` goes to stdout.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

import msgspec

from thalweg.bench.in_process import exactly, generate
from thalweg.config.tree import options_of
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve


class PinnedTask(msgspec.Struct, frozen=True):
    prompts: list[list[int]]  # token ids, all submitted at once
    output_len: int  # tokens of each
    core: int
    settings: dict[str, str | int]  # of the engine


class StepRate(msgspec.Struct, frozen=True):
    """Of the steps in which every sequence decodes."""

    steps_per_second: float  # of wall time
    cpu_us_per_token: float
    steps: int


def measure(task: PinnedTask) -> StepRate:
    """Raises ThalwegError."""
    os.sched_setaffinity(0, {task.core})
    engine = LocalEngine(resolve(options_of(**task.settings), progress=False).engine)
    requests = [exactly(prompt, task.output_len) for prompt in task.prompts]
    cpu, full = time.process_time(), []
    with closing(generate(engine, requests)) as run:
        for step in run:
            if step.started < len(requests):
                cpu = time.process_time()
            elif step.running == len(requests):
                full.append(step)
            else:
                break
        cpu = time.process_time() - cpu
    tokens = sum(step.tokens for step in full)
    return StepRate(len(full) / (full[-1].end - full[0].begin), 1e6 * cpu / max(tokens, 1), len(full))


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=PinnedTask)
    sys.stdout.buffer.write(msgspec.json.encode(measure(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
