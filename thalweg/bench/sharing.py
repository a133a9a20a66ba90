"""What of a load's prompts a prefix cache could have had at best: what the load offers, beside what the server made of
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.bench.datasets import Prompt

PAGE = 64  # tokens: Thalweg's page; servers with smaller ones can find a little more


def possible_hits(prompts: Sequence[Prompt]) -> float | None:
    """Share of all prompt tokens, with a cache that never evicts and has every earlier prompt (and, for a later turn,
    the answers before it) in pages of PAGE tokens. prompts: as they were sent, in that order. None where token ids are
    not known: texts, chats, an API without ids.
    """
    seen: set[int] = set()
    found = total = 0
    for prompt in prompts:
        if not prompt.ids or any(not turn.ids or not answer.ids for turn, answer in prompt.history):
            return None
        before = [token for turn, answer in prompt.history for token in (*turn.ids, *answer.ids)]
        seen.update(_chain(before))
        pages = _chain([*before, *prompt.ids][:-1])  # one token is always left to compute
        known = next((place for place, page in enumerate(pages) if page not in seen), len(pages))
        seen.update(_chain([*before, *prompt.ids]))
        found, total = found + known * PAGE, total + len(before) + len(prompt.ids)
    return found / total if total else None


def _chain(ids: Sequence[int]) -> list[int]:
    """A hash for each full page that stands for all tokens up to its end."""
    found, last = list[int](), 0
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        last = hash((last, *ids[start : start + PAGE]))
        found.append(last)
    return found
