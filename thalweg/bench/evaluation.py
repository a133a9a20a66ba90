"""An evaluation: questions, answers, and rows of results, each share with its confidence interval.

The bundled tasks give every optimization (quantization, sparse attention, speculation, a cache format) an accuracy
beside its speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from thalweg.attention.selection import RandomSelection, select_top_k
from thalweg.bench.answering import Answerer, EngineAnswerer, PromptFormat, continuations
from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_files import (
    ChoiceQuestion,
    problem_items,
    read_problems,
    read_questions,
    recall_questions,
)
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import Item, make_items, score
from thalweg.core.errors import UnsupportedConfig

SCORED = ("sums", "recall", "tools", "agents")  # answers that are right or wrong
RANDOM_RECALL = "recall-random"  # recall, with a random selection of context in place of the indexer's
CHOICE = "recall-choice"  # the right one of four words, by log-probability
TASKS = ("sums", "recall", RANDOM_RECALL, CHOICE, "tools", "agents", "dialogue")
MOST_ITEMS = 1000
KEPT_WRONG = 20  # wrong answers of a row

Row = dict[str, object]


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks and settings of an evaluation."""

    tasks: tuple[str, ...] = ()  # of TASKS
    items: int = MOST_ITEMS  # of each, at most
    seed: int = 0  # which items
    gsm8k: str = ""  # files; "" for none
    gsm8k_shots: str = ""
    shots: int = 0  # worked examples before each question of gsm8k
    max_new_tokens: int = 512  # of gsm8k
    thinking: bool = False  # of gsm8k
    choices: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.tasks or self.gsm8k or self.choices)


def read_files(settings: EvalSettings) -> tuple[list[Item], list[ChoiceQuestion]]:
    """The contents of the files. Raises DatasetError for a file that cannot be read, is broken or has too few worked
    examples; UnsupportedConfig for flags that lack another.
    """
    shots, shots_file = settings.shots, settings.gsm8k_shots
    if shots and not (settings.gsm8k and shots_file):
        raise UnsupportedConfig(
            f"--shots {shots}: needs --gsm8k FILE and --gsm8k-shots FILE, the file of worked examples"
        )
    if shots_file and not shots:
        raise UnsupportedConfig(f"--gsm8k-shots {shots_file}: say how many of them with --shots N")
    problems = read_problems(Path(settings.gsm8k))[: settings.items] if settings.gsm8k else []
    examples = read_problems(Path(shots_file)) if shots else []
    if len(examples) < shots:
        raise DatasetError(f"{shots_file}: {len(examples)} worked examples, and --shots asks for {shots}")
    items = problem_items(problems, examples[:shots], settings.thinking, settings.max_new_tokens)
    return items, read_questions(Path(settings.choices))[: settings.items] if settings.choices else []


class Evaluation:
    """Fills `rows` task by task; a task that is ended early has a row of what it had by then, with `asked`, the number
    of its items.
    """

    def __init__(self, texts: PromptFormat, answerer: Answerer, items: int, seed: int) -> None:
        self.texts, self.answerer, self.items, self.seed = texts, answerer, items, seed
        self.rows: list[Row] = []

    def held_out(self, task: str) -> list[Item]:
        return make_items(task, "held_out", self.items, self.seed)

    def _add(self, row: Row, done: int, asked: int, begin: float) -> None:
        """A row, unless nothing was answered."""
        if done:
            row = row | {"seconds": time.perf_counter() - begin}
            self.rows.append(row if done == asked else row | {"asked": asked})

    def task(self, name: str) -> None:
        """One of TASKS. Those that need the engine are for an EngineAnswerer."""
        answerer = self.answerer
        if name in SCORED:
            self.share(name, self.held_out(name))
        elif name == CHOICE:
            self.choices(CHOICE, recall_questions(self.held_out("recall")), by_byte=False)
        elif isinstance(answerer, EngineAnswerer) and name == RANDOM_RECALL:
            answerer.select(RandomSelection(self.seed))
            self.share("recall, random context", self.held_out("recall"))
            answerer.select(select_top_k)
        elif isinstance(answerer, EngineAnswerer):
            self.perplexity(answerer)

    def share(self, name: str, items: Sequence[Item]) -> None:
        """A row: the share of right answers."""
        begin, answers = time.perf_counter(), dict[int, str]()
        try:
            answers.update(self.answerer.answer([self.texts.prompt(item) for item in items], name))
        finally:
            failed = [place for place, answer in sorted(answers.items()) if not score(items[place], answer)]
            wrong = [
                {"question": items[place].messages[-1], "answer": answers[place], "right": items[place].answer}
                for place in failed[:KEPT_WRONG]
            ]
            share = Share(len(answers) - len(failed), len(answers))
            self._add({"task": name, **share.as_json(), "wrong": wrong}, share.total, len(items), begin)

    def choices(self, name: str, questions: Sequence[ChoiceQuestion], by_byte: bool) -> None:
        """A row of multiple choice, and one by the log-probability of each byte. A question counts when all its
        choices are scored.
        """
        begin, nats = time.perf_counter(), dict[int, float]()
        texts = [text for question in questions for text in continuations(question, self.texts)]
        try:
            nats.update(self.answerer.likelihoods(texts, name))
        finally:
            first, hits = 0, list[tuple[bool, bool]]()
            for question in questions:
                values = [nats[first + i] for i in range(len(question.choices)) if first + i in nats]
                first += len(question.choices)
                if len(values) == len(question.choices):
                    rates = [value / len(text.encode()) for value, text in zip(values, question.choices, strict=True)]
                    right = question.answer
                    hits.append((values.index(max(values)) == right, rates.index(max(rates)) == right))
            for place, label in enumerate((name, f"{name}, a byte") if by_byte else (name,)):
                share = Share(sum(hit[place] for hit in hits), len(hits))
                self._add({"task": label, **share.as_json()}, share.total, len(questions), begin)

    def perplexity(self, engine: EngineAnswerer) -> None:
        """A row: dialogue, by the log-probabilities of the right answers."""
        items, begin, logs = self.held_out("dialogue"), time.perf_counter(), dict[int, float]()
        texts = [self.texts.with_target(item) for item in items]
        try:
            logs.update(engine.likelihoods(texts, "dialogue"))
        finally:
            tokens = sum(len(texts[place].ids) - texts[place].at for place in logs) or 1
            size, nats = sum(len(items[place].target.encode()) for place in logs) or 1, -math.fsum(logs.values())
            row: Row = {"task": "dialogue perplexity", "total": len(logs), "tokens": tokens}
            row |= {"perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / size}
            self._add(row, len(logs), len(items), begin)


def evaluate(run: Evaluation, settings: EvalSettings) -> Iterator[Row]:
    """Fills run.rows, and yields each as soon as its task is done. The files are read first. Raises ThalwegError."""
    problems, questions = read_files(settings)
    steps = [partial(run.task, name) for name in settings.tasks]
    if problems:
        steps.append(partial(run.share, "gsm8k", problems))
    if questions:
        steps.append(partial(run.choices, Path(settings.choices).stem, questions, by_byte=True))
    for step in steps:
        before = len(run.rows)
        step()
        yield from run.rows[before:]
