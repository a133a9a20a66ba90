"""Log-probabilities in the shapes that the APIs give them."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from thalweg.core.plan import TokenLogprob
from thalweg.server.openai_responses import ChatLogprob, ChatLogprobs, LegacyLogprobs, PromptLogprobs, TopLogprob
from thalweg.text.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def show(raw: bytes) -> str:
    """A token as text; half a character is written `bytes:\\xe4\\xb8`, so that different tokens keep different
    names.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class LegacyLog:
    """logprobs of one choice of /v1/completions, piece by piece. top: alternatives wanted; 0 gives no
    `top_logprobs`.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def feed(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], hidden: Collection[int]
    ) -> LegacyLogprobs:
        """hidden: ids that are not in the text. None as a logprob: the first token of a prompt, which nothing
        precedes.
        """
        out = LegacyLogprobs([], [], [] if self._top else None, [])
        for token, entry in zip(ids, logprobs, strict=True):
            raw = self._tokenizer.token_bytes(token)
            out.tokens.append(show(raw))
            out.token_logprobs.append(None if entry is None else finite(entry.logprob))
            out.text_offset.append(self._offset)
            if token not in hidden:
                self._offset += len(self._decoder.decode(raw))
            if out.top_logprobs is not None:
                out.top_logprobs.append(None if entry is None else self._tops(raw, entry))
        return out

    def _tops(self, raw: bytes, entry: TokenLogprob) -> dict[str, float]:
        pairs = zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True)
        tops = {show(self._tokenizer.token_bytes(token)): finite(logprob) for token, logprob in pairs}
        tops.setdefault(show(raw), finite(entry.logprob))
        return tops


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob], top: int) -> ChatLogprobs:
    content = []
    for token, entry in zip(ids, logprobs, strict=True):
        raw = tokenizer.token_bytes(token)
        tops = []
        for other, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True):
            name = tokenizer.token_bytes(other)
            tops.append(TopLogprob(show(name), finite(logprob), list(name)))
        content.append(ChatLogprob(show(raw), finite(entry.logprob), list(raw), tops))
    return ChatLogprobs(content)


def scores_of(prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob | None]:
    """One entry a prompt token; nothing precedes the first. All None where the request was aborted before its prompt
    was scored.
    """
    return [None, *logprobs] if logprobs else [None] * len(prompt)


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], top: int
) -> PromptLogprobs:
    """vLLM's shape: null for the first token, then {token id: {logprob, decoded_token}}, the prompt's own token
    first.
    """
    out: PromptLogprobs = []
    for token, entry in zip(prompt, scores_of(prompt, logprobs), strict=True):
        if entry is None:
            out.append(None)
            continue
        ids = (token, *entry.top_ids[:top])
        values = (entry.logprob, *entry.top_logprobs[:top])
        out.append({str(i): _named(tokenizer, i, v) for i, v in zip(ids, values, strict=True)})
    return out


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {"logprob": finite(logprob), "decoded_token": show(tokenizer.token_bytes(token))}


def native_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: bool
) -> list[Any]:
    """SGLang's shape: [logprob, token id, token text or null] each."""
    return [
        [None if entry is None else finite(entry.logprob), token, show(tokenizer.token_bytes(token)) if text else None]
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def native_tops(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], top: int, text: bool) -> list[Any]:
    """One list a token of [logprob, token id, text or null], best first; null where there is none."""
    out: list[Any] = []
    for entry in logprobs:
        if entry is None:
            out.append(None)
            continue
        pairs = [TokenLogprob(value) for value in entry.top_logprobs[:top]]
        out.append(native_logprobs(tokenizer, entry.top_ids[:top], pairs, text))
    return out
