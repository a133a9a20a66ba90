"""What all commands share: flags, exit statuses, and runs that end early."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from thalweg.config.setting import nearest
from thalweg.core.errors import ThalwegError, UnsupportedConfig

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


def _number(least: int, text: str) -> int:
    """An argparse type: a whole number from `least` on."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


KINDS: dict[str, Any] = {
    "whole": partial(_number, 0), "count": partial(_number, 1), "number": float, "seconds": float,
    "text": str, "name": str, "url": str, "file": str, "folder": str, "path": Path,
}  # fmt: skip
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
            options["metavar"] = {"whole": "N", "count": "N", "number": "X"}.get(kind, kind.upper())
        read = options.get("type", str)
        if several:
            options |= {"nargs": "+", "default": [read(word) for word in default.split()]}
        else:
            options["default"] = read(default) if default or read is str else None
        group.add_argument(*names.split(), help=text, **options)


def exit_status(command: str, run: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command. 2: wrong flags or settings; 1: another error, which is printed; 130: Ctrl-C."""
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except ThalwegError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnsupportedConfig) else 1
    except KeyboardInterrupt:
        return 130


def command(name: str) -> Callable[[Callable[[list[str]], int]], Callable[[Sequence[str] | None], int]]:
    """Makes a function of the words after a command's name its `main`, with the exit statuses of `exit_status`."""

    def decorate(run: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
        def main(argv: Sequence[str] | None = None) -> int:
            return exit_status(name, run, argv)

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
