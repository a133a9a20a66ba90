"""Vocabularies of tiktoken against the library itself."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken as library

from thalweg.core.errors import CheckpointError
from thalweg.text import tiktoken
from thalweg.text.tokenizer import Tokenizer, has_tokenizer

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
TEXTS = [
    "Hello, World! It's 12345 o'clock; WE'LL see.",
    "日本語と中文混排 text，漢字A漢字b 12345678",
    "  spaces\n\n\tand\r\n lines   \n",
    "def f(x):\n    return {'a': x ** 2}  # Kommentar: Größe, naïve, ŒUVRE",
    "emoji 😀👩‍💻 and \u0301 accents, ÇA VA? ¿Qué? İstanbul ǅ",
    "",
]


def ranks() -> dict[bytes, int]:
    """The merges of the bundled tokenizer in their order, behind the 256 bytes."""
    model = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    characters = {character: byte for byte, character in enumerate(tiktoken.BYTE_CHARACTERS)}
    found = {bytes([byte]): byte for byte in range(256)}
    for merge in model["merges"]:
        token = bytes(characters[c] for c in ("".join(merge) if isinstance(merge, list) else merge.replace(" ", "")))
        found.setdefault(token, len(found))
    return found


def written(folder: Path, **config: Any) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
    (folder / tiktoken.FILE).write_bytes(b"".join(lines))
    first = len(ranks())
    declared = {"0": "[BOS]", "3": "<|im_end|>", "5": "<|tool_call_begin|>"}
    tokens = {str(first + int(at)): {"content": text, "special": True} for at, text in declared.items()}
    settings = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "added_tokens_decoder": tokens} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_ids_and_texts_are_those_of_the_library(tmp_path: Path) -> None:
    ours, first = Tokenizer(written(tmp_path)), len(ranks())
    theirs = library.Encoding("kimi", pat_str=tiktoken.KIMI_PATTERN, mergeable_ranks=ranks(), special_tokens={})
    rng = random.Random(1)
    drawn = ["".join(rng.choice("aB é漢字1 \n'stT.,-😀") for _ in range(rng.randrange(60))) for _ in range(300)]
    for text in (*TEXTS, *drawn):
        ids = ours.encode(text, False)
        assert ids == theirs.encode_ordinary(text), text
        assert ours.decode(ids) == text
    assert ours.vocab_size == first + tiktoken.NUM_RESERVED
    assert ours.mark_id("<|tool_call_begin|>") == first + 5 and ours.mark_id("<|reserved_token_%d|>" % (first + 1))
    assert (ours.bos_id, ours.eos_ids) == (first, (first + 3,))
    assert ours.encode("<|im_end|>", False) == [first + 3]
    assert has_tokenizer(tmp_path) and not has_tokenizer(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"YQ== 0\n", b"no base64! 0\n", b"YQ==\n", b"\xff\n"])
def test_a_broken_vocabulary_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / tiktoken.FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="tiktoken.model.*(not a vocabulary of tiktoken|not UTF-8)"):
        Tokenizer(tmp_path)
