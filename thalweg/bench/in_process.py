"""The load driver for an engine in this process, and what commands with such an engine share."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import msgspec

from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.statistics import median
from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import NumericalError, UnsupportedConfig
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import TokenDelta
from thalweg.core.plan import PAGE
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.engine.streams import Assembler, Piece
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.llm import LLM

BATCHES = """
--batch-size  count...=1     sequences at a time
--input-len --input  count...=1024  tokens of each prompt
"""
BENCH_SEED = "--bench-seed  whole=1  of the random tokens"

Tokens = list[int]


@dataclass(slots=True)
class Generation:
    """A request to an engine in this process, and what became of it. Times: seconds of the driver's clock."""

    prompt: Sequence[int]
    params: SamplingParams
    grammar: Grammar = NO_GRAMMAR
    tokens: Tokens = field(default_factory=list)
    cached: int = 0  # prompt tokens from the prefix cache
    start: float = 0.0  # submitted
    first: float = 0.0  # first token; 0.0: none yet
    end: float = 0.0  # last token


def exactly(prompt: Sequence[int], output_len: int) -> Generation:
    """A greedy request of `output_len` tokens."""
    return Generation(prompt, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True))


def check_one_process(engine: LocalEngine, what: str) -> None:
    """what: changes the model in this process only. Raises UnsupportedConfig where others share it."""
    if engine.config.processes > 1:
        raise UnsupportedConfig(f"{what} works with one process: leave out --tp-size, --pp-size and --dp-size")


class EngineStep(NamedTuple):
    """One turn of the engine's loop."""

    begin: float
    end: float
    news: list[tuple[Generation, TokenDelta]]
    started: int  # requests that had a token before this step
    running: int  # requests under way before this step

    @property
    def tokens(self) -> int:
        return sum(len(delta.tokens) for _, delta in self.news)


