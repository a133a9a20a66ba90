"""Runs the examples of docs/python.md in order, and compares what they print and the tables with the code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from thalweg import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from thalweg.server.protocol import NativeSampling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.S)


def test_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for program, expected in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(program, "docs/python.md", "exec"), namespace)
        printed.append(out.getvalue())
        assert not expected or printed[-1] == expected, program
    tops, streamed = printed[3], printed[-1]
    assert re.fullmatch(r"\d+ 1 '.*' -\d+\.\d\n\d+ 2 '.*' -\d+\.\d\n", tops)
    *parts, joined, counts = streamed.splitlines()
    texts = [part.partition(" | ")[0] for part in parts]
    assert len(parts) > 1 and all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert joined == texts[-1] and counts == "True 2" and [p.rpartition(" ")[2] for p in parts][-1] == "True"


def names(title: str, column: int = 0) -> set[str]:
    table = PAGE.partition(f"\n| {title} |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|")[column] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_has_a_row() -> None:
    assert names("`SamplingParams`") == set(SamplingParams.__struct_fields__)
    assert names("`RequestOutput`") == fields(RequestOutput)
    assert names("`CompletionOutput`") == fields(CompletionOutput)
    said = PAGE.partition("`StructuredOutputsParams` has ")[2].partition("; give one")[0]
    assert set(re.findall(r"`(\w+)`", said)) == set(StructuredOutputsParams.__struct_fields__)


def test_sglangs_names_are_read() -> None:
    known: Mapping[str, Any] = dict.fromkeys(NativeSampling.__struct_fields__)
    assert names("`SamplingParams`", 2) <= set(known)
