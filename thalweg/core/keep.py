"""What of a sequence may stay in the prefix cache after it has ended: the tokens that the next turn of its conversation renders again."""

from __future__ import annotations

from typing import Sequence

import msgspec


class Keep(msgspec.Struct, frozen=True):
    """thoughts: the whole sequence stays. Without it the next turn's prompt leaves the thought out, and with it whatever comes after:
    only the prompt stays.

    opens: token id, or -1. Then the prompt has not opened the thought: an output that does not begin with this token has none, and stays.
    calls: token id, or -1. An output that holds this token stays: the results of the tools that it calls come next, and behind them
    the template renders the thought again.
    """

    thoughts: bool = True
    opens: int = -1
    calls: int = -1

    def drops(self, out: Sequence[int], ended: bool) -> bool:
        """Whether the output is of no use to the next turn, as far as is known. ended: `out` is all of it, so a call would stand in it."""
        if self.thoughts or not out:
            return False
        if self.opens >= 0 and out[0] != self.opens:
            return False
        return not (ended and self.calls in out)


WHOLE = Keep()
