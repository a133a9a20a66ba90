"""Bugs that are planted in one rank of a group. Each returns the function that removes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.attention import context_shard, exchange
from thalweg.attention.context_shard import ContextShard
from thalweg.core.agreement import AgreedStep, coordinate_step
from thalweg.engine import coordination
from thalweg.engine.follower import Follower, SampleStep
from thalweg.layers.residual import ShardedStream
from thalweg.parallel.process_axis import ProcessAxis
from thalweg.runner.drafting import Drafting
from thalweg.runner.publication import Publication, SampledStep
from thalweg.sampling.sharded import ShardedSampler

LOST_AT = 3000  # steps


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def stream_not_summed() -> Callable[[], None]:
    """The last rank keeps its own part of a sum."""

    def add_own_part(self: ProcessAxis, x: Tensor, partial: Tensor) -> None:
        x.add_(self.all_gather(partial)[self.rank].float() * self.size)

    return _replaced(ProcessAxis, "add_", add_own_part)


def masks_lost() -> Callable[[], None]:
    """The follower samples without the grammar's masks, so its slots hold other tokens than the leader's."""
    carry_out = Follower._carry_out

    def without_masks(self: Follower, message: Any) -> bool:
        if isinstance(message, SampleStep):
            message = SampleStep(message.num_drafts)
        return carry_out(self, message)

    return _replaced(Follower, "_carry_out", without_masks)


def own_step() -> Callable[[], None]:
    """The rank runs its own plan's sizes, not the agreed ones."""

    def own(rank_steps: Any) -> AgreedStep:
        agreed = coordinate_step(rank_steps)
        return agreed._replace(tokens=max(rank_steps[-1].tokens, 1)) if len(rank_steps) > 1 else agreed

    return _replaced(coordination, "coordinate_step", own)


def residual_twice() -> Callable[[], None]:
    value = ShardedStream.value

    def twice(self: ShardedStream) -> Tensor:
        if self.pending_TH is not None:
            self.pending_TH = self.pending_TH + self.x_TH / 50
        return value(self)

    return _replaced(ShardedStream, "value", twice)


def own_vocabulary() -> Callable[[], None]:
    """A captured step samples from the logits of its own rank."""

    sharded = ShardedSampler.sample_into_slots

    def sample_own(self: ShardedSampler, *args: Any) -> Any:
        return self.sampler.sample_into_slots(*args) if len(args) == 6 else sharded(self, *args)

    return _replaced(ShardedSampler, "sample_into_slots", sample_own)


def drafter_lost() -> Callable[[], None]:
    """No bug: its drafts are no numbers, from some step on."""
    rank_step, count = Drafting.rank_step, itertools.count(1)

    def until(self: Drafting, *args: Any) -> Any:
        if next(count) == LOST_AT:
            self.reject_output()
        return rank_step(self, *args)

    return _replaced(Drafting, "rank_step", until)


def not_published() -> Callable[[], None]:
    """The first pipeline stage embeds what it knew before."""

    def drop(self: Publication, step: SampledStep) -> None:
        self.pipe.receive_published(torch.empty(len(step.slots), sum(self._sizes(step)), dtype=torch.int64))

    return _replaced(Publication, "_receive", drop)


def lse_in_base_2() -> Callable[[], None]:
    """The log-sum-exp of the rank's part of a context is that of another kernel."""
    pack = context_shard.pack_state
    return _replaced(context_shard, "pack_state", lambda out, lse: pack(out, lse / math.log(2)))


def owner_off_by_one() -> Callable[[], None]:
    """The rank stores each token that is one before its own."""
    owner = ContextShard.owner
    return _replaced(ContextShard, "owner", lambda self, place: owner(self, place + 1))


def not_exchanged() -> Callable[[], None]:
    """The rank attends to what it has stored itself."""
    return _replaced(exchange, "put", lambda *given: None)


BUGS: dict[str, Callable[[], Callable[[], None]]] = {
    "not published": not_published,
    "LSE in base 2": lse_in_base_2,
    "owner off by one": owner_off_by_one,
    "not exchanged": not_exchanged,
    "stream not summed": stream_not_summed,
    "masks lost": masks_lost,
    "own step": own_step,
    "residual twice": residual_twice,
    "own vocabulary": own_vocabulary,
    "drafter lost": drafter_lost,
}
