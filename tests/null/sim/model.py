"""The model: the KV of a position is a hash of its salt and prefix, and the next token a function of that hash."""

from __future__ import annotations

import itertools
from typing import Sequence

from thalweg.core.plan import TokenLogprob

EOS, VOCAB = 0, 23


def chain(salt: int, tokens: Sequence[int]) -> list[int]:
    """KV of each position."""
    return list(itertools.accumulate(tokens, lambda h, t: hash((h, t)), initial=salt * 7919 + 1))[1:]


def sample(h: int, seed: int, last: int | None, banned: Sequence[int]) -> int:
    """The token after hash `h`. last: under a grammar the token's parity must differ from the last one's, EOS
    excepted.
    """
    drawn = (hash((h, seed)) >> 7) % VOCAB
    for token in (*range(drawn, VOCAB), *range(drawn)):
        if token not in banned and (last is None or token == EOS or (token + last) % 2):
            return token
    raise AssertionError("every token is banned")


def logprob(h: int, token: int, top: int) -> TokenLogprob:
    ids = tuple((h + i) % VOCAB for i in range(top))
    return TokenLogprob(-(hash((h, token)) % 997) / 100, ids, tuple(-(hash((h, i)) % 997) / 100 for i in ids))
