"""Log-probabilities in the shape of each API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from thalweg.core.plan import TokenLogprob
from thalweg.text.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class CompletionLogprobs(msgspec.Struct):
    """logprobs of /v1/completions: one entry a token; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def token_name(raw: bytes) -> str:
    """A token as text. A partial character is written `bytes:\\xe4\\xb8`, so that different tokens differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _name(tokenizer: Tokenizer, token: int) -> str:
    return token_name(tokenizer.token_bytes(token))


class TokenNames(NamedTuple):
    """Writes tokens in log-probabilities. by_id: as `token_id:N`, so that all tokens differ."""

    tokenizer: Tokenizer
    by_id: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else _name(self.tokenizer, token)

    def raw(self, token: int) -> bytes:
        return self(token).encode() if self.by_id else self.tokenizer.token_bytes(token)


def _tops(entry: TokenLogprob, top: int) -> Iterable[tuple[int, float]]:
    """Ids and log-probabilities of the alternatives, best first."""
    return zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)


class CompletionLogprobsBuilder:
    """Builds the logprobs of one choice. top: number of alternatives; the token itself is always among them."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names, self._top = names, top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def feed(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], shown: Sequence[bool]
    ) -> CompletionLogprobs:
        """shown: whether a token is in the text. A logprob of None: the first token of a prompt."""
        out = CompletionLogprobs([], [], [], [])
        for token, entry, is_shown in zip(ids, logprobs, shown, strict=True):
            out.tokens.append(self._names(token))
            out.token_logprobs.append(None if entry is None else finite(entry.logprob))
            out.text_offset.append(self._offset)
            if is_shown:
                self._offset += len(self._decoder.decode(self._names.tokenizer.token_bytes(token)))
            out.top_logprobs.append(None if entry is None else self._tops(token, entry))
        return out

    def _tops(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        pairs = ((token, entry.logprob), *_tops(entry, self._top))  # vLLM's order: the token itself first
        return {self._names(i): finite(logprob) for i, logprob in pairs}


def chat_logprobs(
    names: TokenNames, ids: Sequence[int], logprobs: Sequence[TokenLogprob], top: int, has_own: bool = False
) -> ChatLogprobs:
    """has_own: the token itself is always among the alternatives, the first unless it is another."""

    def entry(token: int, logprob: float) -> tuple[str, float, list[int]]:
        return names(token), finite(logprob), list(names.raw(token))

    content = []
    for token, chosen in zip(ids, logprobs, strict=True):
        pairs = dict(_tops(chosen, top))
        if has_own and token not in pairs:
            pairs = {token: chosen.logprob} | pairs
        tops = [TopLogprob(*entry(*pair)) for pair in pairs.items()]
        content.append(ChatLogprob(*entry(token, chosen.logprob), tops))
    return ChatLogprobs(content)


def prompt_scores(prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob | None]:
    """One entry a prompt token, None for the first. All None if the request was aborted before they were computed."""
    return [None, *logprobs] if logprobs else [None] * len(prompt)


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's shape: null for the first token, then {token id: {logprob, rank, decoded_token}}, the prompt's token
    first. rank: among all tokens, from 1; null where it is not known.
    """

    def named(entry: TokenLogprob, token: int) -> dict[str, Any]:
        ranked = {i: (value, rank) for rank, (i, value) in enumerate(_tops(entry, top), 1)}
        pairs = {token: ranked.get(token, (entry.logprob, None))} | ranked
        return {
            str(i): {"logprob": finite(value), "rank": rank, "decoded_token": _name(tokenizer, i)}
            for i, (value, rank) in pairs.items()
        }

    scores = zip(prompt, prompt_scores(prompt, logprobs), strict=True)
    return [None if entry is None else named(entry, token) for token, entry in scores]


def native_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: bool
) -> list[Any]:
    """SGLang's shape: [logprob, token id, token text or null] each."""
    return [
        [None if entry is None else finite(entry.logprob), token, _name(tokenizer, token) if text else None]
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def native_tops(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], top: int, text: bool) -> list[Any]:
    """One list a token of [logprob, token id, text or null], best first; null where there is none."""
    return [
        None
        if entry is None
        else native_logprobs(tokenizer, entry.top_ids[:top], list(map(TokenLogprob, entry.top_logprobs[:top])), text)
        for entry in logprobs
    ]
