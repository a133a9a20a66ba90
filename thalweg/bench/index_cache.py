"""`thalweg tune index-cache`: which layers of a model with sparse attention (DSA) can share another layer's selection
of context (IndexCache, arXiv 2603.12201), by what it costs in loss on a text.

The search is greedy: each step lets the layer share whose sharing adds least loss. Nothing is trained. The model is
loaded once, and a layer shares while its indexer is removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from thalweg.bench.command import ENGINE_FLAGS, OUTPUT, PartialRun, command, parse_engine_flags
from thalweg.bench.display import progress_bar, show
from thalweg.bench.in_process import Generation, check_one_process, configuration, generate
from thalweg.bench.results import save
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.report import make_table
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.layers.mla import Indexer
from thalweg.models.catalog import read_facts

EPILOG = """\
examples:
  thalweg tune index-cache models/tiny --text book.txt
  thalweg tune index-cache org/name --text book.txt --full 16 --windows 4

The last line names the flag. Loss is the mean of -log p over the tokens after the first index_topk of each window."""
FLAGS = f"""
--text     path      a text file, of the kind that will be served
--full     count     layers that still select at the end; default: a quarter of all
--window   count     tokens of a window; default: 4 x index_topk, or the context if that is less
--windows  count=8   windows of the text, spread over it
{OUTPUT}
"""
COLUMNS = {"sharing": "{sharing}", "pattern": "{pattern}", "loss": "{loss:.4f}", "added": "{added:+.4f}"}
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Step(NamedTuple):
    """A pattern, and the loss with it in nats a token."""

    pattern: str
    loss: float


class PatternLoss:
    """The loss of an engine's model by pattern."""

    def __init__(self, engine: LocalEngine, pattern: str, windows: Sequence[Sequence[int]], counted: int) -> None:
        """pattern: of the model as it is loaded. counted: the first token whose loss counts."""
        check_one_process(engine, "tune index-cache")
        self.engine, self.windows, self.counted = engine, windows, counted
        model = engine.runner.model
        assert isinstance(model, nn.Module), "models are modules"
        attentions: list[Any] = [
            part for part in model.modules() if isinstance(getattr(part, "indexer", None), Indexer)
        ]
        layers = [layer for layer, kind in enumerate(pattern) if kind == "F"]
        self._indexers = {layer: (part, part.indexer) for layer, part in zip(layers, attentions, strict=True)}
        engine.runner.disable_graphs()

    def __call__(self, pattern: str) -> float:
        """The layers that share after this are those of the pattern."""
        for layer, (attention, indexer) in self._indexers.items():
            attention.indexer = indexer if pattern[layer] == "F" else None
        self.engine.flush_cache()
        requests, nats = [Generation(window, SCORE) for window in self.windows], list[float]()
        for step in generate(self.engine, requests):
            for _, delta in step.news:
                nats += [-entry[0] for entry in delta.prompt_logprobs[self.counted :]]
        return fmean(nats)


def search(loss: Callable[[str], float], pattern: str, full: int) -> Iterator[Step]:
    """Yields the pattern itself, then one more sharing layer in each step, until `full` layers select."""
    yield Step(pattern, loss(pattern))
    while pattern.count("F") > full:
        places = [layer for layer, kind in enumerate(pattern) if kind == "F" and layer]
        tried = [pattern[:layer] + "S" + pattern[layer + 1 :] for layer in places]
        best = min((Step(one, loss(one)) for one in tried), key=lambda step: step.loss)
        pattern = best.pattern
        yield best


def evaluations(selecting: int, full: int) -> int:
    return 1 + sum(count - 1 for count in range(full + 1, selecting + 1))


def cut(tokens: Sequence[int], window: int, windows: int) -> list[Sequence[int]]:
    """Windows of so many tokens, spread over the text. Raises UnsupportedConfig for a short one."""
    if len(tokens) < window:
        raise UnsupportedConfig(f"--text: {len(tokens)} tokens, and a window has {window}: give a longer text")
    count = min(windows, len(tokens) // window)
    return [tokens[at : at + window] for at in (i * (len(tokens) - window) // max(count - 1, 1) for i in range(count))]


def _windows(resolved: Resolved, topk: int, text: Path | None, window: int | None, windows: int) -> list[Sequence[int]]:
    if text is None or resolved.tokenizer is None:
        raise UnsupportedConfig("--text: give a text file" if text is None else "the checkpoint has no tokenizer")
    longest = resolved.engine.context_length - 1
    tokens = window or min(4 * topk, longest)
    if not topk + 1 < tokens <= longest:
        raise UnsupportedConfig(
            f"--window: {tokens} tokens must be {topk + 2} to {longest}: up to index_topk tokens all context is"
            " selected, and the first token has no loss"
        )
    try:
        return cut(resolved.tokenizer.encode(text.read_text(encoding="utf-8"), True), tokens, windows)
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedConfig(f"--text: {text} cannot be read: {error}") from error


@command("thalweg tune index-cache")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = "Searches which layers can share a selection of context, by the loss on a text."
    groups = ENGINE_FLAGS[:4]
    args, options = parse_engine_flags(argv, "thalweg tune index-cache", text, {"Search": FLAGS}, groups, EPILOG)
    resolved = resolve(replace(options, radix_cache=False))
    facts = read_facts(resolved.path, resolved.engine.index_topk_pattern)
    if facts.indexer is None:
        raise UnsupportedConfig(f"{facts.architecture} has no sparse attention, all layers see all context")
    pattern = "".join("SF"[is_full] for is_full in facts.indexer.full)
    full = args.full or max(facts.layers // 4, 1)
    windows = _windows(resolved, facts.indexer.topk, args.text, args.window, args.windows)
    loss = PatternLoss(LocalEngine(resolved.engine), pattern, windows, facts.indexer.topk)
    steps = list[Step]()
    with PartialRun() as run, progress_bar("patterns", evaluations(pattern.count("F"), full)) as bar:

        def counted(one: str) -> float:
            nats = loss(one)
            bar.advance()
            return nats

        for step in search(counted, pattern, full):
            steps.append(step)
            print(f"{step.pattern}: {step.loss:.4f} nats a token", file=sys.stderr)
    rows = [
        {"sharing": step.pattern.count("S"), "added": step.loss - steps[0].loss, **step._asdict()} for step in steps
    ]
    show(make_table("index cache", COLUMNS, rows))
    if steps:
        print(f"--index-topk-pattern {steps[-1].pattern}")
    measured = {"windows": len(windows), "window": len(windows[0]), "results": rows, **run.as_json()}
    save(args.output_file, "tune index-cache", argv, configuration(resolved), measured)
    return run.finish()
