"""What tokens are drawn from, and the race that draws them, for rules of acceptance that need more of them than the
token.

Letters: N positions, E rows with equally many of them, V vocabulary, I integers of a slot.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.kernels.temperature.ref import apply_temperature
from thalweg.sampling.random import exponential


class SamplingDistribution(Protocol):
    """On one kind of device."""

    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        """float32 [N, V]: logits by the temperature of each position, -inf for what its truncation removes; a greedy
        one's by no temperature, and truncated or not. truncated: see `Needs`.
        """

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        """float32 [N, V]: scores less the logarithms of the coins of (seed, position, id): with log-probabilities as
        scores the largest is a sample. The rows of each seed stand behind each other.
        """


class ReferenceDistribution:
    """Plain torch, on any device."""

    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        return apply_temperature(logits_NV, slots.floats_SF.index_select(0, slot_N), ints_NI[:, 6], truncated)

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        coins_EV, each = exponential(seed_E, position_E, score_NV.shape[1]).log_(), len(score_NV) // len(seed_E)
        return score_NV - (coins_EV if each == 1 else coins_EV.repeat_interleave(each, 0))


REFERENCE_DISTRIBUTION = ReferenceDistribution()
