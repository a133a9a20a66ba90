"""What the engine does alone on one core, with no server in front of it: the rate that a server is measured against.

A program of its own (`python -m thalweg.bench.pinned`), so that the measured engine has a process to itself: a JSON
object with the fields of `Task` comes on stdin, one with those of `Pace` goes to stdout.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from thalweg.bench.pace import Pace, Task
from thalweg.config.tree import options_of
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve


def measure(task: Task) -> Pace:
    """Runs the task to its end. Raises ThalwegError."""
    os.sched_setaffinity(0, {task.core})
    engine = LocalEngine(resolve(options_of(**task.settings), progress=False).engine)
    params = SamplingParams(temperature=0.0, max_tokens=task.output_len, ignore_eos=True)
    for prompt in task.prompts:
        engine.submit(prompt, params)
    started: set[int] = set()
    while len(started) < len(task.prompts):
        started |= {delta.uid for delta in engine.step()}
    wall, cpu, steps, tokens = time.perf_counter(), time.process_time(), 0, 0
    ended = False
    while not ended:
        deltas = engine.step()
        steps, tokens = steps + 1, tokens + sum(len(delta.tokens) for delta in deltas)
        ended = any(delta.finish for delta in deltas)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pace(steps / wall, 1e6 * cpu / max(tokens, 1), steps)


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(measure(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
