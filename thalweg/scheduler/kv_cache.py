"""Slots, pages and prefix-cache positions of requests."""

from __future__ import annotations

from typing import Sequence

from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.prompt_logprobs import PromptLogprobs
from thalweg.cache.radix import MissingPage, PrefixCursor
from thalweg.core.request import ReleaseReason, Request
from thalweg.core.ticket import Ticket, TicketState, Tier

DONE = Ticket(0, TicketState.OK)


class NoTier:
    """Null object: a tier that holds nothing."""

    def load(self, tokens: Sequence[int], salt: int, first: int, pages: Sequence[int]) -> Ticket:
        return DONE

    def store(self, tokens: Sequence[int], salt: int, pages: Sequence[int]) -> Ticket:
        return DONE


class KVCacheManager:
    """Slots and pages of one rank. A request has a cursor from `add` to `remove`, slot and pages while it runs."""

    def __init__(self, slots: int, allocator: PageAllocator, tier: Tier) -> None:
        self.allocator, self.tree, self.tier = allocator, allocator.tree, tier
        self.page_size = allocator.page_size
        self.prompt_logprobs = PromptLogprobs(self.tree)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.cursors: dict[int, PrefixCursor] = {}  # by uid
        self.to_trim: set[int] = set()  # uids of requests that have cached more than may stay when they end

    def add(self, r: Request) -> None:
        self.cursors[r.uid] = PrefixCursor(r.tokens, r.salt)

    def remove(self, r: Request) -> None:
        """Forgets an ended request. Cached pages that only a resumed request could use are evicted."""
        cursor = self.cursors.pop(r.uid)
        self.prompt_logprobs.computing.discard(r.uid)
        if r.uid in self.to_trim:
            self.to_trim.remove(r.uid)
            self.allocator.evict_tail(cursor, self.num_retained_tokens(r) // self.page_size)

    def append_tokens(self, r: Request, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to `r`."""
        r.output_ids.extend(tokens)
        self.cursors[r.uid].tokens.extend(tokens)

    def num_hit_pages(self, r: Request) -> int:
        """Cached pages that a queued request can use."""
        return self.tree.match(self.cursors[r.uid], self.max_hit_pages(r))

    def max_hit_pages(self, r: Request) -> int:
        """Limit of a hit. The last token must be computed for its logits, and so must the token before each prompt
        token whose log-probability is still wanted.
        """
        unscored = r.prompt_logprobs_start - 1 + len(r.prompt_logprobs)
        num_tokens = r.num_tokens - 1
        if unscored < len(r.prompt) - 1:
            num_tokens = min(num_tokens, unscored)
        return num_tokens // self.page_size

    def next_missing_page(self, r: Request) -> MissingPage | None:
        return self.tree.next_missing_page(self.cursors[r.uid])

    def is_computed_by_others(self, r: Request, missing_pages: set[MissingPage | None]) -> bool:
        """Whether others will compute the page that `r` needs next: `r` waits and hits it."""
        if self.num_hit_pages(r) >= self.max_hit_pages(r):
            return False
        page = self.next_missing_page(r)
        return page is not None and page in missing_pages

    def allocate(self, r: Request, num_tokens: int, reserve: int) -> Ticket | None:
        """Gives `r` a slot and pages for `num_tokens` tokens, cached ones first, and asks the tier for what is not
        cached.

        Returns None, and changes nothing, if fewer than `reserve` pages would be left for running requests.
        """
        num_hits = self.num_hit_pages(r)
        if r.params.prompt_logprobs is not None:
            num_hits = self._find_prompt_logprobs(r, r.params.prompt_logprobs)
        num_new = -(-num_tokens // self.page_size) - num_hits
        if num_new + reserve > self.allocator.num_available():
            return None
        cached = self.tree.pages(self.cursors[r.uid])
        self.allocator.acquire(cached)
        if num_new + reserve > self.allocator.num_available():  # some of the hit pages were evictable themselves
            self.allocator.release(cached)
            return None
        r.pages = cached + self.allocator.allocate(num_new)
        r.slot = self.free_slots.pop()
        r.num_computed_tokens = num_hits * self.page_size
        last = self.max_hit_pages(r)
        tokens = self.cursors[r.uid].tokens[: last * self.page_size]
        return self.tier.load(tokens, r.salt, num_hits, r.pages[num_hits:last])

    def _find_prompt_logprobs(self, r: Request, top_k: int) -> int:
        """Takes log-probabilities that are kept with cached pages. Returns the number of pages that `r` can use now."""
        if not r.prompt_logprobs:  # a preempted request has some, of which weights it does not know
            r.prompt_logprobs = self.prompt_logprobs.find(r.uid, self.cursors[r.uid], top_k)[: len(r.prompt) - 1]
        return self.num_hit_pages(r)

    def keep_prompt_logprobs(self, r: Request) -> None:
        """Keeps the log-probabilities of a prompt with its cached pages."""
        self.prompt_logprobs.keep(r.uid, self.cursors[r.uid], r.prompt_logprobs)

    def append_pages(self, r: Request, count: int) -> tuple[int, ...]:
        """Allocates `count` more pages at the end of the page table."""
        pages = self.allocator.allocate(count)
        r.pages.extend(pages)
        return tuple(pages)

    def cache_full_pages(self, r: Request, num_tokens: int) -> None:
        """Caches the full pages among the first `num_tokens` tokens, whose KV is final or launched."""
        if r.release_reason is ReleaseReason.PREEMPT or r.finish == "error":
            self.to_trim.add(r.uid)
        count = min(num_tokens, self.num_retained_tokens(r)) // self.page_size
        self.tree.insert(self.cursors[r.uid], r.pages, count)

    def num_retained_tokens(self, r: Request) -> int:
        """Leading tokens of `r` that may be cached now.

        A preempted request caches all tokens, to find them again. One with NaN keeps what it shared with others.
        """
        if r.finish == "error":
            return r.num_cached_tokens
        keeps_all = r.release_reason is ReleaseReason.PREEMPT or r.retention.keeps_thoughts
        if not keeps_all and r.retention.drops_output(r.output_ids, r.release_reason is ReleaseReason.FINISH):
            return len(r.prompt)
        return r.num_tokens

    def release_slot(self, r: Request) -> None:
        self.free_slots.append(r.slot)
        r.slot = -1

    def release_pages(self, r: Request) -> None:
        self.allocator.release(r.pages)
        r.pages = []

    def store(self, r: Request) -> Ticket:
        """Copies the full pages of a finished request to the tier; they stay in use until the ticket is done."""
        full = (r.num_tokens - 1) // self.page_size
        return self.tier.store(self.cursors[r.uid].tokens[: full * self.page_size], r.salt, r.pages[:full])
