"""A command line whose errors are a line or two: what is wrong, and which flag may have been meant."""

from __future__ import annotations

import argparse
from typing import NoReturn

from thalweg.config.setting import nearest

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
