"""The brain's counters; they never fall."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.core.messages import Stats


@dataclass(slots=True)
class Tally:
    """prefill_tokens: computed in chunks, recomputed ones too. decode_tokens: sampled and committed. prompt_tokens: admitted for the first
    time; cached_tokens: of these, found in a cache. finished, aborted, preemptions: requests. verifications: rows with drafts; drafted:
    tokens of these; accepted: of these. drafter_failures: drafters that were switched off."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter_failures: int = 0

    def verified(self, drafts: int, accepted: int) -> None:
        """A row with `drafts` of them came back."""
        self.verifications += drafts > 0
        self.drafted += drafts
        self.accepted += accepted

    def stats(
        self,
        running: int,
        waiting: int,
        pages: int,
        pages_used: int,
        pages_cached: int,
        steps: int,
        step_seconds: float,
    ) -> Stats:
        return Stats(
            running=running,
            waiting=waiting,
            pages=pages,
            pages_used=pages_used,
            pages_cached=pages_cached,
            steps=steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            finished=self.finished,
            aborted=self.aborted,
            step_seconds=step_seconds,
            verifications=self.verifications,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            drafter_failures=self.drafter_failures,
        )
