"""An engine in this process for measurements: fixed batches of random tokens, timed step by step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from thalweg.bench.datasets import vocabulary_of
from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

Tokens = list[int]


@dataclass(slots=True)
class Timing:
    """One batch. prefill: seconds until every sequence has its first token. decode: seconds of each step after that.
    total: seconds to the last token. outputs: the tokens of each sequence."""

    prefill: float = 0.0
    total: float = 0.0
    decode: list[float] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a sequence. flags: that gave them. more: tokens beyond those."""

    input: int
    output: int
    flags: tuple[str, str] = ("--input-len", "--output-len")
    more: int = 0

    def within(self, context: int) -> None:
        """Raises UnsupportedConfig when it is longer."""
        total = self.input + self.output + self.more
        if total > context:
            raise UnsupportedConfig(
                f"{self.flags[0]} {self.input} and {self.flags[1]} {self.output} make {total} tokens, and a sequence"
                f" has at most {context} here: ask for less"
            )


def positive(text: str) -> int:
    """An argparse type: a whole number from 1 on."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def add_batches(add: Callable[..., object]) -> None:
    """Adds --batch-size and --input-len to a group of arguments."""
    add("--batch-size", type=positive, nargs="+", default=[1], metavar="N", help="sequences at a time (default: 1)")
    add(
        "--input-len",
        type=positive,
        nargs="+",
        default=[1024],
        metavar="N",
        help="tokens of each prompt (default: 1024)",
    )


def room_for(config: Options, batch: int, input_len: int, output_len: int) -> Options:
    """The settings, with room for one whole batch where the user left it open: all its prompts are computed in one
    step.
    """
    pages = -(-(input_len + output_len + 1) // PAGE) + 1
    wishes: dict[str, int] = {}
    if config.schedule.max_running_requests is None:
        wishes["max_running_requests"] = batch
    if config.schedule.chunked_prefill_size is None:
        wishes["chunked_prefill_size"] = batch * input_len
    if config.memory.max_total_tokens is None:
        whole = -(-(config.model.context_length or 0) // PAGE)  # a context that was asked for has to fit, too
        wishes["max_total_tokens"] = max(2 * batch * pages, whole) * PAGE
    return replace(config, **wishes)


def start(config: Options, longest: Lengths | None = None) -> tuple[Resolved, LocalEngine]:
    """Resolves, loads and builds. longest: what must fit. Raises UnsupportedConfig, where that is known before anything
    is loaded, or CheckpointError.
    """
    resolved = resolve(config, simulates=True)
    if longest is not None:
        longest.within(resolved.engine.context_length)
    engine = LocalEngine(resolved.engine)
    if longest is not None:
        longest.within(engine.context)  # which is less where memory holds less
    return resolved, engine


def configuration(resolved: Resolved) -> dict[str, object]:
    """The full resolved configuration, as results carry it."""
    engine = msgspec.to_builtins(resolved.engine)
    decisions = resolved.engine.report.as_tree()
    return {"engine": {name: value for name, value in engine.items() if name != "report"}, "decisions": decisions}


def random_batch(resolved: Resolved, batch: int, length: int, rng: Random) -> list[Tokens]:
    """Prompts of ordinary tokens, each of exactly `length`."""
    vocabulary = vocabulary_of(resolved.path)
    return [vocabulary.draw(rng, length) for _ in range(batch)]


def fits(engine: LocalEngine, input_len: int, output_len: int) -> None:
    """Raises UnsupportedConfig when such a sequence is longer than the engine's context."""
    Lengths(input_len, output_len).within(engine.context)


def time_batch(engine: LocalEngine, prompts: Sequence[Tokens], output_len: int) -> Timing:
    """Computes one batch, greedy, to exactly `output_len` tokens each."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    uids = [uid for prompt in prompts for uid in engine.submit(prompt, params)]
    outputs: dict[int, Tokens] = {uid: [] for uid in uids}
    timing = Timing()
    begin = last = time.perf_counter()
    waiting = set(uids)
    while not engine.idle:
        deltas = engine.step()
        now = time.perf_counter()
        if not any(delta.tokens for delta in deltas):
            continue
        prefilling = bool(waiting)
        for delta in deltas:
            outputs[delta.uid] += delta.tokens
            if delta.tokens:
                waiting.discard(delta.uid)
        if prefilling:
            timing.prefill = now - begin
        else:
            timing.decode.append(now - last)
        last = now
    timing.total = last - begin
    timing.outputs = [outputs[uid] for uid in uids]
    return timing


def middle(values: Sequence[float]) -> float:
    """The median, 0 of nothing."""
    return median(values) if values else 0.0


def folder_name(path: Path) -> str:
    """A checkpoint's name for a result, without the machine's own paths."""
    return path.resolve().name
