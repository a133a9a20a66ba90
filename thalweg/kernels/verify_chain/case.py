"""Cases of following drafts: chains of every length, right up to anywhere, stop ids, ends and what is no token among
them, slots that had ended, made-up rows.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, Run
from thalweg.kernels.launch import triton_available
from thalweg.kernels.verify_chain.ref import verify_chain

STOPS, COLUMNS, CONTEXT = 5, 8, 40


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, query in ((1, 2), (7, 4), (33, 9), (5, 64)):
        yield _case(rows, query, generator)


def _case(rows: int, query: int, generator: torch.Generator) -> KernelCase:
    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    slots = rows + 2
    ints_SI = whole(0, 1 << 40, slots, COLUMNS)
    ints_SI[:, 0] = whole(1, CONTEXT, slots)
    ints_SI[:, 1] = ints_SI[:, 0] - 1
    ints_SI[:, 2] = (ints_SI[:, 0] + whole(1, 1 + query, slots)).clamp(max=CONTEXT) * (whole(0, 4, slots) > 0)
    ints_SI[:, 7] = whole(0, query, slots)
    slot_E = torch.randperm(slots, generator=generator)[:rows]
    tokens_SL, stop_SK = whole(0, 9, slots, CONTEXT + 1).to(torch.int32), whole(-1, 40, slots, STOPS)
    ids_EQ = whole(0, 9, rows, query)
    drawn_EQ = torch.where(whole(0, 6, rows, query) > 0, ids_EQ.roll(-1, 1), whole(0, 9, rows, query))
    drawn_EQ[whole(0, 12, rows, query) == 0] = -1
    slot_N, ints_NI = slot_E.repeat_interleave(query), ints_SI[slot_E].repeat_interleave(query, 0)
    computed_E = whole(1, query + 1, rows)  # tokens that the step computed
    ints_NI[:, 2] *= (torch.arange(query) < computed_E.unsqueeze(1)).flatten()
    inputs = {
        "drawn_N": drawn_EQ.flatten(), "ids_N": ids_EQ.flatten(), "slot_N": slot_N, "ints_NI": ints_NI,
        "stop_SK": stop_SK, "tokens_SL": tokens_SL, "ints_SI": ints_SI, "query": query,
    }  # fmt: skip
    exact = _exact(drawn_EQ, ids_EQ, computed_E, slot_E, stop_SK, tokens_SL.clone(), ints_SI.clone())
    return KernelCase(f"{rows} rows of {query}", inputs, exact, 0.0, rows * query * STOPS, rows * query * 28)


def _exact(
    drawn_EQ: Tensor,
    ids_EQ: Tensor,
    computed_E: Tensor,
    slot_E: Tensor,
    stop_SK: Tensor,
    tokens_SL: Tensor,
    ints_SI: Tensor,
) -> tuple[Tensor, ...]:
    """Token by token."""
    count, done = list[int](), list[bool]()
    rows = drawn_EQ.tolist(), ids_EQ.tolist(), computed_E.tolist(), slot_E.tolist()
    for drawn, ids, computed, slot in zip(*rows, strict=True):
        length, _, end, *_, made = ints_SI[slot].tolist()
        taken = 0
        while end:
            token, draft = drawn[taken], ids[taken + 1] if taken < min(made, computed - 1) else None
            tokens_SL[slot, length] = max(token, 0)
            taken, length = taken + 1, length + 1
            if length == end or token < 0 or token in stop_SK[slot].tolist():
                end = 0
            if token != draft:
                break
        ints_SI[slot, :3] = torch.tensor([length, length - 1, end])
        count.append(taken)
        done.append(not end)
    return drawn_EQ, torch.tensor(count), torch.tensor(done), tokens_SL[:, :CONTEXT], ints_SI


def _given(run: Run, device: str, query: int, **inputs: Tensor) -> tuple[Tensor, ...]:
    held = {name: tensor.to(device) for name, tensor in inputs.items()}
    rows = len(held["drawn_N"]) // query
    count_E, done_E = (torch.empty(rows, dtype=kind, device=device) for kind in (torch.int64, torch.bool))
    out = torch.empty(rows, query, dtype=torch.int64, device=device), count_E, done_E
    run(**held, out=out)
    return tuple(tensor.cpu() for tensor in (*out, held["tokens_SL"][:, :CONTEXT], held["ints_SI"]))


def run_ref(query: int, **inputs: Tensor) -> tuple[Tensor, ...]:
    return _given(verify_chain, "cpu", query, **inputs)


def run_triton(query: int, device: str = "cuda", **inputs: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.verify_chain import triton

    return _given(triton.verify_chain, device, query, **inputs)


BACKENDS: dict[str, Run] = {"ref": run_ref}
if triton_available():
    BACKENDS["triton"] = run_triton
