"""A checkpoint's tokenizer: text ↔ token ids, special ids, and each id in bytes."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Library

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.files import read_object, read_text
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.text import tiktoken
from thalweg.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_pieces
from thalweg.text.tokenizer_check import check_speed

FILE = "tokenizer.json"
MAX_VOCAB = 1 << 24
PROBE = 1 << 16  # characters; the beginning of a text that is tokenized to judge the whole
MARGIN = 64  # tokens that the cut end of a beginning may have too many, beside an eighth
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


class Tokenizer:
    """The tokenizer of a checkpoint folder. Raises CheckpointError when a file is missing or broken."""

    bos_id: int | None  # None when the model has none
    eos_ids: tuple[int, ...]  # ids that end an answer: of tokenizer, config and generation config, ascending
    added_ids: frozenset[int]  # added tokens, mostly markup
    special_ids: frozenset[int]  # those that skip_special_tokens hides
    vocab_size: int  # largest id + 1; the model's logits may be padded beyond it
    special_tokens: dict[str, str]  # `bos_token`, `eos_token` … → text, for chat templates

    def __init__(self, folder: Path) -> None:
        config = read_json_object(folder / "tokenizer_config.json")
        self._library = _load(folder)
        check_speed(lambda text: _encode(self._library, text), self._library, folder / FILE)
        self.special_tokens = _special_tokens(config)
        added = self._library.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size > MAX_VOCAB:
            raise CheckpointError(f"{folder / FILE}: its largest id is {self.vocab_size - 1}; at most {MAX_VOCAB - 1}")
        self._texts = {i: token for token, i in vocabulary.items()}
        is_byte_level = isinstance(self._library.decoder, decoders.ByteLevel)
        self._bytes = byte_pieces(self._texts, {i: t.content for i, t in added.items()}) if is_byte_level else {}
        # a normalizer may shorten a text: then its size says nothing about its tokens
        self._longest = max(map(len, self._bytes.values()), default=0) if self._library.normalizer is None else 0
        bos_id, eos_ids = _declared_ids(folder)
        marks = (self.special_tokens.get(name) for name in ("bos_token", "eos_token"))
        bos_token, eos_token = (None if text is None else self.token_id(text) for text in marks)
        self.bos_id = bos_id if bos_token is None else bos_token
        self.eos_ids = tuple(sorted(eos_ids if eos_token is None else eos_ids | {eos_token}))
        self._adds_bos = self.bos_id is not None and self._wants_bos(config)
        self._visible_bytes = {i: piece for i, piece in self._bytes.items() if i not in self.special_ids}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. add_special: with BOS, if the model wants one and the text does not begin with it."""
        check_unicode(text, "prompt")
        ids = _encode(self._library, text)
        if add_special and self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text surely has more than `limit` tokens, by its size or by at most half of it. False says
        nothing.
        """
        if self._longest and len(text) > self._longest * limit:
            return True
        size = max(PROBE, 8 * limit)
        while 2 * size <= len(text):
            if len(self.encode(text[:size], False)) > limit + limit // 8 + MARGIN:
                return True
            size *= 2
        return False

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of whole sequences, equal to a detokenizer's. Ids outside the vocabulary have no text."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.feed(list(ids)) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        if self._bytes:
            return ByteDetokenizer(self._visible_bytes if skip_special_tokens else self._bytes)
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return WindowDetokenizer(self._decode_window, hidden, self.vocab_size)

    def token_bytes(self, token: int) -> bytes:
        """One token on its own."""
        piece = self._bytes.get(token)
        return self._decode_window([token]).encode() if piece is None else piece

    def token_id(self, text: str) -> int | None:
        """The id of exactly this token, or None."""
        id: int | None = self._library.token_to_id(text)
        return id

    def mark_id(self, text: str) -> int | None:
        """The id of exactly this added token, or None. Ordinary text is never tokenized into added tokens."""
        id = self.token_id(text)
        return id if id in self.added_ids else None

    def _decode_window(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode([i for i in ids if i in self._texts], skip_special_tokens=False)
        return text

    def _wants_bos(self, config: Mapping[str, Any]) -> bool:
        """add_bos_token where it is set; else whether the post-processor puts BOS before an empty text (Llama 3)."""
        flag = config.get("add_bos_token")
        return flag if isinstance(flag, bool) else self.bos_id in self._library.encode("", add_special_tokens=True).ids


def _encode(library: Library, text: str) -> list[int]:
    """Token ids, without special tokens. Raises InvalidRequest where the library fails."""
    try:
        # only the library's batch call lets other threads run meanwhile; "fast" makes no offsets
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        # a panic, which is no Exception: a regular expression has tried too often to match
        raise InvalidRequest("prompt", f"fails in the tokenizer: {error}") from None
    return ids


def _declared_ids(folder: Path) -> tuple[int | None, set[int]]:
    """The bos id and the eos ids that config.json and generation_config.json name."""
    bos_id: int | None = None
    eos_ids: set[int] = set()
    size = read_json_object(folder / "config.json").get("vocab_size")
    vocab = size if type(size) is int else MAX_VOCAB
    for name in ("config.json", "generation_config.json"):
        config = read_json_object(folder / name)
        lists: dict[str, list[int]] = {}
        for field in ("bos_token_id", "eos_token_id"):
            value = config.get(field)
            lists[field] = ids = value if isinstance(value, list) else [] if value is None else [value]
            if len(ids) > MAX_EOS_IDS or not all(type(id) is int and 0 <= id < vocab for id in ids):
                rule = f"must be a token id below {vocab}, or a list of at most {MAX_EOS_IDS}"
                raise CheckpointError(f"{folder / name}: {field} {rule}; it is {reprlib.repr(value)}")
        eos_ids |= set(lists["eos_token_id"])
        bos_id = next(iter(lists["bos_token_id"]), bos_id)
    return bos_id, eos_ids


def vocabulary(folder: Path) -> dict[str, int]:
    """Token → id of the tokenizer in this folder, added tokens too. Raises CheckpointError."""
    return dict(_load(folder).get_vocab(with_added_tokens=True))


def has_tokenizer(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (FILE, tiktoken.FILE))


def _load(folder: Path) -> Library:
    """The library's tokenizer, with the tokens that only tokenizer_config.json declares, as transformers adds them."""
    path, declared = folder / FILE, _declared_tokens(folder)
    if not os.path.lexists(path) and (folder / tiktoken.FILE).is_file():
        return tiktoken.load(folder / tiktoken.FILE, declared)
    try:
        library = Library.from_str(read_text(path))
    except FileNotFoundError:
        message = "missing; a checkpoint needs tokenizer.json beside its weights (save_pretrained of a fast tokenizer)"
        raise CheckpointError(f"{path}: {message}") from None
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path}: not a tokenizer ({error}); download it again") from error
    library.no_padding()  # a saved setting of training would pad prompts, or cut them
    library.no_truncation()
    library.add_tokens([token for token in declared.values() if library.token_to_id(token.content) is None])
    return library


def _declared_tokens(folder: Path) -> dict[int, AddedToken]:
    """The added tokens of tokenizer_config.json by their ids, ascending."""
    path = folder / "tokenizer_config.json"
    declared = read_json_object(path).get("added_tokens_decoder") or {}
    try:
        return {
            int(key): AddedToken(declared[key]["content"], **{name: bool(declared[key].get(name)) for name in _FLAGS})
            for key in sorted(declared, key=int)
        }
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        raise CheckpointError(f"{path}: added_tokens_decoder must map token ids to objects with content") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """{} for a file that does not exist. Raises CheckpointError for a broken one."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`…_token` entries as text; transformers writes them as strings or as {"content": …}."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def check_unicode(text: str, field: str) -> str:
    """Refuses lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"contains a lone surrogate at character {error.start}: not valid Unicode"
        raise InvalidRequest(field, message) from None
    return text
