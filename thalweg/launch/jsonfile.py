"""JSON files that users name on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from thalweg.core.errors import UnsupportedConfig


def read_text(path: str) -> str:
    """A UTF-8 file, or standard input for `-`. Raises UnsupportedConfig."""
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedConfig(f"{path}: {error}") from error


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises UnsupportedConfig."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UnsupportedConfig(f"{path}: not JSON: {error}") from error


def read_cases(path: str) -> Iterator[dict[str, Any]]:
    """The cases of a golden file: `{"cases": [{"id": …}, …]}`, or the list alone. Raises UnsupportedConfig."""
    found = read_json(path)
    cases = found.get("cases") if isinstance(found, dict) else found
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "id" in case for case in cases):
        raise UnsupportedConfig(f'{path}: expected {{"cases": [{{"id": ..., ...}}, ...]}}')
    yield from cases


def write_line(value: dict[str, Any]) -> None:
    """One JSON object a line on standard output, nothing escaped to ASCII but what UTF-8 cannot hold."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(value)
    print(line)
