"""Confidence intervals, and reading of GSM8K-shaped files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_files import MathProblem, problem_items, read_problems
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import plain_number, score


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    # worked values: Newcombe, Statistics in Medicine 17 (1998), table I, method 3; and 10 of 10
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilsons_interval(hits: int, total: int, low: float, high: float) -> None:
    assert Share(hits, total).interval == pytest.approx((low, high), abs=6e-5)


def test_a_share_of_nothing_says_nothing() -> None:
    assert Share(0, 0).interval == (0.0, 1.0) and Share(0, 0).value == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,234 eggs", "1234"),
        ("it is 3 or 4.50.", "4.5"),
        ("-7", "-7"),
        ("2.0", "2"),
        ("none", None),
        ("100", "100"),
    ],
)
def test_the_last_number_in_plain_form(text: str, number: str | None) -> None:
    assert plain_number(text) == number


def problems(tmp_path: Path, rows: list[dict[str, str]]) -> list[MathProblem]:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return read_problems(path)


def test_items_and_their_scores(tmp_path: Path) -> None:
    rows = [
        {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4 eggs\n#### 4"},
        {"question": "A thousand and one?", "answer": "easy\n#### 1,001"},
    ]
    shot, asked = problems(tmp_path, rows)
    assert (shot.reasoning, shot.number, asked.number) == ("2+2 = 4 eggs", "4", "1001")
    (item,) = problem_items([asked], [shot], thinking=False, max_new_tokens=64)
    assert [message["role"] for message in item.messages] == ["user", "assistant", "user"]
    assert item.messages[1]["content"] == "2+2 = 4 eggs\n#### 4"
    assert score(item, "It is 1,001.") and score(item, "1000 + 1 = 1001") and not score(item, "1001 or 7")
    (thought,) = problem_items([asked], [], thinking=True, max_new_tokens=64)
    assert score(thought, "hm, 7</think>1001") and not score(thought, "it must be 1001")


@pytest.mark.parametrize("row", [{"question": "a"}, {"question": "a", "answer": "no mark"}])
def test_a_broken_line_is_named(tmp_path: Path, row: dict[str, str]) -> None:
    with pytest.raises(DatasetError, match="line 1"):
        problems(tmp_path, [row])
