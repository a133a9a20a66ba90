"""Parts that all commands share: flags, exit statuses, and runs that end early."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.bundled import find_bundled
from thalweg.config.options import Options
from thalweg.config.setting import nearest
from thalweg.core.errors import ThalwegError, UnsupportedConfig

ENGINE_FLAGS = ("model", "load", "memory", "schedule", "speculative", "parallel")  # groups of the engine's flags
UNKNOWN = "unrecognized arguments: "


class CommandParser(argparse.ArgumentParser):
    """argparse with short errors: the problem, and the nearest flag instead of the list of all flags."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0]
            guess = nearest(word.partition("=")[0], self._option_string_actions)
            message = f"unknown flag {word}" + (f"; did you mean {guess}?" if guess else "")
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists all flags\n")


def _checked(read: Callable[[str], float], expected: str, is_valid: Callable[[float], bool], text: str) -> float:
    """An argparse type."""
    try:
        value = read(text)
    except ValueError:
        value = math.nan
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


KINDS: dict[str, Any] = {
    "whole": partial(_checked, int, "a whole number from 0 on", lambda value: value >= 0),
    "count": partial(_checked, int, "a whole number from 1 on", lambda value: value >= 1),
    "number": float,
    "positive": partial(_checked, float, "a number above 0", lambda value: value > 0),
    "share": partial(_checked, float, "a number between 0 and 1", lambda value: 0 <= value <= 1),
    "seconds": partial(_checked, float, "a number of seconds from 0 on", lambda value: 0 <= value < math.inf),
    "model": find_bundled, "text": str, "name": str, "url": str, "file": str, "folder": str, "path": Path,
}  # fmt: skip
METAVARS = {"whole": "N", "count": "N", "number": "X", "positive": "X", "share": "X"}
OUTPUT = (
    "--output-file --result-filename  file  write the result: .jsonl gets one more line, another name is written anew"
)


def add_flags(parser: argparse.ArgumentParser, title: str, table: str, **kinds: Any) -> None:
    """Adds a titled group of flags ("": none). Each entry of the table has three columns, at least two spaces apart:
    the flag with its aliases; its kind and, behind "=", its default; the help.

    A kind is a name in KINDS or in `kinds` (an argparse type, or a tuple of choices); "kind..." takes several values;
    "switch" takes none.
    """
    group = parser.add_argument_group(title) if title else parser
    for entry in re.split(r"\n(?=--)", table.strip()):
        names, kind, text = re.split(r"\s{2,}", entry, maxsplit=2)
        kind, _, default = kind.partition("=")
        text = " ".join(text.split()).replace("%", "%%") + (f" (default: {default})" if default else "")
        if kind == "switch":
            group.add_argument(*names.split(), action="store_true", help=text)
            continue
        several, kind = kind.endswith("..."), kind.removesuffix("...")
        known = (KINDS | kinds)[kind]
        options: dict[str, Any] = {"choices": known} if isinstance(known, tuple) else {"type": known}
        if not isinstance(known, tuple) or several:
            options["metavar"] = METAVARS.get(kind, kind.upper())
        read = options.get("type", str)
        if several:
            options |= {"nargs": "+", "default": [read(word) for word in default.split()]}
        else:
            options["default"] = read(default) if default or read is str else None
        group.add_argument(*names.split(), help=text, **options)


def parse_engine_flags(
    argv: Sequence[str], prog: str, text: str, tables: Mapping[str, str], only: Sequence[str] = ENGINE_FLAGS,
    epilog: str = "", **kinds: Any,
) -> tuple[Any, Options]:  # fmt: skip
    """A command's own flags and the engine's settings. tables: its flags by the title of their group; only: groups of
    the engine's. Raises UnsupportedConfig.
    """
    parser = options_parser(prog, text, epilog, only)
    for title, table in tables.items():
        add_flags(parser, title, table, **kinds)
    return parse_with_notices(parser, argv)


def parse_with_notices(parser: OptionsParser, argv: Sequence[str]) -> tuple[Any, Options]:
    """A command's own flags and the engine's settings, of the bundled model where none is given."""
    parsed = parse_options(parser, argv, needs_model=True)
    for notice in parsed.notices:
        print(f"{parser.prog}: {notice}", file=sys.stderr)
    return parsed.args, parsed.options


def command(name: str) -> Callable[[Callable[[list[str]], int]], Callable[[Sequence[str] | None], int]]:
    """Makes a function of the words after a command's name its `main`. The exit status is the function's, or 2: wrong
    flags or settings; 1: another error, which is printed; 130: Ctrl-C.
    """

    def decorate(run: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
        def main(argv: Sequence[str] | None = None) -> int:
            try:
                return run(list(sys.argv[1:] if argv is None else argv))
            except ThalwegError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2 if isinstance(error, UnsupportedConfig) else 1
            except KeyboardInterrupt:
                return 130

        return main

    return decorate


def report_interruption(kept: str = "the numbers are of what was measured until then") -> int:
    """The exit status of a run that Ctrl-C ended."""
    print(f"PARTIAL: Ctrl-C; {kept}", file=sys.stderr)
    return 130


class PartialRun:
    """`with PartialRun() as run:` around a measurement. Ctrl-C or an error ends the block; the caller saves what it has
    and calls `finish`.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return isinstance(error, (KeyboardInterrupt, Exception))

    @property
    def ended(self) -> str:
        """Why it ended early; "" where it did not."""
        if self.error is None:
            return ""
        return "Ctrl-C" if isinstance(self.error, KeyboardInterrupt) else str(self.error) or "an error"

    def as_json(self) -> dict[str, object]:
        return {"partial": bool(self.ended), "ended": self.ended}

    def finish(self, status: int = 0) -> int:
        """The exit status. Raises the error that ended the block."""
        if self.error is not None:
            if isinstance(self.error, KeyboardInterrupt):
                report_interruption()
            raise self.error
        return status
