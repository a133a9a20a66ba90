"""What became of drafts: counted for each request and for all, and told to the width policy once a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from thalweg.core.plan import Output, Row
from thalweg.core.request import Request
from thalweg.core.tree import tree_depth
from thalweg.scheduler.tally import Tally
from thalweg.scheduler.widths import Verdict

SHAPES = 4096  # trees whose depth is remembered: those that are drafted again and again


class Verdicts:
    """Of the drafts that are in flight, and of those that came back since they were last told."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._depth = lru_cache(SHAPES)(tree_depth)
        self._heard: list[Verdict] = []

    def made(self, emitted: Sequence[Request], width: int) -> None:
        """The last step that these sampled in was told to make so many drafts of each."""
        for r in emitted:
            r.made = width

    def hear(self, r: Request, row: Row, output: Output) -> None:
        """The drafts that its last sampling step left. Of a sequence that ended among them, those behind say nothing
        about their quality.
        """
        accepted, made, r.drafts = len(output.tokens) - 1, len(r.drafts), ()
        if made:  # a row that may have had drafts had some
            deepest = self._depth(r.parents) if r.parents else made
            self.tally.drafts.add(made, deepest, accepted)
            r.acceptance.add(made, deepest, accepted)
        if not output.done:
            self._heard.append(Verdict(r, row.num_drafts, output.accepted_mask))

    def told(self) -> list[Verdict]:
        """What was heard since the last call."""
        heard, self._heard = self._heard, []
        return heard
