"""What all commands share: flags, exit statuses, and runs that end early."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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


def whole(text: str) -> int:
    """An argparse type: a whole number from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """An argparse type: a whole number from 1 on."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


class Flags:
    """Adds flags to a parser, or to a titled group of it. The default's type is the flag's: False is a switch, a list
    takes several values.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str = "") -> None:
        self.group = parser.add_argument_group(title) if title else parser

    def add(self, names: str, default: Any, text: str, **options: Any) -> None:
        """names: the flag and its aliases, with spaces between them."""
        several = isinstance(default, list)
        example = default[0] if several and default else default
        if default is False:
            options["action"] = "store_true"
        elif example is not None:
            kind = whole if isinstance(example, int) else type(example)
            options = {"type": kind, **({"nargs": "+"} if several else {}), **options}
            if "choices" not in options:
                options.setdefault("metavar", {whole: "N", float: "X"}.get(options["type"]))
        if default or default == 0 and default is not False:
            text += f" (default: {' '.join(map(str, default)) if several else default})"
        self.group.add_argument(*names.split(), default=default, help=text.replace("%", "%%"), **options)

    def count(self, names: str, default: Any, text: str, **options: Any) -> None:
        """A whole number from 1 on."""
        self.add(names, default, text, **{"type": positive, "metavar": "N", **options})

    def output(self) -> None:
        text = "write the result: .jsonl gets one more line, another name is written anew"
        self.add("--output-file --result-filename", "", text, metavar="FILE")


def exit_status(command: str, run: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command. 2: wrong flags or settings; 1: another error, which is printed; 130: Ctrl-C."""
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except ThalwegError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnsupportedConfig) else 1
    except KeyboardInterrupt:
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
        if isinstance(self.error, KeyboardInterrupt):
            print("PARTIAL: Ctrl-C; the numbers are of what was measured until then", file=sys.stderr)
            return 130
        if self.error is not None:
            raise self.error
        return status
