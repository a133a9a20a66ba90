"""One checkpoint's tokenizer: text ↔ token ids, special ids, and what each id is in bytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_pieces

PROBE = 1 << 16  # characters; the beginning of a text that is tokenized to judge the whole
MARGIN = 64  # tokens that the cut end of a beginning may have too many, beside an eighth


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    bos_id: None when the model has none. eos_ids: every id that ends an answer (tokenizer, config and generation config
    together, ascending). added_ids: ids of added tokens, markup mostly. special_ids: those of them that
    skip_special_tokens hides. vocab_size: largest id + 1 (the model's logits may be wider: padding). special_tokens:
    `bos_token`, `eos_token` … → text, for chat templates. Raises CheckpointError when a file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_object(folder / "tokenizer_config.json", required=False)
        self._library = _load(folder / "tokenizer.json")
        self._add_declared(config)
        self.special_tokens = _special_tokens(config)
        added = self._library.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self._texts = {i: token for token, i in vocabulary.items()}
        self._bytes = (
            byte_pieces(self._texts, {i: token.content for i, token in added.items()}) if self._is_byte_level() else {}
        )
        # a normalizer may make a text shorter: then nothing is known from its size
        self._longest = max(map(len, self._bytes.values()), default=0) if self._library.normalizer is None else 0
        declared = _bos_eos(folder)
        self.bos_id = self._id("bos_token", declared.bos)
        own_eos = self._id("eos_token", None)
        self.eos_ids = tuple(sorted({*declared.eos, *(() if own_eos is None else (own_eos,))}))
        self._adds_bos = self.bos_id is not None and self._wants_bos(config)
        ends = {*self.eos_ids, *(i for i in (self.bos_id, self._id("pad_token", None)) if i is not None)}
        self.end_ids = frozenset(ends & self.special_ids)
        self._shown = {
            hidden: {i: piece for i, piece in self._bytes.items() if i not in hidden}
            for hidden in (frozenset[int](), self.end_ids, self.special_ids)
        }

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. add_special: BOS in front where the model wants one and the text does not begin with it
        already.
        """
        # the library's batch call alone lets other threads run meanwhile; "fast" makes no offsets
        ids: list[int] = self._library.encode_batch_fast([_checked(text)], add_special_tokens=False)[0].ids
        return self._with_bos(ids) if add_special else ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text surely has more than `limit` tokens, told from its size or from the beginning of it, at most
        half: what is far too long costs no more than what is just too long. False says nothing.
        """
        if self._longest and len(text) > self._longest * limit:
            return True
        size = max(PROBE, 8 * limit)
        while 2 * size <= len(text):
            if len(self.encode(text[:size], False)) > limit + limit // 8 + MARGIN:
                return True
            size *= 2
        return False

    def encode_batch(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """`encode` of many texts, on several threads."""
        found = self._library.encode_batch([_checked(text) for text in texts], add_special_tokens=False)
        return [self._with_bos(encoding.ids) if add_special else encoding.ids for encoding in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of whole sequences; ids outside the vocabulary are nothing. Equal to what a detokenizer gives in
        pieces.
        """
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.feed(list(ids)) + detokenizer.finish()

    def detokenizer(
        self, skip_special_tokens: bool = True, *, markup: bool = False, keep: Collection[int] = ()
    ) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence.

        markup: special tokens that are neither BOS, EOS nor padding stay (what reasoning and tool parsers read), those
        are hidden. keep: further special ids that stay although they would be hidden.
        """
        hidden = self.end_ids if markup else self.special_ids if skip_special_tokens else frozenset[int]()
        wanted = hidden - frozenset(keep)
        if self._bytes:
            shown = self._shown.get(wanted) or {i: piece for i, piece in self._bytes.items() if i not in wanted}
            return ByteDetokenizer(shown)
        return WindowDetokenizer(self._decode_window, wanted, self.vocab_size)

    def token_text(self, token: int) -> str:
        """One token on its own, as text (U+FFFD for half a character); for logprobs."""
        piece = self._bytes.get(token)
        return self._decode_window([token]) if piece is None else piece.decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """One token on its own, as bytes; for logprobs."""
        piece = self._bytes.get(token)
        return self._decode_window([token]).encode() if piece is None else piece

    def token_id(self, text: str) -> int | None:
        """The id of exactly this token, or None."""
        found: int | None = self._library.token_to_id(text)
        return found

    def mark_id(self, text: str) -> int | None:
        """The id of exactly this added token, or None: markup that is one token, which ordinary text is never cut
        into.
        """
        found = self.token_id(text)
        return found if found in self.added_ids else None

    def _decode_window(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode([i for i in ids if i in self._texts], skip_special_tokens=False)
        return text

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self._adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _wants_bos(self, config: Mapping[str, Any]) -> bool:
        """add_bos_token where it is set; else whether the post-processor puts BOS before an empty text (Llama 3)."""
        flag = config.get("add_bos_token")
        return flag if isinstance(flag, bool) else self.bos_id in self._library.encode("", add_special_tokens=True).ids

    def _add_declared(self, config: Mapping[str, Any]) -> None:
        """Tokens that only tokenizer_config.json declares (transformers adds them too), lowest id first: ids are given
        in order.
        """
        declared = config.get("added_tokens_decoder") or {}
        for key in sorted(declared, key=int):
            token = declared[key]
            if self._library.token_to_id(token["content"]) is None:
                flags = {
                    k: bool(token.get(k, False)) for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
                }
                self._library.add_tokens([AddedToken(token["content"], **flags)])

    def _id(self, name: str, fallback: int | None) -> int | None:
        text = self.special_tokens.get(name)
        found = None if text is None else self._library.token_to_id(text)
        return fallback if found is None else found

    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._library.to_str()).get("decoder") or {}
        return _decoder_types(decoder) == ["ByteLevel"]


@dataclass(frozen=True)
class _Declared:
    """bos and eos ids that config.json and generation_config.json name."""

    bos: int | None
    eos: frozenset[int]


def _bos_eos(folder: Path) -> _Declared:
    bos: int | None = None
    eos: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = _read_object(folder / name, required=False)
        found = config.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id is {found!r}; expected a token id or a list of them")
        eos |= set(ids)
        bos = config["bos_token_id"] if isinstance(config.get("bos_token_id"), int) else bos
    return _Declared(bos, frozenset(eos))


def vocabulary(folder: Path) -> dict[str, int]:
    """Token → id of the tokenizer in this folder, added tokens too. Raises CheckpointError."""
    return dict(_load(folder / "tokenizer.json").get_vocab(with_added_tokens=True))


def _load(path: Path) -> Library:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing; a checkpoint needs tokenizer.json beside its weights (save_pretrained of a fast"
            " tokenizer)"
        )
    try:
        return Library.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path}: not a tokenizer ({error}); download it again") from error


def _read_object(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`…_token` entries as text; transformers writes them as strings or as {"content": …}."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if not key.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def _decoder_types(decoder: Mapping[str, Any]) -> list[str]:
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder.get("decoders", []) for kind in _decoder_types(part)]
    return [str(decoder.get("type"))]


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "prompt", f"holds half a surrogate pair at character {error.start}: not valid Unicode"
        ) from None
    return text
