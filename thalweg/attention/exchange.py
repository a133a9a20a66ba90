"""Context parallelism: what the ranks have stored of their own tokens, exchanged so that all hold all of it."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.batch.batch import Batch
from thalweg.kernels.launch import implementation
from thalweg.memory.planes import Planes, put, take


def exchange_stored(batch: Batch, planes: Planes, names: Sequence[str], layer: int) -> None:
    """Copies what a layer's planes of these names hold of each rank's tokens to all ranks, as bytes. Call it when all
    tokens of the batch are stored and before any attends; all ranks call it together. A whole batch has nothing to
    exchange.
    """
    share = batch.share
    if share is None:
        return
    entries = [part for name in names for part in planes.entries(name, layer)]
    own, kernels = take(entries, batch.write_T), implementation("pack_rows", batch.write_T.device)
    put(entries, share.write_all, kernels.unpacked(share.ranks.all_gather(kernels.packed(own)).flatten(0, 1), own))
