"""Tries a tokenizer at the start: its regular expressions come with the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from random import Random

from tokenizers import Tokenizer as Library

from thalweg.core.errors import CheckpointError, InvalidRequest

TRIAL, TRIAL_SECONDS = 48, 10  # characters of a text, and seconds for some hundred of them
MAX_PATTERN = 1 << 16  # characters of the written tokenizer that are read


def check_speed(encode: Callable[[str], object], library: Library, path: Path) -> None:
    """Raises CheckpointError for a tokenizer that fails on short texts, or is slow.

    A regular expression such as `(a+)+$` takes 2^n steps for n characters, and nothing could interrupt it in a request.
    encode: raises InvalidRequest where the library fails.
    """
    written = f"{library.pre_tokenizer!r}{library.normalizer!r}"[:MAX_PATTERN]
    random, characters = Random(0), sorted({*" aA0\n'-é漢", *written})[:256]
    ends = "", "!", "a", "\n", "!" + "".join(characters)  # the last has what a pattern may look for first
    texts = [character * TRIAL + end for character in characters for end in ends]
    texts += ["".join(random.choices(characters, k=TRIAL)) for _ in characters]
    outcome: Queue[str] = Queue()

    def encode_all() -> None:
        for text in texts:
            try:
                encode(text)
            except InvalidRequest as error:
                return outcome.put(error.message)
        outcome.put("")

    threading.Thread(target=encode_all, daemon=True).start()  # left behind if it hangs
    try:
        error = outcome.get(timeout=TRIAL_SECONDS)
    except Empty:
        error = f"takes more than {TRIAL_SECONDS} s"
    if error:
        raise CheckpointError(f"{path}: pre_tokenizer or normalizer: on texts of {TRIAL} characters it {error}")
