"""Kills and stops random processes of an engine under load, at random moments, also while a new group starts.

python -m tests.soak.kills --kills 200
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.compose.matrix import MODEL, settings
from tests.ranks.faults import shared_memory
from tests.ranks.test_processes import greedy, is_running, pids
from tests.soak.report import write
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import EngineDead
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.text.tokenizer import Tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 x dp2": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "moe_dense_tp_size": 2},
    "copies": {"dp_size": 2},
}
LIMIT_S = 15.0  # in which the loss of a process must be an error that names it
START_S = 120.0  # in which a new group must serve
WATCHDOG_S = 4.0
PROMPTS = [list(range(20 + i, 60 + 7 * i)) for i in range(6)]
TOKENS = 24
LONG = 400  # tokens of a request that has output when a process is killed
NAMED = re.compile(r"(rank \d|copy \d).*(ended with exit code -9|stopped by a signal)")


def config(**fields: Any) -> EngineConfig:
    limits = {"watchdog_timeout": WATCHDOG_S, "watchdog_action": "restart"}
    return settings(num_pages=60, max_running_requests=6, **limits, **fields)


def expected() -> list[list[int]]:
    """The tokens of one process."""
    engine, tokens = LocalEngine(settings(num_pages=60, max_running_requests=6)), dict[int, list[int]]()
    for prompt in PROMPTS:
        tokens[engine.submit(prompt, greedy(TOKENS))[0]] = []
    while not engine.idle:
        for delta in engine.step():
            tokens[delta.uid] += delta.tokens
    return list(tokens.values())


async def collect(front: EngineClient, index: int) -> tuple[list[int], str]:
    """The tokens of a prompt, and the error that ended it, or ""."""
    tokens: list[int] = []
    try:
        async for piece in front.stream(PROMPTS[index], greedy(TOKENS)):
            tokens += piece.ids
    except EngineDead as error:
        return tokens, str(error)
    return tokens, ""


async def fail(front: EngineClient) -> str:
    """The error of a request that has output; "" if it completes before its process ends."""
    try:
        async for _ in front.stream(PROMPTS[0], greedy(LONG)):
            pass
    except EngineDead as error:
        return str(error)
    return ""


async def serves(front: EngineClient, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while front.state != "ready":
        assert front.state != "dead", front.reason
        assert time.monotonic() < deadline, f"{front.state} after {seconds:g} s: {front.reason}"
        await asyncio.sleep(0.02)


async def one_kill(front: EngineClient, draw: random.Random, want: list[list[int]]) -> tuple[str, float]:
    """Returns the kind of the loss, and the seconds until it was an error that names the process."""
    old, restarts = pids(front), front.restarts
    victim, stops = draw.choice(old), draw.random() < 0.2
    long = asyncio.create_task(fail(front))
    busy = [asyncio.create_task(collect(front, i)) for i in range(len(PROMPTS))]
    await asyncio.sleep(draw.random() * 0.6)
    os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
    begun = time.monotonic()
    idle = [asyncio.create_task(collect(front, i)) for i in range(len(PROMPTS))]  # or nobody misses a stopped process
    while front.state in ("ready", "hung"):
        assert time.monotonic() - begun < LIMIT_S, f"no error after {LIMIT_S:g} s"
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - begun
    assert NAMED.search(front.reason), front.reason
    is_lost_again = False
    if draw.random() < 0.2:  # again, while the new group starts, or has just started
        await asyncio.sleep(draw.random() * 3)
        if front._processes is not None and (starting := pids(front)):
            os.kill(second := draw.choice(starting), signal.SIGKILL)
            is_lost_again = True
            async with asyncio.timeout(LIMIT_S):  # until it is noticed
                while front._processes is not None and second in pids(front):
                    await asyncio.sleep(0.02)
    await serves(front, START_S)
    answers = await asyncio.wait_for(asyncio.gather(*busy, *idle), START_S)
    for i, (tokens, error) in enumerate(answers):
        # requests without output go to the next engine, and no further
        assert not error or NAMED.search(error) and (tokens or is_lost_again), f"{len(tokens)} tokens: {error}"
        assert error or tokens == want[i % len(PROMPTS)], tokens
    error = await asyncio.wait_for(long, START_S)
    assert not error or NAMED.search(error), error
    assert not any(map(is_running, old)), "the others end, too"
    assert front.restarts > restarts
    return "stopped" if stops else "killed", seconds


async def run(kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """The counts of all layouts in turn. seconds: begins no kill after so many."""
    draw, counts, slowest = random.Random(seed), Counter[str](), 0.0
    want, before, begun = expected(), shared_memory(), time.monotonic()
    for number, (name, layout) in enumerate(LAYOUTS.items(), 1):
        front = EngineClient(config(**layout), Tokenizer(Path(MODEL)))
        await front.start()
        until = begun + seconds * number / len(LAYOUTS)
        try:
            for _ in range(kills * number // len(LAYOUTS) - kills * (number - 1) // len(LAYOUTS)):
                if time.monotonic() < until:
                    kind, loss_s = await one_kill(front, draw, want)
                    slowest = max(slowest, loss_s)
                    counts[kind] += 1
                    counts[name] += 1
                    print(name, kind, f"{loss_s:.1f} s, {front.restarts} restarts", flush=True)
            last = pids(front)
        finally:
            await front.close()
        assert not any(map(is_running, last)), "no process stays"
        assert shared_memory() <= before, "no shared memory stays"
        counts["restarts"] += front.restarts
    return {"kills": counts["killed"] + counts["stopped"], **counts, "slowest_loss_s": round(slowest, 2)}


def main(kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """Raises AssertionError at the first loss that is not noticed, named and repaired."""
    started = time.monotonic()
    try:
        counts = asyncio.run(run(kills, seed, seconds))
    except Exception as error:
        error.add_note(f"again: --kills {kills} --seed {seed}")
        raise
    command = f"python -m tests.soak.kills --kills {kills} --seed {seed} --seconds {seconds:g}"
    path = write("kills", command, time.monotonic() - started, counts)
    print(f"{counts['kills']} losses: each was named within {LIMIT_S:g} s and repaired; {path.name} written")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no kill after so many")
    args = parser.parse_args()
    main(args.kills, args.seed, args.seconds)
