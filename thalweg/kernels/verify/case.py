"""Cases of steps that verify trees: trees of every form, drawn to their leaves or anywhere before, stop ids, ends and
what is no token on the way, nodes that were not made, and some that were and are not verified, equal children, slots
that had ended.
"""

from __future__ import annotations

from random import Random
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs import ref as build_inputs
from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.case import KernelCase, Run
from thalweg.kernels.launch import triton_available
from thalweg.kernels.verify import ref
from thalweg.kernels.verify.ref import AcceptedPaths, Verification

STOPS, COLUMNS, CONTEXT, PAGE, TOKENS = 5, 8, 200, 16, 90
BEYOND = 3  # nodes that a slot has behind those of a step


class Tree(NamedTuple):
    """Of each node its parent, its depth and its token, the root's any; and what is drawn there: mostly the token of a
    child.
    """

    parents: list[int]
    depths: list[int]
    tokens: list[int]
    drawn: list[int]


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, query, deepest in ((1, 2, 1), (7, 4, 2), (33, 16, 4), (5, 64, 9)):
        yield _case(rows, query, deepest, generator, is_chain=False)
    for rows, query in ((1, 2), (7, 4), (33, 9), (5, 64)):
        yield _case(rows, query, query - 1, generator, is_chain=True)


def _case(rows: int, query: int, deepest: int, generator: torch.Generator, is_chain: bool) -> KernelCase:
    rng, slots = Random(int(torch.randint(1 << 40, (), generator=generator))), rows + 2
    nodes = query + BEYOND
    trees = [_draft(nodes, nodes if is_chain else deepest, rng, is_chain) for _ in range(slots)]
    ints, tokens_SL = list[list[int]](), torch.zeros(slots, CONTEXT + 1, dtype=torch.int32)
    for slot, tree in enumerate(trees):
        length = rng.randrange(1, CONTEXT)
        end = min(length + rng.choice((1, 2, 3, 2 * query)), CONTEXT) * rng.choice((0, 1, 1, 1))
        made = rng.choice((query - 1, nodes - 1, rng.randrange(nodes)))
        ints.append([length, length - 1, end, *(rng.randrange(1 << 40) for _ in range(4)), made])
        tokens_SL[slot, :length] = torch.randint(TOKENS, (length,), generator=generator)
        room = tokens_SL[slot, length : length + nodes - 1]
        room.copy_(torch.tensor(tree.tokens[1 : 1 + len(room)]))
    forms = [
        [tree.parents, tree.depths, [0 if is_chain else rng.randrange(1 << 60) for _ in range(nodes)]] for tree in trees
    ]
    fields = {
        "stop_SK": torch.tensor([[rng.randrange(-1, 8 * TOKENS) for _ in range(STOPS)] for _ in trees]),
        "tokens_SL": tokens_SL,
        "ints_SI": torch.tensor(ints),
        "table_SP": torch.tensor([[rng.randrange(1, 999) for _ in range(0, CONTEXT, PAGE)] for _ in trees]),
        "nodes_SN3": torch.tensor(forms).transpose(1, 2).contiguous(),
    }
    slot_R = rng.sample(range(slots), rows)
    drawn = [trees[slot].drawn[:query] for slot in slot_R]
    held = SlotTensors(**{name: tensor.clone() for name, tensor in fields.items()})
    exact = _exact(slot_R, drawn, 1 + deepest, held, is_chain)
    if is_chain:
        del fields["nodes_SN3"]
    inputs = {"slot_R": torch.tensor(slot_R), "drawn_RQ": torch.tensor(drawn), "deepest": deepest, **fields}
    return KernelCase(
        f"{rows} {'chains' if is_chain else 'trees'} of {query}",
        inputs,
        exact,
        0.0,
        rows * query * STOPS,
        rows * query * 150,
    )


def _draft(query: int, deepest: int, rng: Random, is_chain: bool) -> Tree:
    parents, depths, tokens = [0], [0], [0]
    for node in range(1, query):
        parents.append(node - 1 if is_chain else rng.choice([one for one in range(node) if depths[one] < deepest]))
        depths.append(1 + depths[parents[-1]])
        siblings = [tokens[one] for one in range(1, node) if parents[one] == parents[-1]]
        alike = siblings and rng.random() < 0.2  # a walk that followed both would have two nodes of a depth
        tokens.append(rng.choice(siblings) if alike else rng.randrange(TOKENS))
    drawn = list[int]()
    for node in range(query):
        children = [tokens[one] for one in range(1, query) if parents[one] == node]
        other = rng.choice((rng.randrange(TOKENS), rng.randrange(-1, TOKENS)))
        drawn.append(rng.choice(children) if children and rng.random() < 0.85 else other)
    return Tree(parents, depths, tokens, drawn)


