"""An evaluation: questions, answers, and rows of results, each share with its confidence interval.

The bundled tasks give every shortcut (quantization, sparse attention, speculation, a cache format) an accuracy beside
its speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.progress import Progress

from thalweg.attention.selection import RandomSelection, select_top_k
from thalweg.bench import gsm8k, multiple_choice
from thalweg.bench.answers import Answer, Answerer, Continued, Here, Texts
from thalweg.bench.errors import DatasetError
from thalweg.bench.nextn_acceptance import Written, acceptance, load_nextn
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import Item, make_items, score
from thalweg.core.errors import UnsupportedConfig

SHARES = ("sums", "recall", "tools")  # answered and scored right or wrong
BLIND = "recall-random"  # recall, with a random choice of context in the place of the indexer's
CHOICE = "recall-choice"  # the right one of four words, by log-probability: nothing is written
TASKS = ("sums", "recall", BLIND, CHOICE, "tools", "dialogue", "nextn")
NEXTN_ON = ("sums", "dialogue")  # greedy texts on which drafts are counted
LEAST = 1000
KEPT_WRONG = 20  # wrong answers that a row shows

Row = dict[str, object]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated. tasks: of TASKS. items: at most, of each. seed: which. indexer: "model", or "random" for every
    task. gsm8k, choices: files, "" for none. shots: worked examples before each question of gsm8k, from gsm8k_shots.
    max_new_tokens, thinking: of gsm8k.
    """

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


class Files(msgspec.Struct, frozen=True):
    """What the files hold: problems and worked examples of gsm8k, and questions of multiple choice."""

    problems: tuple[gsm8k.Problem, ...] = ()
    shots: tuple[gsm8k.Problem, ...] = ()
    questions: tuple[multiple_choice.Question, ...] = ()


def read_files(asked: Asked) -> Files:
    """Raises DatasetError for a file that cannot be read, has a broken line or too few worked examples;
    UnsupportedConfig for flags that lack another.
    """
    if asked.shots and not (asked.gsm8k and asked.gsm8k_shots):
        raise UnsupportedConfig(
            f"--shots {asked.shots}: needs --gsm8k FILE and --gsm8k-shots FILE, from which the worked examples are"
            " taken"
        )
    if asked.gsm8k_shots and not asked.shots:
        raise UnsupportedConfig(f"--gsm8k-shots {asked.gsm8k_shots}: say how many of them with --shots N")
    problems = gsm8k.read_problems(Path(asked.gsm8k))[: asked.items] if asked.gsm8k else []
    shots = gsm8k.read_problems(Path(asked.gsm8k_shots)) if asked.shots else []
    if len(shots) < asked.shots:
        raise DatasetError(f"{asked.gsm8k_shots}: {len(shots)} worked examples, and --shots asks for {asked.shots}")
    questions = multiple_choice.read_questions(Path(asked.choices))[: asked.items] if asked.choices else []
    return Files(tuple(problems), tuple(shots[: asked.shots]), tuple(questions))


