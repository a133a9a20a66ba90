"""The parsers of answers and the prompt encoders; an input is bytes, see `tools.fuzz_checks`."""

from __future__ import annotations

import random
from typing import Any

from tools import fuzz_checks
from tools.fuzz.mutate import mutate_bytes
from tools.fuzz.target import Target


class Parsers(Target):
    packages = ("text",)

    def run(self, entry: Any) -> str:
        data = entry.encode("latin-1")
        check = fuzz_checks.check_prompt if data[:1] and data[0] % 4 == 3 else fuzz_checks.check_answer
        check(data[1:])
        return check.__name__

    def mutate(self, entry: Any, draw: random.Random, donor: Any) -> Any:
        if draw.random() < 0.1:
            return draw.randbytes(draw.randrange(8, 80)).decode("latin-1")
        if draw.random() < 0.2:
            return entry[: draw.randrange(len(entry) + 1)] + donor[draw.randrange(len(donor) + 1) :][:80]
        return mutate_bytes(entry, draw)[:160]
