"""JSON files that users name on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from thalweg.core.errors import InvalidRequest, UnsupportedConfig


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


def run_cases(path: str, run: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> int:
    """Writes the lines of each case of a golden file: `{"cases": [{"id": …}, …]}`, or the list alone. Returns the exit
    status: 1 where a case could not be run. Raises UnsupportedConfig for another file.
    """
    found = read_json(path)
    cases = found.get("cases") if isinstance(found, dict) else found
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "id" in case for case in cases):
        raise UnsupportedConfig(f'{path}: expected {{"cases": [{{"id": ..., ...}}, ...]}}')
    status = 0
    for case in cases:
        try:
            for line in run(case):
                write_line({"id": case["id"], **line})
        except (UnsupportedConfig, InvalidRequest) as error:
            status = 1
            write_line({"id": case["id"], "error": str(error)})
    return status


def write_line(value: dict[str, Any]) -> None:
    """One JSON object a line on standard output, nothing escaped to ASCII but what UTF-8 cannot hold."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(value)
    print(line)
