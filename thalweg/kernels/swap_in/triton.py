"""`ref.swap_in` in one launch for all requests of a step, and copies of whole pages for prompts. Host memory is read by
address: its pages are locked, and a GPU addresses them as its own (unified addressing).

Bytes: each missing latent once over the link to the host and once into device memory, 656 or 1,152; of the choice and
the state of a hot set 4 and 8 an entry. Of 2,048 chosen tokens some hundred are new in a step.

Letters: T query tokens, K chosen positions of each, P pages, L columns of the page table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.attend.triton import path_rows, wait_for_previous
from thalweg.kernels.launch import launch_config
from thalweg.kernels.swap_in.ref import HotSet

PAGE, WORD = 64, 4  # tokens of a page; bytes that are copied at a time
COPIED = 4096  # words that one program holds in registers
NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _lookup(entries, positions, at_slot, at_entry, wanted, is_sought):
    """The entry that may hold each wanted position, and whether it does."""
    entry = tl.load(entries + at_slot + wanted, mask=is_sought, other=0).to(tl.int32)
    held = tl.load(positions + at_entry + entry, mask=is_sought, other=0)
    return entry, is_sought & (held == wanted + 1)


@triton.jit
def _least_recent(use, now, count):
    """Which `count` entries were used longest ago, all before the step `now`; of equal ones the first."""
    low, high = now * 0, now - 1
    while low < high:
        middle = (low + high) // 2
        is_enough = tl.sum((use <= middle).to(tl.int32)) >= count
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    before, equal = (use < low).to(tl.int32), (use == low).to(tl.int32)
    room = count - tl.sum(before)
    return (before + equal * (tl.cumsum(equal, 0) <= room).to(tl.int32)) > 0


@triton.jit
def _copy(target, source, to, at, count, words, ROWS: constexpr, WORDS: constexpr):
    """Rows `at` of `source` to rows `to` of `target`, `words` each."""
    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)[None, :]
    for first in range(0, count, ROWS):
        is_row = first + row < count
        write = tl.load(to + first + row, mask=is_row, other=0).to(tl.int64)[:, None] * words + word
        read = tl.load(at + first + row, mask=is_row, other=0)[:, None] * words + word
        inside = is_row[:, None] & (word < words)
        tl.store(target + write, tl.load(source + read, mask=inside), mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "context", "entry_count", "table_row"],
    do_not_specialize_on_alignment=["slots", "query_positions", "real", "rows", "table"],
)
def _swap_in(
    hot, host, entries, positions, last_use, clock, slots, query_positions, real, rows, table, paths, chosen, loads,
    places, out, tokens, context, entry_count, words, table_row,
    K: constexpr, LANES: constexpr, ENTRIES: constexpr, ROWS: constexpr, WORDS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program t, where token t is the first of its slot: its tokens, one after the other. loads, places: [T, K], the
    rows to be loaded and where they are in host memory.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if token > 0:
        if tl.load(slots + token - 1) == slot:
            return
    start, now = tl.load(query_positions + token).to(tl.int32), tl.load(clock + slot) + 1
    lane, entry = tl.arange(0, LANES), tl.arange(0, ENTRIES)
    at_slot, at_entry = slot * context, slot * entry_count
    is_own = True
    while is_own:
        position = tl.load(query_positions + token).to(tl.int32)
        count = tl.minimum(position + 1, K) * tl.load(real + token).to(tl.int32)
        wanted, is_wanted = lane, lane < count
        if chosen is not None:
            wanted = tl.load(chosen + token * K + lane, mask=is_wanted, other=0)
        is_stable = wanted < start
        held, is_hit = _lookup(entries, positions, at_slot, at_entry, wanted, is_wanted & is_stable)
        tl.store(last_use + at_entry + held, now, mask=is_hit)
        is_missing = is_wanted & (is_hit == 0)
        missing = is_missing.to(tl.int32)
        many, number = tl.sum(missing), tl.cumsum(missing, 0) - missing
        tl.debug_barrier()  # the uses of other threads
        use = tl.load(last_use + at_entry + entry, mask=entry < entry_count, other=NEVER)
        is_victim = _least_recent(use, now, many)
        victim = is_victim.to(tl.int32)
        to, at = loads + token * K, places + token * K
        tl.store(to + tl.cumsum(victim, 0) - victim, (at_entry + entry).to(tl.int32), mask=is_victim)
        row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
        if paths is None:
            place = tl.load(row_pages + wanted // 64, mask=is_missing, other=0).to(tl.int64) * 64 + wanted % 64
        else:
            place = path_rows(paths, row_pages, token, position, tl.where(is_missing, wanted, 0))
        tl.store(at + number, place, mask=is_missing)
        tl.debug_barrier()  # the victims and places of other threads
        row = tl.load(to + number, mask=is_missing, other=0).to(tl.int64)
        row = tl.where(is_missing, row, at_entry + tl.where(is_hit, held, 0))
        tl.store(last_use + row, now, mask=is_missing)
        tl.store(positions + row, tl.where(is_stable, wanted + 1, 0), mask=is_missing)
        tl.store(entries + at_slot + wanted, (row - at_entry).to(tl.int16), mask=is_missing & is_stable)
        tl.store(out + token * K + lane, row.to(tl.int32), mask=lane < K)
        _copy(hot, host, to, at, many, words, ROWS, WORDS)
        tl.debug_barrier()  # the state that this token leaves
        token += 1
        is_own = token < tokens
        if is_own:
            is_own = tl.load(slots + token) == slot
    tl.store(clock + slot, now)


def swap_in(
    hot: HotSet,
    host_XD: Tensor,
    slots_T: Tensor,
    real_T: Tensor,
    rows: QueryRows,
    chosen_TK: Tensor | None,
    topk: int,
) -> Tensor:
    """Loads what the hot sets lack: → rows of `hot.latents_ED` that hold the chosen latents of each token, int32 [T,
    topk]; after the last any row of the slot.

    host_XD: the plane in host memory, contiguous; a GPU reads it by address. slots_T: int64, the slot of each token;
    tokens of a slot are neighbours, and choose no more than a hot set holds. rows: where contexts lie in `host_XD`.
    chosen_TK: int32, rising, as `dsa.choose` makes it; None is all that a token sees, `topk` at most.
    """
    tokens, device, size = len(slots_T), hot.latents_ED.device, host_XD.shape[1] * host_XD.itemsize
    assert size % WORD == 0, f"latents of {size} bytes"
    loads, out = (torch.empty(tokens, topk, dtype=torch.int32, device=device) for _ in range(2))
    places, words = torch.empty(tokens, topk, dtype=torch.int64, device=device), size // WORD
    width = triton.next_power_of_2(words)
    _swap_in[tokens,](
        hot.latents_ED.view(torch.int32), host_XD.view(torch.int32), hot.entry_SL, hot.position_SH, hot.last_use_SH,
        hot.clock_S, slots_T, rows.positions_T, real_T.view(torch.uint8), rows.rows_T, rows.table_RL, rows.paths_TD,
        chosen_TK, loads, places, out, tokens, hot.entry_SL.shape[1], hot.entries, words, rows.table_RL.stride(0),
        K=topk, LANES=triton.next_power_of_2(topk), ENTRIES=triton.next_power_of_2(hot.entries),
        ROWS=max(COPIED // width, 1), WORDS=width, **launch_config(hot.latents_ED, 8),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["pages"])
def _copy_pages(source, pages, out, words, BLOCK: constexpr, PDL: constexpr):
    """Program (p, b): the b-th BLOCK words of page p."""
    wait_for_previous(PDL)
    place, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = source + tl.load(pages + place).to(tl.int64) * words + word
    tl.store(out + place * words + word, tl.load(read, mask=word < words), mask=word < words)


def copy_pages(host_PSD: Tensor, pages_P: Tensor) -> Tensor:
    """These pages of a plane in host memory, on the device of `pages_P` (int32): → [P, 64, D]."""
    _, page, dim = host_PSD.shape
    out = torch.empty(len(pages_P), page, dim, dtype=host_PSD.dtype, device=pages_P.device)
    words = page * dim * host_PSD.itemsize // WORD
    _copy_pages[len(pages_P), triton.cdiv(words, COPIED)](
        host_PSD.view(torch.int32), pages_P, out.view(torch.int32), words, BLOCK=COPIED, **launch_config(out, 8)
    )
    return out