class Evaluation:
    """Items → rows of results. `rows` grows task by task, so that what is done survives an interruption; a task that is
    broken off has a row of what it had by then, with `asked`, how many it should have been.
    """

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
        answers: dict[int, Answer] = {}
        try:
            self.answerer.answer(questions, name, answers)
            self.written[name] = [(question.ids, answers[place].ids) for place, question in enumerate(questions)]
        finally:
            failed = [place for place, answer in sorted(answers.items()) if not right(items[place], answer.text)]
            wrong = [
                {"question": items[i].messages[-1], "answer": answers[i].text, "right": items[i].answer}
                for i in failed[:KEPT_WRONG]
            ]
            self._add_share(name, Share(len(answers) - len(failed), len(answers)), len(items), begin, {"wrong": wrong})

    def _add_share(self, name: str, share: Share, asked: int, begin: float, more: Row) -> None:
        """A row, unless nothing at all was answered."""
        if share.total:
            row = {"task": name, **share.as_json(), "seconds": time.perf_counter() - begin, **more}
            self.rows.append(row if share.total == asked else {**row, "asked": asked})

    def choices(self, name: str, questions: Sequence[multiple_choice.Question], a_byte: bool) -> None:
        """Multiple choice by the log-probability of each choice's text: a row, and one for that a byte where it is
        asked for.
        """
        begin = time.perf_counter()
        picks: dict[int, multiple_choice.Pick] = {}
        try:
            multiple_choice.answer(questions, self.texts, self.answerer, name, picks)
        finally:
            hits = sum(pick.by_sum == questions[place].answer for place, pick in picks.items())
            self._add_share(name, Share(hits, len(picks)), len(questions), begin, {})
            if a_byte:
                hits = sum(pick.by_byte == questions[place].answer for place, pick in picks.items())
                self._add_share(f"{name}, a byte", Share(hits, len(picks)), len(questions), begin, {})

    def perplexity(self, here: Here) -> None:
        """One row: dialogue, by the log-probabilities of the right answers."""
        items, begin = self.held_out("dialogue"), time.perf_counter()
        answers = [Continued(*self.texts.with_target(item)) for item in items]
        logs: dict[int, float] = {}
        try:
            here.likelihoods(answers, "dialogue", logs)
        finally:
            if logs:
                tokens = sum(len(answers[place].ids) - answers[place].at for place in logs)
                size, nats = sum(len(items[place].target.encode()) for place in logs), -math.fsum(logs.values())
                row: Row = {"task": "dialogue perplexity", "total": len(logs), "tokens": tokens}
                row |= {"perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / size}
                row |= {"seconds": time.perf_counter() - begin}
                self.rows.append(row if len(logs) == len(items) else row | {"asked": len(items)})

    def nextn(self, here: Here, progress: Progress) -> None:
        """A row for each of NEXTN_ON: greedy acceptance at depth 1, on the engine's own greedy texts."""
        layer = load_nextn(here.llm.engine)
        for name in NEXTN_ON:
            begin = time.perf_counter()
            if name not in self.written:
                questions = [self.texts.question(item) for item in self.held_out(name)]
                answers: dict[int, Answer] = {}
                here.answer(questions, name, answers)
                self.written[name] = [(question.ids, answers[place].ids) for place, question in enumerate(questions)]
            written = self.written[name]
            bar = progress.add_task(f"NextN on {name}", total=len(written))

            def advance(count: int, bar: int = int(bar)) -> None:
                progress.advance(progress.task_ids[bar], count)

            share = acceptance(here.llm.engine, layer, written, advance)
            row: Row = {"task": f"NextN acceptance, {name}", "items": len(written), **share.as_json()}
            self.rows.append(row | {"seconds": time.perf_counter() - begin})


def evaluate(run: Evaluation, asked: Asked, progress: Progress | None = None) -> Iterator[Row]:
    """Fills run.rows, and gives each as soon as its task is done. The files are read first. Raises ThalwegError,
    HttpError or DatasetError.
    """
    files, told = read_files(asked), 0
    for _ in _tasks(run, asked, files, progress or Progress(disable=True)):
        yield from run.rows[told:]
        told = len(run.rows)


def _tasks(run: Evaluation, asked: Asked, files: Files, progress: Progress) -> Iterator[str]:
    """Does one task after the other; their names."""
    here = run.answerer if isinstance(run.answerer, Here) else None
    blind = RandomSelection(asked.seed)
    mark = "" if asked.indexer == "model" else ", random context"
    if here is not None and asked.indexer == "random":
        here.select(blind)
    for task in asked.tasks:
        if task in SHARES:
            run.share(task + mark, run.held_out(task), score)
        elif here is not None and task == BLIND:
            here.select(blind)
            run.share("recall, random context", run.held_out("recall"), score)
            here.select(blind if asked.indexer == "random" else select_top_k)
        elif task == CHOICE:
            run.choices(CHOICE + mark, multiple_choice.of_recall(run.held_out("recall")), a_byte=False)
        elif here is not None:
            run.perplexity(here) if task == "dialogue" else run.nextn(here, progress)
        yield task
    if files.problems:
        items = gsm8k.items(files.problems, files.shots, asked.thinking, asked.max_new_tokens)
        run.share("gsm8k" + mark, items, gsm8k.score)
        yield "gsm8k"
    if files.questions:
        run.choices(Path(asked.choices).stem + mark, files.questions, a_byte=True)
        yield "choices"
