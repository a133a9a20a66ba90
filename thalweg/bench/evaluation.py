"""An evaluation: questions, answers, and rows of results, each share with its confidence interval.

The bundled tasks give every optimization (quantization, sparse attention, speculation, a cache format) an accuracy
beside its speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from thalweg.attention.selection import RandomSelection, select_top_k
from thalweg.bench.answering import EngineAnswerer
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_files import (
    ChoiceQuestion,
    MathProblem,
    Picks,
    pick_choices,
    problem_items,
    read_problems,
    read_questions,
    recall_questions,
    score_number,
)
from thalweg.bench.eval_prompts import Answerer, EvalAnswer, PromptFormat
from thalweg.bench.nextn_acceptance import Written, acceptance, load_nextn
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import Item, make_items, score
from thalweg.core.errors import UnsupportedConfig

SCORED = ("sums", "recall", "tools")  # answers that are right or wrong
RANDOM_RECALL = "recall-random"  # recall, with a random selection of context in place of the indexer's
CHOICE = "recall-choice"  # the right one of four words, by log-probability
TASKS = ("sums", "recall", RANDOM_RECALL, CHOICE, "tools", "dialogue", "nextn")
NEXTN_ON = ("sums", "dialogue")  # greedy texts on which drafts are counted
MOST_ITEMS = 1000
KEPT_WRONG = 20  # wrong answers of a row

Row = dict[str, object]


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated."""

    tasks: tuple[str, ...] = ()  # of TASKS
    items: int = MOST_ITEMS  # of each, at most
    seed: int = 0  # which items
    indexer: str = "model"  # "random": a random selection of context, for every task
    gsm8k: str = ""  # files; "" for none
    gsm8k_shots: str = ""
    shots: int = 0  # worked examples before each question of gsm8k
    max_new_tokens: int = 512  # of gsm8k
    thinking: bool = False  # of gsm8k
    choices: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.tasks or self.gsm8k or self.choices)


class EvalFiles(NamedTuple):
    """The contents of the files."""

    problems: list[MathProblem]
    shots: list[MathProblem]
    questions: list[ChoiceQuestion]


