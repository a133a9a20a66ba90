"""Decode steps as CUDA graphs: A and B of DESIGN §1, one graph each for every bucket of rows.

A reads which slots it decodes from a persistent buffer and everything else from `Slots`, so a replay needs one small copy. Rows that fill a
bucket up are those of a spare slot that has ended: they are padding, and touch the null page only. All graphs share one memory pool;
the largest is recorded first, so that the others fit into what it took.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group
from thalweg.batch.slots import INTS, Slots
from thalweg.batch.upload import upload
from thalweg.core.plan import PAGE, Needs
from thalweg.kernels.draw import triton as drawing
from thalweg.kernels.prepare import triton as preparing
from thalweg.memory.planes import Planes
from thalweg.models.base import Model
from thalweg.sampling.sample import Sampled, accept

NEEDS = (Needs(), Needs(random=True), Needs(random=True, truncated=True))  # of B; rarer ones run eagerly
WARM_UPS = 2  # eager runs before a recording: kernels compile, libraries make their handles

Progress = Callable[[int, int], None]  # graphs done, graphs in all


class Recorded:
    """A and B for up to `rows` rows."""

    def __init__(self, rows: int, reach: int, model: Model, planes: Planes, slots: Slots, spare: int) -> None:
        self.rows, self.slots, self.spare, self.reach = rows, slots, spare, reach
        self.slot_R = torch.full((rows,), spare, dtype=torch.int64, device=planes.device)
        self.every_R = torch.arange(rows, device=planes.device)
        self.a = torch.cuda.CUDAGraph()
        self.b: dict[Needs, torch.cuda.CUDAGraph] = {}
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        self.out = (
            torch.zeros(rows, dtype=torch.int64, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
        )
        self.model, self.planes = model, planes
        self.logits_EV = self.ints_EI = self.slot_R

    def record(self, pool: Any) -> None:
        """Runs each half eagerly, then records it. What is computed goes to the spare slot and the null page."""
        for _ in range(WARM_UPS):
            self._a()
        with torch.cuda.graph(self.a, pool=pool):
            self.logits_EV, self.ints_EI = self._a()
        self.a.replay()  # B's eager runs read what A left
        for needs in NEEDS:
            self._b(needs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._b(needs)
            self.b[needs] = graph

    def _a(self) -> tuple[Tensor, Tensor]:
        slots, rows, reach = self.slots, self.rows, self.reach
        ids, positions, write, real, table, ints = preparing.decode(
            self.slot_R, slots.ints_SI, slots.tokens_SL, slots.table_SP, -(-reach // PAGE), PAGE
        )
        group, extents = Group(0, rows, 0, 1, reach), (Extent(1, reach),) * rows
        batch = Batch(ids, positions, write, table, real, self.every_R, (group,), extents)
        return self.model.logits(self.model.forward(batch, self.planes)), ints

    def _b(self, needs: Needs) -> None:
        slots = self.slots
        if needs.truncated:
            made = accept(self.logits_EV, slots, self.slot_R, self.ints_EI, needs, self.reach)
            for kept, one in zip(self.out, (made.tokens_E, made.done_E, made.live_E), strict=True):
                kept.copy_(one)
            return
        state = slots.ints_SI, slots.floats_SF, slots.stop_SK, slots.tokens_SL
        seed = INTS.index("seed")
        drawing.draw(self.logits_EV, self.slot_R, self.ints_EI, *state, slots.context, seed, needs.random, self.out)

    def forward(self, slot_R: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(slot_R)
        padded = [*slot_R, *[self.spare] * (self.rows - rows)]
        self.slot_R.copy_(upload(padded, torch.int64, self.slot_R.device))
        self.a.replay()
        return self.logits_EV[:rows], self.slot_R[:rows], self.ints_EI[:rows]

    def sample(self, rows: int, needs: Needs) -> Sampled | None:
        if needs not in self.b:
            return None
        self.b[needs].replay()
        tokens, done, live = self.out
        return Sampled(tokens[:rows], done[:rows], live[:rows])


class CudaGraphs:
    """The recorded decode steps of a runner, by bucket."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self.recorded = sorted(recorded, key=lambda one: one.rows)

    def get(self, rows: int, reach: int) -> Recorded | None:
        """The smallest bucket that holds so many rows; None beyond the largest."""
        return next((one for one in self.recorded if one.rows >= rows), None)


@torch.inference_mode()
def record(
    rows: Sequence[int], reach: int, model: Model, planes: Planes, slots: Slots, spare: int, progress: Progress
) -> CudaGraphs:
    """Records a decode step for each number of rows. reach: the longest context, in tokens. spare: a slot that no request gets."""
    pool, made = torch.cuda.graph_pool_handle(), []
    for count in sorted(rows, reverse=True):
        one = Recorded(count, reach, model, planes, slots, spare)
        one.record(pool)
        made.append(one)
        progress(len(made), len(rows))
    torch.cuda.synchronize()
    return CudaGraphs(made)
