"""`thalweg bench offline`: a whole data set through an engine in this process, as `LLM.generate` does it, detokenizing
included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from thalweg.bench.command import ENGINE_FLAGS, OUTPUT, PartialRun, add_flags, command, parse_with_notices
from thalweg.bench.dataset_flags import add_dataset_flags, check_dataset, load_prompts
from thalweg.bench.datasets import OrdinaryTokens, ids_of, vocabulary_of
from thalweg.bench.display import block, progress_bar
from thalweg.bench.errors import DatasetError
from thalweg.bench.in_process import Generation, configuration, detokenized
from thalweg.bench.results import save
from thalweg.config.args import options_parser
from thalweg.config.tree import non_defaults
from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM

WARM_UP = 8  # sequences, and tokens of each
FLAGS = f"""
--repeat              count=1  passes, each with other random tokens
--disable-ignore-eos  switch   let the model end early; lengths are then upper limits
--skip-warmup         switch   no short pass before the clock starts
{OUTPUT}
--tag                 name     a name in the result
"""
BLOCK = """\
====== Offline Throughput Benchmark Result =======
Backend:                                 {backend}
Successful requests:                     {successful_requests}
Benchmark duration (s):                  {total_latency:.2f}
Total input tokens:                      {total_input_tokens}
Total generated tokens:                  {total_output_tokens}
Last generation throughput (tok/s):      {last_gen_throughput:.2f}
Request throughput (req/s):              {request_throughput:.2f}
Input token throughput (tok/s):          {input_throughput:.2f}
Output token throughput (tok/s):         {output_throughput:.2f}
Total token throughput (tok/s):          {total_throughput:.2f}
CPU time an output token (us):           {cpu_us_per_output_token:.2f}

Accept length:                           {accept_length:.2f}"""


@dataclass(slots=True)
class OfflinePass:
    """All sequences once."""

    seconds: float = 0.0  # from the first submission to the last token
    cpu: float = 0.0  # seconds of this process's processor time, all threads
    done: int = 0
    input_tokens: int = 0  # prompts of the sequences that ended
    cached: int = 0
    by_second: list[int] = field(default_factory=list)  # output tokens in each second
    accept_length: float | None = None  # tokens a verification; None without any

    def as_json(self, repeat: int) -> dict[str, Any]:
        """Under the keys of SGLang's `bench_offline_throughput`."""
        seconds, output_tokens = max(self.seconds, 1e-9), sum(self.by_second)
        return {
            "backend": "engine",
            "repeat": repeat,
            "successful_requests": self.done,
            "total_latency": self.seconds,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": output_tokens,
            "total_cached_tokens": self.cached,
            "last_gen_throughput": float(self.by_second[-2] if len(self.by_second) > 1 else output_tokens / seconds),
            "request_throughput": self.done / seconds,
            "input_throughput": self.input_tokens / seconds,
            "output_throughput": output_tokens / seconds,
            "total_throughput": (self.input_tokens + output_tokens) / seconds,
            "cpu_seconds": self.cpu,
            "cpu_us_per_output_token": 1e6 * self.cpu / max(output_tokens, 1),
            "tokens_by_second": self.by_second,
            "accept_length": self.accept_length,
        }


def requests(args: Any, vocabulary: OrdinaryTokens, seed: int, ignore_eos: bool, most: int = 0) -> list[Generation]:
    """The data set as requests; its first `most` with as many tokens each, 0: all. Raises DatasetError."""
    prompts = load_prompts(args, vocabulary, seed)[: most or None]
    lengths = [min(prompt.output_len, most or prompt.output_len) for prompt in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=ignore_eos) for length in lengths]
    return [Generation(tuple(ids), each) for ids, each in zip(ids_of(prompts, vocabulary), params, strict=True)]


def measure(llm: LLM, wanted: Sequence[Generation], done: OfflinePass) -> None:
    """All sequences at once; `done` has what was computed by then when Ctrl-C ends it. Raises InvalidRequest."""
    begin, cpu, before = time.perf_counter(), time.process_time(), llm.engine.loop.stats().acceptance
    try:
        with progress_bar("sequences", len(wanted)) as bar, closing(detokenized(llm, wanted)) as results:
            for request, piece, step in results:
                second = int(step.end - begin)
                done.by_second += [0] * (second + 1 - len(done.by_second))
                done.by_second[second] += len(piece.ids)
                done.seconds, done.cpu = time.perf_counter() - begin, time.process_time() - cpu
                if piece.finish:
                    done.done, done.input_tokens = done.done + 1, done.input_tokens + len(request.prompt)
                    done.cached += piece.cached_tokens
                    bar.advance(note=f"{sum(done.by_second)} tokens")
    finally:
        done.accept_length = llm.engine.loop.stats().acceptance.since(before).mean_length


@command("thalweg bench offline")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = (
        "Throughput of a whole data set in this process, without HTTP: all prompts are queued at once, as"
        " `LLM.generate` does."
    )
    parser = options_parser("thalweg bench offline", text, only=ENGINE_FLAGS)
    add_dataset_flags(parser, "Data set")
    add_flags(parser, "Measurement", FLAGS)
    args, options = parse_with_notices(parser, argv)
    check_dataset(parser, args)
    if args.dataset_name == "conversations" or args.gsp_num_turns > 1:
        raise DatasetError("later turns wait for answers: measure conversations with `thalweg bench serve`")
    llm = LLM(**non_defaults(options) | {"allow_simulated_acceptance": True})
    vocabulary = vocabulary_of(llm.texts.resolved.path)
    passes = [
        requests(args, vocabulary, args.seed + 1000 * number, not args.disable_ignore_eos)
        for number in range(args.repeat)
    ]
    done = list[OfflinePass]()
    with PartialRun() as partial:
        if not args.skip_warmup:
            measure(llm, requests(args, vocabulary, args.seed - 1, True, WARM_UP), OfflinePass())
        for wanted in passes:
            done.append(OfflinePass())
            measure(llm, wanted, done[-1])
    rows = [each.as_json(number) for number, each in enumerate(done)]
    print("\n".join(block(BLOCK, row) for row in rows))
    client = {name: value for name, value in vars(args).items() if name not in ("given", "notices")}
    client["trace_end"] = str(args.trace_end)  # infinity is not a JSON number
    settings = {"client": client, **configuration(llm.texts.resolved)}
    save(args.output_file, "bench offline", argv, settings, {"tag": args.tag, "points": rows, **partial.as_json()})
    return partial.finish()
