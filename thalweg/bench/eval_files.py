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
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec

from thalweg.bench.dataset_files import json_lines
from thalweg.bench.task_pools import RECALL_VALUES
from thalweg.bench.tasks import Item, Message, plain_number

MARK = "####"
WRONG_CHOICES = 3  # of `recall_questions`
_CALCULATION = re.compile(r"<<[^>]*>>")


class MathProblem(msgspec.Struct):
    """A line of GSM8K's form."""

    question: str
    answer: str  # a worked solution, "####" and a number

    @property
    def reasoning(self) -> str:
        """The worked solution without its calculator notes."""
        return _CALCULATION.sub("", self.answer.rpartition(MARK)[0]).strip()

    @property
    def number(self) -> str | None:
        """In plain form, e.g. 1234 or 2.5."""
        return plain_number(self.answer.rpartition(MARK)[2])

    def __post_init__(self) -> None:
        if self.number is None:
            raise ValueError(f"no number after {MARK}")


def read_problems(path: Path) -> list[MathProblem]:
    """Raises DatasetError."""
    return json_lines(path, MathProblem, f'"question" and "answer" (with {MARK} number)')


def problem_items(
    problems: Sequence[MathProblem], shots: Sequence[MathProblem], thinking: bool, max_new_tokens: int
) -> list[Item]:
    """Conversations: each shot is a question and its worked answer; the question follows."""
    before: list[Message] = []
    for shot in shots:
        worked = f"{shot.reasoning}\n{MARK} {shot.number}"
        before += [{"role": "user", "content": shot.question}, {"role": "assistant", "content": worked}]
    return [
        Item(
            task="gsm8k",
            messages=(*before, {"role": "user", "content": problem.question}),
            thinking=thinking,
            target=problem.answer,
            answer=str(problem.number),
            identity=problem.question,
            max_new_tokens=max_new_tokens,
        )
        for problem in problems
    ]


class ChoiceQuestion(NamedTuple):
    """A multiple-choice question."""

    prompt: str | tuple[Mapping[str, Any], ...]  # text, or a conversation
    choices: tuple[str, ...]  # texts that follow it
    answer: int  # index of the right one


class _ChoiceLine(msgspec.Struct):
    choices: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=2)]
    answer: int | str
    question: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        answer = self.answer
        if isinstance(answer, str):
            named = answer in self.choices
            answer = self.choices.index(answer) if named else ord(answer.upper()) - ord("A") if len(answer) == 1 else -1
        if not 0 <= answer < len(self.choices):
            raise ValueError(f"answer {answer!r} is none of the {len(self.choices)} choices")
        if self.question is None and self.prompt is None and self.messages is None:
            raise ValueError("there is no question")
        self.answer = answer

    def as_question(self) -> ChoiceQuestion:
        answer = int(self.answer)
        if self.messages is not None:
            return ChoiceQuestion(tuple(self.messages), tuple(self.choices), answer)
        if self.prompt is not None:
            return ChoiceQuestion(self.prompt, tuple(self.choices), answer)
        choices = tuple(f" {text}" for text in self.choices)
        return ChoiceQuestion(f"Question: {self.question}\nAnswer:", choices, answer)


def read_questions(path: Path) -> list[ChoiceQuestion]:
    """Raises DatasetError."""
    needs = (
        '"question", "prompt" or "messages", "choices" (a list of two texts or more) and "answer" (index, letter or'
        " text of one of them)"
    )
    return [line.as_question() for line in json_lines(path, _ChoiceLine, needs)]


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
