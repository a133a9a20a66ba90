"""Multiple choice by log-probabilities: the choice whose text the model finds likeliest, in all or a byte of it.

A file is JSON lines. Each has `choices` (texts) and `answer` (which is right: its index from 0, its letter A, B, ...,
or its text), and one of

- `question`: the prompt is "Question: ...\\nAnswer:", and a choice follows behind a space;
- `prompt`: the prompt as it stands, and the choices as they stand, so a space between them is yours to write;
- `messages`: a conversation in the model's chat format, whose answer is the choice.

Both ways of choosing are those of lm-evaluation-harness (`acc`, and `acc_norm`, which divides by characters).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from thalweg.bench.answers import Answerer, Continued, Texts
from thalweg.bench.errors import DatasetError
from thalweg.bench.task_pools import RECALL_VALUES
from thalweg.bench.tasks import Item

OTHERS = 3  # wrong choices of `of_recall`


@dataclass(frozen=True, slots=True)
class Question:
    """prompt: text, or a conversation. choices: what follows it. answer: index of the right one."""

    prompt: str | tuple[Mapping[str, object], ...]
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Pick:
    """The index chosen by the sum of log-probabilities, and by that sum over the choice's bytes in UTF-8."""

    by_sum: int
    by_byte: int


def read_questions(path: Path) -> list[Question]:
    """Every question of a file. Raises DatasetError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f'{path}, line {number}: needs "question", "prompt" or "messages", "choices" (a list of two texts or'
                f' more) and "answer" (index, letter or text of one of them): {error}'
            ) from error
    if not questions:
        raise DatasetError(f"{path}: no questions in it")
    return questions


def _question(row: Mapping[str, object]) -> Question:
    choices = row["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise ValueError("choices must be two texts or more, none of them empty")
    answer = _index(row["answer"], choices)
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
            raise ValueError("messages must be a list of objects")
        return Question(tuple(messages), tuple(choices), answer)
    if "prompt" in row:
        return Question(str(row["prompt"]), tuple(choices), answer)
    return Question(f"Question: {row['question']}\nAnswer:", tuple(f" {one}" for one in choices), answer)


def _index(answer: object, choices: Sequence[str]) -> int:
    if isinstance(answer, str) and answer in choices:
        return list(choices).index(answer)
    if isinstance(answer, str) and len(answer) == 1:
        answer = ord(answer.upper()) - ord("A")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"answer {answer!r} is none of the {len(choices)} choices")
    return answer


def of_recall(items: Sequence[Item]) -> list[Question]:
    """The bundled recall as multiple choice: its right answer, and the same with three other words. The same for the
    same item.
    """
    questions = []
    for item in items:
        rng = Random(item.identity)
        begin = item.target.removesuffix(f"{item.answer}.")
        words = [item.answer, *rng.sample([word for word in RECALL_VALUES if word != item.answer], OTHERS)]
        rng.shuffle(words)
        questions.append(Question(item.messages, tuple(f"{begin}{word}." for word in words), words.index(item.answer)))
    return questions


def continued(question: Question, texts: Texts) -> list[Continued]:
    """Each choice behind the prompt. Where both are one token at the seam, that token counts with the choice."""
    if isinstance(question.prompt, str):
        before = texts.tokenizer.encode(question.prompt)
        wholes = [texts.tokenizer.encode(question.prompt + choice) for choice in question.choices]
    else:
        before = texts.tokenizer.encode(texts.encoder.encode(question.prompt, None, thinking=False))
        wholes = [[*before, *texts.tokenizer.encode(choice, add_special=False)] for choice in question.choices]
    return [Continued(tuple(whole), max(_common(before, whole), 1)) for whole in wholes]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def answer(questions: Sequence[Question], texts: Texts, answerer: Answerer, label: str, into: dict[int, Pick]) -> None:
    """Puts into `into` what the model chooses, by the question's place, of those whose choices all have been weighed
    when it ends or is ended.

    Raises InvalidRequest for a conversation where the checkpoint has no chat format, NoAnswer when a request fails.
    """
    asked = [one for question in questions for one in continued(question, texts)]
    nats: dict[int, float] = {}
    try:
        answerer.likelihoods(asked, label, nats)
    finally:
        first = 0
        for place, question in enumerate(questions):
            places = range(first, first + len(question.choices))
            first = places.stop
            if all(one in nats for one in places):
                into[place] = _pick(question, [nats[one] for one in places])


def _pick(question: Question, nats: Sequence[float]) -> Pick:
    rates = [value / len(text.encode()) for value, text in zip(nats, question.choices, strict=True)]
    return Pick(nats.index(max(nats)), rates.index(max(rates)))
