"""Vocabularies of tiktoken, as Kimi-K2 publishes one.

`tiktoken.model` has a line for each token: base64 of its bytes, and its rank. Such a checkpoint has no tokenizer.json,
and its pattern is in Python code, which is never run.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from thalweg.core.errors import CheckpointError
from thalweg.core.files import read_text
from thalweg.text.detokenize import BYTE_CHARACTERS

FILE = "tiktoken.model"
NUM_RESERVED = 256  # ids behind the ranks, for special tokens
_HAN = "&&[^\\p{Han}]"
_UPPER, _LOWER = f"[\\p{{Lu}}\\p{{Lt}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_HAN}]", f"[\\p{{Ll}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_HAN}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(  # tokenization_kimi.py of moonshotai/Kimi-K2-Instruct
    (
        "[\\p{Han}]+",
        f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        "\\p{N}{1,3}",
        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
        "\\s*[\\r\\n]+",
        "\\s+(?!\\S)",
        "\\s+",
    )
)


def load(path: Path, declared: Mapping[int, AddedToken]) -> Library:
    """The tokenizer of such a file with these special tokens, by id; the other reserved ids have names of their own.
    Raises CheckpointError.
    """
    try:
        entries = (line.split() for line in read_text(path).splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in entries}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a vocabulary of tiktoken ({error}); download it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path}: not a vocabulary of tiktoken: ranks or bytes are missing; download it again")
    written = {token: "".join(BYTE_CHARACTERS[byte] for byte in token) for token in ranks}
    merges = [parts for token in sorted(ranks, key=ranks.__getitem__) if (parts := _parts(token, ranks))]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    library = Library(models.BPE(vocabulary, [(written[a], written[b]) for a, b in merges], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    reserved = {id: f"<|reserved_token_{id}|>" for id in range(len(ranks), len(ranks) + NUM_RESERVED)}
    library.add_tokens(
        [declared.get(id) or AddedToken(name, special=True, normalized=False) for id, name in reserved.items()]
    )
    return library


def _parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that were merged into this one: its bytes, merged by all lower ranks."""
    parts, rank = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        best, at = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)))
        if best >= rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
