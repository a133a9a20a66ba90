"""One cell of an ablation, in a process of its own: `python -m thalweg.bench.ablate_cell ORDER NEWS`.

ORDER is a JSON file (`Order`). NEWS gets a JSON line as soon as something is known, so that a cell that is ended keeps
what it has: {"started": seconds}, {"single": ...}, {"batch": ...}, {"accuracy": rows}, and at last {"done": true} or
{"refused": reason}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from thalweg.bench.ablate_load import Workload, batch, must_fit, single
from thalweg.bench.answers import Here, Texts
from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_run import Asked, Evaluation, evaluate
from thalweg.core.errors import ThalwegError
from thalweg.llm import LLM

Tell = Callable[[dict[str, Any]], None]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """settings: of the engine, by name. accuracy: what is answered after the clock has stopped."""

    settings: dict[str, Any]
    work: Workload
    accuracy: Asked


def measure(order: Order, tell: Tell) -> None:
    """All of a cell. Raises ThalwegError or DatasetError."""
    begin = time.perf_counter()
    settings = dict(order.settings)
    llm = LLM(settings.pop("model"), **settings)
    engine, vocabulary = llm.engine, vocabulary_of(llm.texts.resolved.path)
    must_fit(order.work, engine.context)
    tell({"started": time.perf_counter() - begin})
    tell({"single": single(engine, order.work, vocabulary)})
    for concurrency in order.work.concurrency:
        tell({"batch": batch(engine, order.work, vocabulary, concurrency)})
    if order.accuracy.asks:
        evaluation = Evaluation(
            Texts(llm.texts.resolved.path), Here(llm, progress=False), order.accuracy.items, order.accuracy.seed
        )
        for row in evaluate(evaluation, order.accuracy):
            tell({"accuracy": row})
    tell({"done": True})


def main(words: list[str]) -> int:
    """0 when the news say how it went, refusals included."""
    order = msgspec.json.decode(Path(words[0]).read_bytes(), type=Order)
    with Path(words[1]).open("a", encoding="utf-8") as file:

        def tell(news: dict[str, Any]) -> None:
            file.write(json.dumps(news) + "\n")
            file.flush()

        try:
            measure(order, tell)
        except (ThalwegError, DatasetError) as error:
            tell({"refused": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
