"""docs/troubleshooting.md against the code: each quoted error text can be printed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from thalweg.config.args import options_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| (?:\d{3} )?`([^`]+)` \|", PAGE, re.M) + ["… ended with exit code …"]


def texts(tree: ast.AST) -> list[str]:
    """Every string of a module, with … for what an f-string fills in, and those that `+` joins."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and (text := written(node)):
            found.append(text)
    return found


def written(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(written(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return written(node.left) + written(node.right)
    if isinstance(node, ast.IfExp):
        return written(node.body)
    return "…"


@pytest.fixture(scope="module")
def printed() -> str:
    """All strings of the package that hold more than a word, one a line."""
    lines: set[str] = set()
    for path in sorted((ROOT / "thalweg").glob("[!bk]*/**/*.py")):  # neither bench nor kernels: they serve nobody
        lines.update(text for text in texts(ast.parse(path.read_bytes())) if " " in text)
    return "\n".join(text.replace("\n", " ") for text in lines)


@pytest.mark.parametrize("quote", QUOTED)
def test_the_quoted_text_is_in_the_code(printed: str, quote: str) -> None:
    pattern = "[^\n]*?".join(re.escape(part) for part in quote.strip("…").split("…"))
    assert re.search(pattern, printed), f"no error says: {quote}"


def test_there_are_enough_and_a_wrong_one_would_be_found(printed: str) -> None:
    assert len(QUOTED) > 30
    with pytest.raises(AssertionError):
        test_the_quoted_text_is_in_the_code(printed, "cannot listen on … gate …")


def test_every_flag_named_exists() -> None:
    known = {flag for action in options_parser("x", "")._actions for flag in action.option_strings}
    named = {flag for row in re.findall(r"`([^`]*)`", PAGE) for flag in re.findall(r"--[a-z][\w-]+", row)}
    assert named - known <= {"--format", "--import", "--online"}, named - known  # of parse, warmup and doctor