def generate(
    engine: LocalEngine,
    requests: Sequence[Generation],
    concurrency: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[EngineStep, None, None]:
    """Runs all requests, at most `concurrency` (0: all) at a time, until the engine is idle. Requests of a caller that
    stops early are aborted. Raises NumericalError where the model computes NaN: what is missing would be measured.
    """
    waiting, running, started = list(reversed(requests)), dict[int, Generation](), 0

    def submit() -> None:
        request = waiting.pop()
        request.start = clock()
        (uid,) = engine.submit(request.prompt, request.params, grammar=request.grammar)
        running[uid] = request

    for _ in range(min(concurrency or len(requests), len(requests))):
        submit()
    try:
        while running or not engine.idle:
            before, begin = (started, len(running)), clock()
            deltas = engine.step()
            end = clock()
            news = [(running[delta.uid], delta) for delta in deltas if delta.uid in running]
            for request, delta in news:
                request.tokens += delta.tokens
                request.cached = max(request.cached, delta.cached)
                if delta.tokens:
                    started += not request.first
                    request.first, request.end = request.first or end, end
                if delta.finish:
                    del running[delta.uid]
                    if delta.finish == "error":
                        raise NumericalError
                    if waiting:
                        submit()
            yield EngineStep(begin, end, news, *before)
    finally:
        if running:
            engine.abort(tuple(running))


def run_all(engine: LocalEngine, requests: Sequence[Generation], concurrency: int = 0) -> None:
    """`generate` without a look at the steps."""
    for _ in generate(engine, requests, concurrency):
        pass


def detokenized(
    llm: LLM, requests: Sequence[Generation]
) -> Generator[tuple[Generation, Piece, EngineStep], None, None]:
    """Runs all requests with detokenizing, as `LLM.generate` does it; each piece of text with its request and step.
    Raises InvalidRequest.
    """
    assemblers = {}
    for one in requests:
        ids = tuple(one.prompt)
        check_request(ids, one.params, llm.engine.context, llm.engine.vocab)
        assemblers[id(one)] = Assembler(0, ids, one.params, llm.texts.tokenizer)
    with closing(generate(llm.engine, requests)) as steps:
        for step in steps:
            for request, delta in step.news:
                yield request, assemblers[id(request)].feed(delta, 0.0), step


@dataclass(slots=True)
class Timing:
    """One batch, in seconds."""

    prefill: float = 0.0  # until every sequence has its first token
    total: float = 0.0  # to the last token
    decode: list[float] = field(default_factory=list)  # of each step after the prefill
    outputs: list[Tokens] = field(default_factory=list)  # tokens of each sequence

    def as_json(self) -> dict[str, float]:
        return {
            "prefill_latency": self.prefill,
            "median_decode_latency": median(self.decode),
            "total_latency": self.total,
        }


def time_batch(engine: LocalEngine, prompts: Sequence[Tokens], output_len: int) -> Timing:
    """Computes one batch, greedy, to exactly `output_len` tokens each."""
    requests, timing = [exactly(prompt, output_len) for prompt in prompts], Timing()
    begin = last = time.perf_counter()
    for step in generate(engine, requests):
        if not step.tokens:
            continue
        if step.started < len(requests):
            timing.prefill = step.end - begin
        else:
            timing.decode.append(step.end - last)
        last = step.end
    timing.total, timing.outputs = last - begin, [request.tokens for request in requests]
    return timing


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a sequence."""

    input: int
    output: int
    flags: str = "--input-len {} and --output-len {}"  # that set them
    more: int = 0  # tokens beyond those

    def check(self, context: int) -> None:
        """Raises UnsupportedConfig when it is longer."""
        total = self.input + self.output + self.more
        if total > context:
            flags = self.flags.format(self.input, self.output)
            raise UnsupportedConfig(
                f"{flags} make {total} tokens, and a sequence has at most {context} here: lower them"
            )


def reserve(config: Options, batch: int, input_len: int, output_len: int, is_filled: bool = False) -> Options:
    """The settings, with room for one whole batch where the user left it open: its prompts are computed in one step.
    Each data-parallel rank gets its part. is_filled: the cache has the prompts but for their last page; otherwise it
    holds two batches, the one before for its prefixes.
    """
    batch = -(-batch // config.parallel.dp_size)
    page = PAGE * config.parallel.dcp_size
    pages = -(-(input_len + output_len + 1) // page) + 1
    computed, copies = (min(input_len, page), 1) if is_filled else (input_len, 2)
    context_pages = -(-(config.model.context_length or 0) // page)  # a context that was asked for has to fit, too
    wishes = {
        "max_running_requests": (config.schedule.max_running_requests, batch),
        "chunked_prefill_size": (config.schedule.chunked_prefill_size, batch * computed),
        "max_total_tokens": (config.memory.max_total_tokens, max(copies * batch * pages, context_pages) * page),
    }
    return replace(config, **{name: value for name, (given, value) in wishes.items() if given is None})


def start(config: Options, longest: Lengths | None = None) -> tuple[Resolved, LocalEngine]:
    """Resolves, loads and builds. longest: a sequence that must fit; checked before anything is loaded. Raises
    UnsupportedConfig or CheckpointError.
    """
    resolved = resolve(config, simulates=True)
    if longest is not None:
        longest.check(resolved.engine.context_length)
    engine = LocalEngine(resolved.engine)
    if longest is not None:
        longest.check(engine.context)  # smaller where memory holds less
    return resolved, engine


def configuration(resolved: Resolved) -> dict[str, object]:
    """The full resolved configuration, as results contain it."""
    engine = msgspec.to_builtins(resolved.engine)
    decisions = resolved.engine.report.as_tree()
    return {"engine": {name: value for name, value in engine.items() if name != "report"}, "decisions": decisions}


def random_batch(resolved: Resolved, batch: int, length: int, rng: Random) -> list[Tokens]:
    """Prompts of ordinary tokens, each of exactly `length`."""
    vocabulary = vocabulary_of(resolved.path)
    return [vocabulary.draw(rng, length) for _ in range(batch)]