def _exact(
    slots: list[int], drawn: list[list[int]], most: int, fields: SlotTensors, is_chain: bool
) -> tuple[Tensor, ...]:
    """Node by node: of each what `build_inputs` says, then of each path what `verify` says, and what the slots are."""
    assert fields.nodes_SN3 is not None, "also of chains"
    nodes, paths, rows = list[list[int]](), list[list[int]](), list[list[int]]()
    ints = list[list[int]]()
    for row, slot in enumerate(slots):
        length, at, end, *others, made = fields.ints_SI[slot].tolist()
        table, forms = fields.table_SP[slot].tolist(), fields.nodes_SN3[slot, : len(drawn[row])].tolist()
        places, first = [table[at // PAGE] * PAGE + at % PAGE for at in range(CONTEXT)], len(nodes)
        tokens = fields.tokens_SL[slot].tolist()
        for node, (_, depth, mask) in enumerate(forms):
            there, behind = at + node, length + depth
            real = there < end and (is_chain or node <= made)
            nodes.append([tokens[there], at + depth, there, mask, places[there], 1] if real else [0, 0, 0, mask, 0, 0])
            ints.append([min(behind, CONTEXT), there, end if behind < end else 0, *others, made])
        path = [0] if end else []
        while path and len(path) < end - length:
            token = drawn[row][path[-1]]
            follows = [
                node
                for node, (parent, *_) in enumerate(forms)
                if 0 < node <= made and parent == path[-1] and nodes[first + node][5]
            ]
            going = [node for node in follows if nodes[first + node][0] == token]
            if not going or token < 0 or token in fields.stop_SK[slot].tolist():
                break
            path.append(going[-1])  # of equal ones the last
        for ahead, node in enumerate(path):
            fields.tokens_SL[slot, length + ahead] = max(drawn[row][node], 0)
        count = len(path)
        last = drawn[row][path[-1]] if path else -1
        alive = length + count < end and last >= 0 and last not in fields.stop_SK[slot].tolist()
        fields.ints_SI[slot, :3] = torch.tensor([length + count, length + count - 1, end * alive])
        rows.append([count, int(not alive)])
        for ahead, node in enumerate(path):
            id, position, _, _, place, _ = nodes[first + node]
            paths.append([drawn[row][node], node, first + node, id, position, 1, place, places[at + ahead]])
        paths += [[0] * 8] * (most - count)
    table_RP = fields.table_SP[torch.tensor(slots)]
    numbers = (torch.tensor(x) for x in (nodes, ints, rows, paths))
    return *numbers, table_RP, fields.tokens_SL[:, :CONTEXT], fields.ints_SI


def _run(
    kernels: Any, inputs: Any, device: str, slot_R: Tensor, drawn_RQ: Tensor, deepest: int, **fields: Tensor
) -> tuple[Tensor, ...]:
    """kernels: has `verify`; inputs: has `build_inputs`. Without `nodes_SN3` drafts are chains."""
    slot_R, drawn_N, (rows, query) = slot_R.to(device), drawn_RQ.flatten().to(device), drawn_RQ.shape
    held: dict[str, Any] = {"nodes_SN3": None} | {name: tensor.to(device) for name, tensor in fields.items()}
    slots = SlotTensors(**held)
    pages, most = slots.table_SP.shape[1], 1 + deepest
    if slots.nodes_SN3 is None:
        ahead_N = torch.arange(query, device=device).repeat(rows)
        step = inputs.build_inputs(slot_R.repeat_interleave(query), ahead_N, slots, pages, PAGE)
        step = step._replace(
            columns_T=step.positions_T, tree_mask_T=torch.zeros_like(ahead_N), table_RP=step.table_RP[::query]
        )
    else:
        step = inputs.build_inputs(slot_R, None, slots, pages, PAGE, query)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    out = Verification(empty(rows, most), empty(rows, most), empty(rows), empty(rows, dtype=torch.bool))
    paths = AcceptedPaths(*(empty(rows * most, dtype=torch.bool if i == 3 else torch.int64) for i in range(6)))
    kernels.verify(drawn_N, step, slots, PAGE, out, paths)
    nodes = torch.stack((step.ids_T, step.positions_T, step.columns_T, step.tree_mask_T, step.write_T, step.real_T), 1)
    on_M = paths.real_M.to(torch.int64)  # behind a path some of these may be any
    assert out.nodes_RD is not None, "given above"
    first = out.tokens_RD.flatten() * on_M, out.nodes_RD.flatten() * on_M, paths.token_M * on_M
    results = nodes, step.ints_TI, torch.stack(out[2:], 1), torch.stack((*first, *paths[1:]), 1), step.table_RP
    return tuple(tensor.cpu() for tensor in (*results, slots.tokens_SL[:, :CONTEXT], slots.ints_SI))


def run_ref(**inputs: Any) -> tuple[Tensor, ...]:
    return _run(ref, build_inputs, "cpu", **inputs)


def run_triton(device: str = "cuda", **inputs: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.build_inputs import triton as input_kernels
    from thalweg.kernels.verify import triton

    return _run(triton, input_kernels, device, **inputs)


BACKENDS: dict[str, Run] = {"ref": run_ref}
if triton_available():
    BACKENDS["triton"] = run_triton
