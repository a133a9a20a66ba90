"""The vocabulary of a head whose rows are shared by tensor-parallel ranks. Letters: N rows of logits, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.parallel.axis import Axis, vocabulary_of


class VocabularyShards:
    """Each rank has the logits of some token ids, equally many but for the last ones."""

    def __init__(self, axis: Axis, vocab: int) -> None:
        self.axis, self.vocab, self.here = axis, vocab, vocabulary_of(vocab, axis)

    def gather(self, own_NV: Tensor) -> Tensor:
        """[N, vocab]: the logits of all ranks, on every rank."""
        if self.axis.size == 1:
            return own_NV
        each = -(-self.vocab // self.axis.size)
        padded_NV = own_NV.new_full((len(own_NV), each), -torch.inf)
        padded_NV[:, : own_NV.shape[1]] = own_NV
        return self.axis.all_gather(padded_NV).transpose(0, 1).flatten(1)[:, : self.vocab].contiguous()

    def largest(self, *own_NV: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each of these scores: the largest of a row over all ranks, float32 [N], and its token id, int64 [N], the
        first of equal ones. A row with a NaN has NaN. Gathers two numbers of each row and rank.
        """
        pairs = [pair.double() for scores in own_NV for pair in self._own_largest(scores)]
        all_RXN = self.axis.all_gather(torch.stack(pairs))
        found = []
        for value_RN, id_RN in zip(all_RXN[:, ::2].unbind(1), all_RXN[:, 1::2].unbind(1), strict=True):
            value_N = value_RN.amax(0)
            id_N = id_RN.masked_fill(value_RN != value_N, self.vocab).amin(0)
            found.append((value_N.float(), id_N.long()))
        return found

    def _own_largest(self, own_NV: Tensor) -> tuple[Tensor, Tensor]:
        if not self.here:  # fewer ids than ranks
            return own_NV.new_full((len(own_NV),), -torch.inf), own_NV.new_full((len(own_NV),), self.vocab)
        value_N, index_N = own_NV.max(-1)
        return value_N, index_N + self.here.start
