"""Compacts the accepted paths of trees: KV moves to where a chain's would be, and the drafter gets a chain's step.

Letters: T tokens of the step, E sampled rows, D tokens of a path at most.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Callable, Sequence

import torch
from torch import Tensor

from thalweg.attention.context_shard import ContextShard
from thalweg.batch.batch import RowExtent
from thalweg.batch.inputs import gather, groups_of
from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import Row
from thalweg.kernels.build_inputs.ref import NUM_COMPUTED
from thalweg.kernels.compact_kv import ref
from thalweg.kernels.launch import supports_triton
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.parallel.axis import SINGLE, Axis
from thalweg.spec.drafter import DraftExtendInput

Move = Callable[[Tensor, Tensor], None]  # rows of planes from places to others, int64 [E, D]: see `kernels.compact_kv`


def kv_mover(planes: Planes, specs: Sequence[PlaneSpec], dcp: Axis = SINGLE) -> Move:
    """Moves entries in the planes of `specs`: by a kernel on a GPU, where Triton is installed. dcp: the ranks that
    share each context, between which entries move, too.
    """
    rows = [part for spec in specs for part in planes.entries(spec.name, spec.layer)]
    if rows and dcp.size > 1:
        shard = ContextShard(dcp)
        return lambda from_ED, to_ED: shard.put(rows, to_ED.flatten(), shard.take(rows, from_ED.flatten()))
    if not rows or not supports_triton(planes.device):
        return lambda from_ED, to_ED: ref.move(rows, from_ED.flatten(), to_ED.flatten())
    from thalweg.kernels.compact_kv import triton as moving  # needs Triton

    return partial(moving.move, moving.table(rows))


def compact_accepted_path(
    draft_input: DraftExtendInput,
    slot_E: Tensor,
    ints_EI: Tensor,
    nodes_ED: Tensor,
    count_E: Tensor,
    slots: Slots,
    move: Move,
) -> DraftExtendInput:
    """Moves the KV of each path to consecutive columns. → the step as it would have been with these tokens alone. A row
    with drafts has as many tokens as its path may have; those that it lacks are padding.

    slot_E, ints_EI: of the sampled rows, as the step found them. nodes_ED, count_E: see `sampling.sample.Sampled`.
    """
    deepest = nodes_ED.shape[1]
    from_ED, to_ED = path_places(slots, slot_E, ints_EI, nodes_ED, count_E)
    move(from_ED, to_ED)

    to_N, on_N = to_ED.flatten(), _on_path(nodes_ED, count_E).flatten()
    rows, batch = draft_input.plan.rows, draft_input.batch
    kept = tuple(_kept(row, deepest) for row in rows)
    token_T, path_T = upload(_tokens(rows, deepest), torch.int64, to_N.device)
    drafted_T = path_T >= 0
    path_T = path_T.clamp(min=0)
    token_T = token_T + nodes_ED.flatten().index_select(0, path_T) * drafted_T
    real_T = batch.real_T.index_select(0, token_T) & (on_N.index_select(0, path_T) | ~drafted_T)
    write_T = torch.where(drafted_T, to_N.index_select(0, path_T), batch.write_T.index_select(0, token_T))
    compacted = replace(
        batch,
        ids_T=batch.ids_T.index_select(0, token_T) * real_T,
        positions_T=batch.positions_T.index_select(0, token_T) * real_T,
        write_T=write_T * real_T,
        real_T=real_T,
        groups=groups_of(kept),
        extents=tuple(RowExtent(row.n, row.start + row.n) for row in kept),
        tree=None,
    )
    return DraftExtendInput(
        replace(draft_input.plan, rows=kept), compacted, draft_input.hidden_TH.index_select(0, token_T)
    )


def path_places(
    slots: Slots, slot_E: Tensor, ints_EI: Tensor, nodes_ED: Tensor, count_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the KV of each path is, and where a chain's would be, int64 [E, D]; the null page beyond a path's end."""
    deepest, on_ED = nodes_ED.shape[1], _on_path(nodes_ED, count_E)
    ahead_D = torch.arange(deepest, device=nodes_ED.device)
    slot_N, ints_NI = slot_E.repeat_interleave(deepest), ints_EI.repeat_interleave(deepest, 0)
    root_E1 = ints_EI[:, NUM_COMPUTED, None]
    from_ED, to_ED = (
        _places(slots, slot_N, (root_E1 + x).flatten(), ints_NI).view_as(nodes_ED) * on_ED for x in (nodes_ED, ahead_D)
    )
    return from_ED, to_ED


def _on_path(nodes_ED: Tensor, count_E: Tensor) -> Tensor:
    return torch.arange(nodes_ED.shape[1], device=nodes_ED.device) < count_E.unsqueeze(1)


def _places(slots: Slots, slot_N: Tensor, column_N: Tensor, ints_NI: Tensor) -> Tensor:
    _, _, write_N, _ = gather(slots, slot_N, column_N, ints_NI)
    return write_N


def _kept(row: Row, deepest: int) -> Row:
    """The row with no more drafts than a path has."""
    drafts = min(row.num_drafts, deepest - 1)
    return row._replace(n=row.n - row.num_drafts + drafts, num_drafts=drafts)


def _tokens(rows: Sequence[Row], deepest: int) -> list[list[int]]:
    """For each token of the compacted step: the same token of the step, or the root of its row for a token of a path;
    and its place in all paths, or -1.
    """
    tokens: list[int] = []
    paths: list[int] = []
    path = 0
    for row, end in zip(rows, accumulate(row.n for row in rows), strict=True):
        first = end - row.n
        if row.num_drafts:
            n = 1 + min(row.num_drafts, deepest - 1)
            tokens += [first] * n
            paths += range(path, path + n)
        else:
            tokens += range(first, end)
            paths += [-1] * row.n
        path += deepest * row.samples
    return [tokens, paths]
