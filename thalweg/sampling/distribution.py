"""Target distributions and Gumbel noise, for acceptance rules that need more than the sampled token.

Letters: N positions, E rows with equally many of them, V vocabulary, I integers of a slot.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.kernels.build_inputs.ref import TOP_K
from thalweg.kernels.temperature.ref import apply_temperature
from thalweg.sampling.random import exponential


class SamplingDistribution(Protocol):
    """The distribution from which a sampler samples, on one kind of device."""

    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        """float32 [N, V]: logits divided by each position's temperature, -inf for what its truncation removes. Those of
        greedy positions are not divided, and may be truncated. truncated: see `SamplingNeeds`.
        """

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        """float32 [N, V]: scores with the Gumbel noise of (seed, position, id). Where scores are log-probabilities, the
        largest is a sample. The rows of a seed are neighbours.
        """


class ReferenceDistribution:
    """Plain torch, on any device."""

    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        return apply_temperature(logits_NV, slots.floats_SF.index_select(0, slot_N), ints_NI[:, TOP_K], truncated)

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        noise_EV, each = exponential(seed_E, position_E, score_NV.shape[1]).log_(), len(score_NV) // len(seed_E)
        return score_NV - (noise_EV if each == 1 else noise_EV.repeat_interleave(each, 0))


REFERENCE_DISTRIBUTION = ReferenceDistribution()
