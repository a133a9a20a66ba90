"""The brain's counters; they never fall."""

from __future__ import annotations

from dataclasses import dataclass, field

from thalweg.core.acceptance import AcceptanceCounter
from thalweg.core.messages import Stats


@dataclass(slots=True)
class Tally:
    """prefill_tokens: computed in chunks, recomputed ones too. decode_tokens: sampled and committed. prompt_tokens:
    admitted for the first time; cached_tokens: of these, found in a cache. finished, aborted, preemptions: requests.
    drafts: of all requests; wasted: drafts that were never verified. broken: requests for which the model computed no
    numbers. widths: steps that sampled, by the draft width agreed in them. drafter_failures: drafters that were
    switched off.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    broken: int = 0
    drafts: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    wasted: int = 0
    widths: list[int] = field(default_factory=list)
    drafter_failures: int = 0

    def chose(self, width: int) -> None:
        """A step that sampled was told to make so many drafts of each sequence."""
        while len(self.widths) <= width:
            self.widths.append(0)
        self.widths[width] += 1

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
            broken=self.broken,
            step_seconds=step_seconds,
            verifications=self.drafts.verifications,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
            drafted_at=self.drafts.drafted_at,
            accepted_at=self.drafts.accepted_at,
            wasted_drafts=self.wasted,
            steps_by_width=tuple(self.widths),
            drafter_failures=self.drafter_failures,
        )