def read_files(settings: EvalSettings) -> EvalFiles:
    """Raises DatasetError for a file that cannot be read, is broken or has too few worked examples; UnsupportedConfig
    for flags that lack another.
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
    questions = read_questions(Path(settings.choices))[: settings.items] if settings.choices else []
    return EvalFiles(problems, examples[:shots], questions)


class Evaluation:
    """Fills `rows` task by task; a task that is ended early has a row of what it had by then, with `asked`, the number
    of its items.
    """

    def __init__(self, texts: PromptFormat, answerer: Answerer, items: int, seed: int) -> None:
        self.texts, self.answerer, self.items, self.seed = texts, answerer, items, seed
        self.rows: list[Row] = []
        self.written: dict[str, list[Written]] = {}  # prompts with their answers, by task

    def held_out(self, task: str) -> list[Item]:
        return make_items(task, "held_out", self.items, self.seed)

    def _add(self, row: Row, done: int, asked: int, begin: float) -> None:
        """A row, unless nothing was answered."""
        if done:
            row = row | {"seconds": time.perf_counter() - begin}
            self.rows.append(row if done == asked else row | {"asked": asked})

    def share(self, name: str, items: Sequence[Item], right: Callable[[Item, str], bool]) -> None:
        """A row: the share of right answers."""
        begin, answers = time.perf_counter(), dict[int, EvalAnswer]()
        prompts = [self.texts.prompt(item) for item in items]
        try:
            self.answerer.answer(prompts, name, answers)
            self.written[name] = [(prompt.ids, answers[place].ids) for place, prompt in enumerate(prompts)]
        finally:
            failed = [place for place, answer in sorted(answers.items()) if not right(items[place], answer.text)]
            wrong = [
                {"question": items[place].messages[-1], "answer": answers[place].text, "right": items[place].answer}
                for place in failed[:KEPT_WRONG]
            ]
            share = Share(len(answers) - len(failed), len(answers))
            self._add({"task": name, **share.as_json(), "wrong": wrong}, share.total, len(items), begin)

    def choices(self, name: str, questions: Sequence[ChoiceQuestion], by_byte: bool) -> None:
        """A row of multiple choice, and a second one by the log-probability of each byte."""
        begin, picks = time.perf_counter(), dict[int, Picks]()
        try:
            pick_choices(questions, self.texts, self.answerer, name, picks)
        finally:
            for place, label in enumerate((name, f"{name}, a byte") if by_byte else (name,)):
                hits = sum(pick[place] == questions[i].answer for i, pick in picks.items())
                share = Share(hits, len(picks))
                self._add({"task": label, **share.as_json()}, share.total, len(questions), begin)

    def perplexity(self, engine: EngineAnswerer) -> None:
        """A row: dialogue, by the log-probabilities of the right answers."""
        items, begin, logs = self.held_out("dialogue"), time.perf_counter(), dict[int, float]()
        texts = [self.texts.with_target(item) for item in items]
        try:
            engine.likelihoods(texts, "dialogue", logs)
        finally:
            tokens = sum(len(texts[place].ids) - texts[place].at for place in logs) or 1
            size, nats = sum(len(items[place].target.encode()) for place in logs) or 1, -math.fsum(logs.values())
            row: Row = {"task": "dialogue perplexity", "total": len(logs), "tokens": tokens}
            row |= {"perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / size}
            self._add(row, len(logs), len(items), begin)

    def nextn(self, engine: EngineAnswerer) -> None:
        """A row for each of NEXTN_ON: greedy acceptance at depth 1, on the engine's own greedy texts."""
        layer = load_nextn(engine.llm.engine)
        for name in NEXTN_ON:
            begin = time.perf_counter()
            if name not in self.written:
                prompts, answers = [self.texts.prompt(item) for item in self.held_out(name)], dict[int, EvalAnswer]()
                engine.answer(prompts, name, answers)
                self.written[name] = [(prompt.ids, answers[place].ids) for place, prompt in enumerate(prompts)]
            written = self.written[name]
            with progress_bar(f"NextN on {name}", len(written)) as bar:
                share = acceptance(engine.llm.engine, layer, written, bar.advance)
            row: Row = {"task": f"NextN acceptance, {name}", "items": len(written), **share.as_json()}
            self._add(row, 1, 1, begin)


def evaluate(run: Evaluation, settings: EvalSettings) -> Iterator[Row]:
    """Fills run.rows, and yields each as soon as its task is done. The files are read first. Raises ThalwegError."""
    files, yielded = read_files(settings), 0
    for _ in _tasks(run, settings, files):
        yield from run.rows[yielded:]
        yielded = len(run.rows)


def _tasks(run: Evaluation, settings: EvalSettings, files: EvalFiles) -> Iterator[None]:
    """Does one task after the other."""
    engine = run.answerer if isinstance(run.answerer, EngineAnswerer) else None
    is_random, selection = settings.indexer == "random", RandomSelection(settings.seed)
    mark = ", random context" if is_random else ""
    if engine is not None and is_random:
        engine.select(selection)
    for task in settings.tasks:
        if task in SCORED:
            run.share(task + mark, run.held_out(task), score)
        elif task == CHOICE:
            run.choices(CHOICE + mark, recall_questions(run.held_out("recall")), by_byte=False)
        elif engine is not None and task == RANDOM_RECALL:
            engine.select(selection)
            run.share("recall, random context", run.held_out("recall"), score)
            engine.select(selection if is_random else select_top_k)
        elif engine is not None:
            (run.perplexity if task == "dialogue" else run.nextn)(engine)
        yield
    if files.problems:
        items = problem_items(files.problems, files.shots, settings.thinking, settings.max_new_tokens)
        run.share("gsm8k" + mark, items, score_number)
        yield
    if files.questions:
        run.choices(Path(settings.choices).stem + mark, files.questions, by_byte=True)
        yield
