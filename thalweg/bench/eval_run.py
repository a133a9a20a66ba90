"""An evaluation: questions, answers, and rows of results, each share with its confidence interval.

The bundled tasks give every shortcut (quantization, sparse attention, speculation, a cache format) an accuracy beside its speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.progress import Progress

from thalweg.attention.selection import RandomChoice, best
from thalweg.bench import gsm8k, multiple_choice
from thalweg.bench.answers import Answerer, Here, Texts
from thalweg.bench.nextn_acceptance import Written, acceptance, load_nextn
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import Item, make_items, score

SHARES = ("sums", "recall", "tools")  # answered and scored right or wrong
BLIND = "recall-random"  # recall, with a random choice of context in the place of the indexer's
CHOICE = "recall-choice"  # the right one of four words, by log-probability: nothing is written
TASKS = ("sums", "recall", BLIND, CHOICE, "tools", "dialogue", "nextn")
NEXTN_ON = ("sums", "dialogue")  # greedy texts on which drafts are counted
LEAST = 1000
KEPT_WRONG = 20  # wrong answers that a row shows

Row = dict[str, object]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated. tasks: of TASKS. items: at most, of each. seed: which. indexer: "model", or "random" for every task. gsm8k, choices:
    files, "" for none. shots: worked examples before each question of gsm8k, from gsm8k_shots. max_new_tokens, thinking: of gsm8k."""

    tasks: tuple[str, ...] = ()
    items: int = LEAST
    seed: int = 0
    indexer: str = "model"
    gsm8k: str = ""
    gsm8k_shots: str = ""
    shots: int = 0
    max_new_tokens: int = 512
    thinking: bool = False
    choices: str = ""

    @property
    def asks(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.tasks or self.gsm8k or self.choices)


class Evaluation:
    """Items → rows of results. `rows` grows task by task, so that what is done survives an interruption."""

    def __init__(self, texts: Texts, answerer: Answerer, items: int, seed: int) -> None:
        self.texts, self.answerer, self.items, self.seed = texts, answerer, items, seed
        self.rows: list[Row] = []
        self.written: dict[str, list[Written]] = {}

    def held_out(self, task: str) -> list[Item]:
        return make_items(task, "held_out", self.items, self.seed)

    def share(self, name: str, items: Sequence[Item], right: Callable[[Item, str], bool]) -> None:
        """One row: how many of the items are answered right."""
        begin = time.perf_counter()
        questions = [self.texts.question(item) for item in items]
        answers = self.answerer.answer(questions, name)
        hits = [right(item, answer.text) for item, answer in zip(items, answers, strict=True)]
        self.written[name] = [(question.ids, answer.ids) for question, answer in zip(questions, answers, strict=True)]
        wrong = [
            {"question": items[i].messages[-1], "answer": answers[i].text, "right": items[i].answer}
            for i, hit in enumerate(hits)
            if not hit
        ]
        seconds = time.perf_counter() - begin
        self.rows.append(
            {"task": name, **Share(sum(hits), len(hits)).as_json(), "seconds": seconds, "wrong": wrong[:KEPT_WRONG]}
        )

    def choices(self, name: str, questions: Sequence[multiple_choice.Question], a_byte: bool) -> None:
        """Multiple choice by the log-probability of each choice's text: a row, and one for that a byte where it is asked for."""
        begin = time.perf_counter()
        picks = multiple_choice.answer(questions, self.texts, self.answerer, name)
        seconds = time.perf_counter() - begin
        right = [question.answer for question in questions]
        chosen = {name: [pick.by_sum for pick in picks]}
        if a_byte:
            chosen[f"{name}, a byte"] = [pick.by_byte for pick in picks]
        for task, indices in chosen.items():
            hits = sum(index == answer for index, answer in zip(indices, right, strict=True))
            self.rows.append({"task": task, **Share(hits, len(right)).as_json(), "seconds": seconds})

    def perplexity(self, here: Here) -> None:
        """One row: dialogue, by the log-probabilities of the right answers."""
        items, begin = self.held_out("dialogue"), time.perf_counter()
        sequences = [self.texts.with_target(item) for item in items]
        scored = here.llm.score([ids for ids, _ in sequences], progress=here.progress)
        nats = [
            -entry.logprob for (_, at), entries in zip(sequences, scored, strict=True) for entry in entries[at - 1 :]
        ]
        size = sum(len(item.target.encode()) for item in items)
        total = math.fsum(nats)
        row: Row = {"task": "dialogue perplexity", "total": len(items), "tokens": len(nats)}
        row |= {"perplexity": math.exp(total / len(nats)), "bits_per_byte": total / math.log(2) / size}
        self.rows.append(row | {"seconds": time.perf_counter() - begin})

    def nextn(self, here: Here, progress: Progress) -> None:
        """A row for each of NEXTN_ON: greedy acceptance at depth 1, on the engine's own greedy texts."""
        layer = load_nextn(here.llm.engine)
        for name in NEXTN_ON:
            begin = time.perf_counter()
            if name not in self.written:
                questions = [self.texts.question(item) for item in self.held_out(name)]
                answers = here.answer(questions, name)
                self.written[name] = [(q.ids, a.ids) for q, a in zip(questions, answers, strict=True)]
            written = self.written[name]
            bar = progress.add_task(f"NextN on {name}", total=len(written))

            def advance(count: int, bar: int = int(bar)) -> None:
                progress.advance(progress.task_ids[bar], count)

            share = acceptance(here.llm.engine, layer, written, advance)
            row: Row = {"task": f"NextN acceptance, {name}", "items": len(written), **share.as_json()}
            self.rows.append(row | {"seconds": time.perf_counter() - begin})


def evaluate(run: Evaluation, asked: Asked, progress: Progress | None = None) -> Iterator[Row]:
    """Fills run.rows, and gives each as soon as its task is done. Raises ThalwegError, HttpError or DatasetError."""
    told = 0
    for _ in _tasks(run, asked, progress or Progress(disable=True)):
        yield from run.rows[told:]
        told = len(run.rows)


def _tasks(run: Evaluation, asked: Asked, progress: Progress) -> Iterator[str]:
    """Does one task after the other; their names."""
    here = run.answerer if isinstance(run.answerer, Here) else None
    blind = RandomChoice(asked.seed)
    mark = "" if asked.indexer == "model" else ", random context"
    if here is not None and asked.indexer == "random":
        here.select(blind)
    for task in asked.tasks:
        if task in SHARES:
            run.share(task + mark, run.held_out(task), score)
        elif here is not None and task == BLIND:
            here.select(blind)
            run.share("recall, random context", run.held_out("recall"), score)
            here.select(blind if asked.indexer == "random" else best)
        elif task == CHOICE:
            run.choices(CHOICE + mark, multiple_choice.of_recall(run.held_out("recall")), a_byte=False)
        elif here is not None:
            run.perplexity(here) if task == "dialogue" else run.nextn(here, progress)
        yield task
    if asked.gsm8k:
        problems = gsm8k.read_problems(Path(asked.gsm8k))[: asked.items]
        shots = gsm8k.read_problems(Path(asked.gsm8k_shots))[: asked.shots] if asked.shots else []
        run.share("gsm8k" + mark, gsm8k.items(problems, shots, asked.thinking, asked.max_new_tokens), gsm8k.score)
        yield "gsm8k"
    if asked.choices:
        path = Path(asked.choices)
        run.choices(path.stem + mark, multiple_choice.read_questions(path)[: asked.items], a_byte=True)
        yield "choices"
