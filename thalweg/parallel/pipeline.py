"""Pipeline stages as processes: what one sends to others. Each stage has some consecutive layers.

Hidden states go from each stage to the next. The last stage samples and drafts, and publishes what that changed in the
slots to all others, which take it before they build the inputs of a later step (`StepPlan.published_step`). Each
tensor-parallel rank talks to those of the same number.

The processes of the last stage come first, so that the first process of a data-parallel rank, which has its scheduler,
gets the tokens without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.parallel.axis import SINGLE, Axis

LAST = 0  # position of the last stage on an axis of stages


@dataclass(frozen=True, slots=True)
class Pipe:
    """A process's connection to other stages. hidden, published: two axes of the same processes, the last stage's
    first: a library runs the transfers of an axis in order, and each of these has an order of its own.
    """

    hidden: Axis = SINGLE
    published: Axis = SINGLE

    @property
    def stages(self) -> int:
        return self.hidden.size

    @property
    def stage(self) -> int:
        """This process's, from 0, which embeds."""
        return self.stages - 1 - self.hidden.rank

    @property
    def is_last(self) -> bool:
        return self.hidden.rank == LAST

    def connect(self, device: torch.device) -> None:
        """All stages call it together, before the first step. NCCL connects two processes at their first transfer, for
        which both wait; the last stage publishes a step before the others are ready to receive it.
        """
        rank, last, x = self.hidden.rank, self.stages - 1, torch.zeros(1, device=device)
        self.hidden.transfer([(rank - 1, x)] if rank else [], [(rank + 1, x.clone())] if rank < last else [])
        if self.is_last:
            self.published.transfer([(other, x) for other in range(1, self.stages)], [])
        else:
            self.receive_published(x)

    def receive(self, like_TX: Tensor) -> Tensor:
        """Hidden states from the stage before, of this shape and type."""
        self.hidden.transfer([], [(self.hidden.rank + 1, like_TX)])
        return like_TX

    def send(self, x_TX: Tensor) -> None:
        """Hidden states to the next stage."""
        self.hidden.transfer([(self.hidden.rank - 1, x_TX.contiguous())], [])

    def publish(self, x: Tensor) -> Callable[[], object]:
        """From the last stage to all others, without waiting for them; the returned function waits."""
        return self.published.post(x, range(1, self.stages))

    def receive_published(self, like: Tensor) -> Tensor:
        """What the last stage has published next, of this shape and type."""
        self.published.transfer([], [(LAST, like)])
        return like

    def of_last_stage(self, numbers: Sequence[int], most: int, device: torch.device) -> list[int]:
        """The numbers, at most so many, that the last stage has. All stages call it together."""
        if self.stages == 1:
            return list(numbers)
        padded = [len(numbers), *numbers, *[0] * (most - len(numbers))]
        count, *theirs = self.hidden.all_gather(torch.tensor(padded, device=device))[LAST].tolist()
        return theirs[: int(count)]


ONE_STAGE = Pipe()
