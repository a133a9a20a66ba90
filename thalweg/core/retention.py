"""Cache retention policy: which tokens of a finished sequence may stay in the prefix cache.

The next turn of a conversation hits only the tokens that its chat template renders again.
"""

from __future__ import annotations

from typing import Sequence

import msgspec


class CacheRetention(msgspec.Struct, frozen=True):
    """Retention policy of one sequence."""

    # True: the whole sequence stays. False: the next turn's prompt leaves out the thought and every token after it, so
    # only the prompt stays.
    keeps_thoughts: bool = True
    # Token that starts a thought, or -1. An output that does not begin with it has no thought and stays.
    think_start_id: int = -1
    # Token that starts a tool call, or -1. An output with it stays: the template renders the thought again in front of
    # the tool results.
    tool_call_id: int = -1

    def drops_output(self, out: Sequence[int], ended: bool) -> bool:
        """Whether the next turn cannot reuse the output. `ended`: `out` is complete, so it contains its tool calls."""
        if self.keeps_thoughts or not out:
            return False
        if self.think_start_id >= 0 and out[0] != self.think_start_id:
            return False
        return not (ended and self.tool_call_id in out)


RETAIN_ALL = CacheRetention()
