"""Request state on the device: the truth about every running request, written only on the compute stream.

The host plans with upper bounds; lengths, tokens and `done` are here. A `Bind` rebuilds every field of a slot from
tokens alone, and penalties are computed from the tokens plane, so nothing here is ever rolled back.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from thalweg.core.plan import PAGE, Bind, PageAppend
from thalweg.core.sampling import MAX_EOS_IDS, MAX_LOGIT_BIAS, MAX_LOGPROB_IDS, MAX_STOP_IDS
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.kernels.build_inputs.ref import FLOATS, INTS, LENGTH, TEMPERATURE, SlotTensors
from thalweg.kernels.launch import implementation

STOP_IDS = MAX_STOP_IDS + MAX_EOS_IDS  # the user's, and the model's end tokens


Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def upload(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers. To a GPU the copy goes through pinned memory in stream order; torch's allocator keeps
    the pinned block until the copy is done.
    """
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def upload_parts(parts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """int64 tensors of these numbers, in one copy. They share memory, so only the first is aligned to more than 8
    bytes.
    """
    numbers = [number for part in parts for number in part]
    return torch.split(upload(numbers, torch.int64, device), [len(part) for part in parts])


def refill(out: Tensor, values: Numbers) -> None:
    """Overwrites a tensor on a GPU with these numbers, in stream order, in one copy."""
    out.copy_(torch.tensor(values, dtype=out.dtype).pin_memory(), non_blocking=True)


class Field(NamedTuple):
    """A tensor [S, *shape] that a drafter or a sampler keeps of each slot, zeroed when a request is bound."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Slots:
    """Device fields of S slots. L context + 1, P pages of a context, I integers, F floats, K stop ids, B biased ids, N
    nodes of a tree with its root.
    """

    tokens_SL: Tensor  # int32: prompt and output; column L - 1 takes what is written for ended slots
    table_SP: Tensor  # the page table: int64, on a GPU int32 as its kernels want it
    # int64 and float32: the columns named in INTS and FLOATS, so that a bind or a gather is one operation.
    # length: known tokens; num_computed: positions whose KV is computed; end: length at which the sequence is full, 0
    # once it has ended; min_len: length before which no stop id may be sampled; num_drafts: drafts in the tokens plane,
    # after the known tokens
    ints_SI: Tensor
    floats_SF: Tensor
    # int64: of each draft of a tree (`core.tree`) its parent, its depth and its mask (`batch.TreeMask`): 0, 0 and -1
    # for the root; any valid values after `num_drafts`. A chain has the root alone
    nodes_SN3: Tensor
    extra: dict[str, Tensor]  # the declared fields, by name
    tree: TreeShape  # of the drafts

    def __init__(
        self,
        slots: int,
        context: int,
        device: torch.device,
        fields: Sequence[Field] = (),
        tree: TreeShape = CHAIN,
        page_size: int = PAGE,
    ) -> None:
        """page_size: tokens of an entry of the page table."""
        self.context, self.tree, self.page_size = context, tree, page_size
        pages = self.num_pages(context)
        self.input_kernels = implementation("build_inputs", device)
        self.tokens_SL = torch.zeros(slots, context + 1, dtype=torch.int32, device=device)
        entry = torch.int64 if device.type == "cpu" else torch.int32
        self.table_SP = torch.zeros(slots, pages, dtype=entry, device=device)
        self.ints_SI = torch.zeros(slots, len(INTS), dtype=torch.int64, device=device)
        self.reset()
        self.floats_SF = torch.zeros(slots, len(FLOATS), dtype=torch.float32, device=device)
        self.stop_SK = torch.full((slots, STOP_IDS), -1, dtype=torch.int64, device=device)
        self.bias_ids_SB = torch.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias_SB = torch.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        self.logprob_ids_SL = torch.full((slots, MAX_LOGPROB_IDS), -1, dtype=torch.int64, device=device)
        self._has_logprob_ids = False  # some request has had them
        self.state_S3 = self.ints_SI[:, :3]
        columns = self.ints_SI.unbind(1)
        (
            self.length,
            self.num_computed,
            self.end,
            self.seed,
            self.prompt_len,
            self.min_len,
            self.top_k,
            self.num_drafts,
        ) = columns
        self.nodes_SN3 = torch.zeros(slots, 1 + tree.num_drafts * tree.is_tree, 3, dtype=torch.int64, device=device)
        self.nodes_SN3[:, :, 2] = -1
        self.nodes_SN3[:, 1:, 1] = 1  # a first node is always the root's child, also that of a chain, which writes none
        self.extra = {name: torch.zeros(slots, *shape, dtype=dtype, device=device) for name, shape, dtype in fields}

    def num_pages(self, tokens: int) -> int:
        """Entries of the page table that so many tokens have."""
        return -(-tokens // self.page_size)

    def tensors(self, is_tree: bool) -> SlotTensors:
        """What kernels read and write. is_tree: the drafts of the step are trees."""
        nodes_SN3 = self.nodes_SN3 if is_tree else None
        return SlotTensors(self.stop_SK, self.tokens_SL, self.ints_SI, self.table_SP, nodes_SN3)

    def reset(self) -> None:
        """Marks every slot as free: length 1, end 0. So positions of a slot that was never bound are valid indices."""
        self.ints_SI.zero_()
        self.ints_SI[:, LENGTH] = 1

    @property
    def temperature(self) -> Tensor:
        """float32 [S]: 0 for a greedy slot."""
        return self.floats_SF[:, TEMPERATURE]

    @property
    def nbytes(self) -> int:
        fields = (field for field in vars(self).values() if isinstance(field, Tensor))
        return sum(field.nbytes for field in (*fields, *self.extra.values()))

    def bind(self, binds: Sequence[Bind]) -> None:
        """Rebuilds the slots of these binds."""
        if not binds:
            return
        device = self.ints_SI.device
        stops = [stop for b in binds for stop in (*b.stop_ids, *[-1] * (STOP_IDS - len(b.stop_ids)))]
        ints, tokens = [i for b in binds for i in _ints(b)], [b.tokens for b in binds]
        index, ints_BI, stop_BK, *tokens_B = upload_parts([[b.slot for b in binds], ints, stops, *tokens], device)
        self.ints_SI[index] = ints_BI.view(len(binds), -1)
        self.stop_SK[index] = stop_BK.view(len(binds), -1)
        self.floats_SF[index] = upload([_floats(b) for b in binds], torch.float32, device)
        listed = [b.params.logprob_token_ids for b in binds]
        if any(listed) or self._has_logprob_ids:
            self._has_logprob_ids = True
            padded = [[*ids, *[-1] * (MAX_LOGPROB_IDS - len(ids))] for ids in listed]
            self.logprob_ids_SL[index] = upload(padded, torch.int64, device)
        for field in self.extra.values():
            field[index] = 0
        for b, own in zip(binds, tokens_B, strict=True):
            self.tokens_SL[b.slot, : len(own)] = own
            self.bias_SB[b.slot].zero_()
            biases: dict[int, float] = {}  # by id: a kernel adds them all at once
            for token, bias in b.params.logit_bias:
                biases[token] = biases.get(token, 0.0) + bias
            if biases:
                self.bias_ids_SB[b.slot, : len(biases)] = upload(list(biases), torch.int64, device)
                self.bias_SB[b.slot, : len(biases)] = upload(list(biases.values()), torch.float32, device)

    def append(self, appends: Sequence[PageAppend]) -> None:
        """Extends page tables."""
        if not appends:
            return
        wide, device = self.table_SP.shape[1], self.table_SP.device
        entries = [slot * wide + at + i for slot, at, pages in appends for i in range(len(pages))]
        added = [page for _, _, pages in appends for page in pages]
        entry_N, added_N = upload_parts((entries, added), device)
        self.table_SP.view(-1)[entry_N] = added_N.to(self.table_SP.dtype)


def _ints(b: Bind) -> tuple[int, ...]:
    top_k = b.params.top_k if b.params.top_k > 0 else 1 << 30
    min_len = min(b.prompt_len + b.params.min_tokens, b.end)  # no sequence is longer, and a sum may exceed 64 bits
    return (len(b.tokens), b.computed, b.end, b.seed, b.prompt_len, min_len, top_k, 0)


def _floats(b: Bind) -> tuple[float, ...]:
    p = b.params
    temperature = 0.0 if p.is_greedy else p.temperature
    return (temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
