"""Questions from files: GSM8K's problems, and multiple choice by log-probabilities.

A GSM8K file is JSON lines with `question` and `answer`, whose last line is `#### ` and a number (arXiv 2110.14168).

A multiple-choice file is JSON lines with `choices` (texts), `answer` (the right one: its index from 0, its letter A, B,
…, or its text), and one of

- `question`: the prompt is "Question: ...\\nAnswer:", and a choice follows behind a space;
- `prompt`: the prompt and the choices as they are, so a space between them is the file's to write;
- `messages`: a conversation in the model's chat format, whose answer is the choice.

The choice with the highest log-probability wins, in all or for each byte: lm-evaluation-harness's `acc`, and
`acc_norm`, which divides by characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_prompts import Answerer, Continuation, PromptFormat
from thalweg.bench.statistics import common_length
from thalweg.bench.task_pools import RECALL_VALUES
from thalweg.bench.tasks import Item, Message

MARK = "####"
WRONG_CHOICES = 3  # of `recall_questions`
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATION = re.compile(r"<<[^>]*>>")

Made = TypeVar("Made")


def _read_lines(path: Path, name: str, needs: str, make: Callable[[bytes], Made]) -> list[Made]:
    """One value for each line that is not empty. Raises DatasetError that names the broken line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    made = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                made.append(make(line.encode()))
            except ValueError as error:
                raise DatasetError(f"{path}, line {number}: needs {needs}: {error}") from error
    if not made:
        raise DatasetError(f"{path}: no {name} in it")
    return made


class MathProblem(msgspec.Struct):
    """A problem of GSM8K's form."""

    question: str
    reasoning: str  # the worked solution without its calculator notes
    answer: str  # the number in plain form, e.g. 1234 or 2.5


class _ProblemLine(msgspec.Struct):
    question: str
    answer: str


def plain_number(text: str) -> str | None:
    """The last number of a text, without thousands separators and trailing zeros; None where there is none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    value = str(numbers[-1]).replace(",", "")
    return value.rstrip("0").rstrip(".") if "." in value else value


def read_problems(path: Path) -> list[MathProblem]:
    """Raises DatasetError."""

    def make(line: bytes) -> MathProblem:
        row = msgspec.json.decode(line, type=_ProblemLine)
        reasoning, _, last = row.answer.rpartition(MARK)
        if (answer := plain_number(last)) is None:
            raise ValueError(f"no number after {MARK}")
        return MathProblem(row.question, _CALCULATION.sub("", reasoning).strip(), answer)

    return _read_lines(path, "problems", f'"question" and "answer" (with {MARK} number)', make)


def problem_items(
    problems: Sequence[MathProblem], shots: Sequence[MathProblem], thinking: bool, max_new_tokens: int
) -> list[Item]:
    """Conversations: each shot is a question and its worked answer; the question follows."""

    def target(problem: MathProblem) -> str:
        return f"{problem.reasoning}\n{MARK} {problem.answer}"

    before: list[Message] = []
    for shot in shots:
        before.append({"role": "user", "content": shot.question})
        before.append({"role": "assistant", "content": target(shot)})
    return [
        Item(
            task="gsm8k",
            messages=(*before, {"role": "user", "content": problem.question}),
            tools=(),
            thinking=thinking,
            target=target(problem),
            answer=problem.answer,
            identity=problem.question,
            max_new_tokens=max_new_tokens,
        )
        for problem in problems
    ]


def score_number(item: Item, output: str) -> bool:
    """Whether the output's last number is the answer. Thinking is not output, and thinking without an end is wrong."""
    if item.thinking:
        _, end, output = output.rpartition("</think>")
        if not end:
            return False
    return plain_number(output.partition("\n\n\n")[0]) == item.answer


class ChoiceQuestion(NamedTuple):
    """A multiple-choice question."""

    prompt: str | tuple[Mapping[str, Any], ...]  # text, or a conversation
    choices: tuple[str, ...]  # texts that follow it
    answer: int  # index of the right one


class Picks(NamedTuple):
    """The index of the choice with the highest log-probability."""

    by_sum: int
    by_byte: int  # for each byte of its UTF-8


class _ChoiceLine(msgspec.Struct):
    choices: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=2)]
    answer: int | str
    question: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_questions(path: Path) -> list[ChoiceQuestion]:
    """Raises DatasetError."""

    def make(line: bytes) -> ChoiceQuestion:
        row = msgspec.json.decode(line, type=_ChoiceLine)
        answer, choices = row.answer, tuple(row.choices)
        if isinstance(answer, str):
            named = answer in choices
            answer = choices.index(answer) if named else ord(answer.upper()) - ord("A") if len(answer) == 1 else -1
        if not 0 <= answer < len(choices):
            raise ValueError(f"answer {row.answer!r} is none of the {len(choices)} choices")
        if row.messages is not None:
            return ChoiceQuestion(tuple(row.messages), choices, answer)
        if row.prompt is not None:
            return ChoiceQuestion(row.prompt, choices, answer)
        if row.question is None:
            raise ValueError("there is no question")
        return ChoiceQuestion(f"Question: {row.question}\nAnswer:", tuple(f" {text}" for text in choices), answer)

    needs = (
        '"question", "prompt" or "messages", "choices" (a list of two texts or more) and "answer" (index, letter or'
        " text of one of them)"
    )
    return _read_lines(path, "questions", needs, make)


def recall_questions(items: Sequence[Item]) -> list[ChoiceQuestion]:
    """The bundled recall as multiple choice: its right answer, and the same with three other words."""
    questions = []
    for item in items:
        rng, begin = Random(item.identity), item.target.removesuffix(f"{item.answer}.")
        others = [word for word in RECALL_VALUES if word != item.answer]
        words = [item.answer, *rng.sample(others, WRONG_CHOICES)]
        rng.shuffle(words)
        choices = tuple(f"{begin}{word}." for word in words)
        questions.append(ChoiceQuestion(item.messages, choices, words.index(item.answer)))
    return questions


def continuations(question: ChoiceQuestion, texts: PromptFormat) -> list[Continuation]:
    """The prompt with each choice. A token that spans both counts with the choice."""
    encode = texts.tokenizer.encode
    if isinstance(question.prompt, str):
        before = encode(question.prompt)
        wholes = [encode(question.prompt + choice) for choice in question.choices]
    else:
        before = encode(texts.encoder.encode(question.prompt, None, thinking=False))
        wholes = [[*before, *encode(choice, add_special=False)] for choice in question.choices]
    return [Continuation(tuple(whole), max(common_length(before, whole), 1)) for whole in wholes]


def pick_choices(
    questions: Sequence[ChoiceQuestion], texts: PromptFormat, answerer: Answerer, label: str, into: dict[int, Picks]
) -> None:
    """Puts the model's choices into `into`, by the question's place, of the questions whose choices are all scored when
    it ends. Raises InvalidRequest where the checkpoint has no chat format, NoAnswer when a request fails.
    """
    asked = [(place, text) for place, question in enumerate(questions) for text in continuations(question, texts)]
    nats: dict[int, float] = {}
    try:
        answerer.likelihoods([text for _, text in asked], label, nats)
    finally:
        known: dict[int, list[float]] = {}
        for i, value in sorted(nats.items()):
            known.setdefault(asked[i][0], []).append(value)
        for place, values in known.items():
            choices = questions[place].choices
            if len(values) == len(choices):
                rates = [value / len(text.encode()) for value, text in zip(values, choices, strict=True)]
                into[place] = Picks(values.index(max(values)), rates.index(max(rates)))
