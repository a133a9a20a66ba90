"""Files of the GSM8K shape: JSON lines with `question` and `answer`, whose last line is `#### ` and a number (arXiv
2110.14168).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thalweg.bench.errors import DatasetError
from thalweg.bench.tasks import Item, Message

MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATION = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class Problem:
    """question; reasoning: the worked solution without its calculator notes; answer: the number in plain form, e.g.
    1234 or 2.5.
    """

    question: str
    reasoning: str
    answer: str


def plain_number(text: str) -> str | None:
    """The last number of a text, in plain form: no thousands marks, no zeros at the end; None where there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    value = str(found[-1]).replace(",", "")
    return value.rstrip("0").rstrip(".") if "." in value else value


def read_problems(path: Path) -> list[Problem]:
    """Every problem of a file. Raises DatasetError naming the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            reasoning, _, last = str(row["answer"]).rpartition(MARK)
            answer = plain_number(last)
            if answer is None:
                raise ValueError(f"no number after {MARK}")
            problems.append(Problem(str(row["question"]), _CALCULATION.sub("", reasoning).strip(), answer))
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f'{path}, line {number}: needs "question" and "answer" (with {MARK} number): {error}'
            ) from error
    if not problems:
        raise DatasetError(f"{path}: no problems in it")
    return problems


def items(problems: Sequence[Problem], shots: Sequence[Problem], thinking: bool, max_new_tokens: int) -> list[Item]:
    """Conversations: each shot is a question and its worked answer, then comes the question."""
    before: list[Message] = []
    for shot in shots:
        before.append({"role": "user", "content": shot.question})
        before.append({"role": "assistant", "content": f"{shot.reasoning}\n{MARK} {shot.answer}"})
    return [
        Item(
            task="gsm8k",
            messages=(*before, {"role": "user", "content": problem.question}),
            tools=(),
            thinking=thinking,
            target=f"{problem.reasoning}\n{MARK} {problem.answer}",
            answer=problem.answer,
            identity=problem.question,
            max_new_tokens=max_new_tokens,
        )
        for problem in problems
    ]


def score(item: Item, output: str) -> bool:
    """Whether the output's last number is the answer; thinking does not count as output, and an output that never ends
    it has none.
    """
    if item.thinking:
        _, found, output = output.rpartition("</think>")
        if not found:
            return False
    return plain_number(output.partition("\n\n\n")[0]) == item.answer
