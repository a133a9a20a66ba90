"""A command line whose errors are a line or two: what is wrong, and which flag may have been meant; and the status that
a command ends with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from thalweg.bench.errors import DatasetError, ResultError
from thalweg.config.setting import nearest
from thalweg.core.errors import ThalwegError, UnsupportedConfig

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """argparse that does not print all flags in front of what is wrong with one of them."""

    def error(self, message: str) -> NoReturn:
        """Leaves the process with status 2."""
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0]
            guess = nearest(word.partition("=")[0], self._option_string_actions)
            message = f"unknown flag {word}" + (f"; did you mean {guess}?" if guess else "")
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` tells all flags\n")


def status(command: str, run: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """The status of `run`, or 2 where it was asked for wrongly, 1 for another error, which is said, and 130 for
    Ctrl-C.
    """
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except (ThalwegError, DatasetError, ResultError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnsupportedConfig) else 1
    except KeyboardInterrupt:
        return 130


def unless(ended: object, otherwise: int, kept: str = "what was measured until then is above") -> int:
    """130, and a line that says so, if Ctrl-C has ended it early. kept: what there is all the same."""
    if not ended:
        return otherwise
    print(f"PARTIAL: Ctrl-C; {kept}", file=sys.stderr)
    return 130
