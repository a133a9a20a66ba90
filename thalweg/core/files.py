"""Reads files of checkpoints and weight updates, which may be anything: a FIFO, a device, nonsense.

Every function raises FileNotFoundError for a missing file and CheckpointError, which names the file, for another that
it cannot read.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from thalweg.core.errors import CheckpointError

MAX_BYTES = 256 << 20  # the largest tokenizer.json and index that are published have 40 MB
MAX_DIGITS = 400  # of an integer; a longer one reads as infinity, so that the check of its field refuses it


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file, links followed. Nothing is opened: opening a FIFO waits for a writer."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a loop of links, a name too long, a NUL in it
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_text(path: Path) -> str:
    """The content of a UTF-8 file."""
    size = check_regular(path)
    if size > MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; at most {MAX_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}): download it again") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, without lone surrogates. NaN and infinite numbers are left to the checks of their
    fields.
    """
    try:
        value = json.loads(read_text(path), parse_int=_number)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _number(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)
