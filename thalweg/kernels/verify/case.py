"""Cases of steps that verify trees or chains: trees of every form, accepted up to a leaf or less far, stop ids,
ends and missing tokens on the way, nodes that were not made, nodes that are not verified, equal children, slots that
had ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs import ref as build_inputs
from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.case import KernelCase, with_triton
from thalweg.kernels.verify import ref
from thalweg.kernels.verify.ref import AcceptedPaths, Verification

STOPS, CONTEXT, PAGE, TOKENS = 5, 200, 16, 90
BEYOND = 3  # nodes that a slot has behind those of a step


class Tree(NamedTuple):
    """By node, the root first."""

    parents: list[int]
    depths: list[int]
    tokens: list[int]  # the root's is any
    target_ids: list[int]  # mostly the token of a child


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
        num_drafts = rng.choice((query - 1, nodes - 1, rng.randrange(nodes)))
        ints.append([length, length - 1, end, *(rng.randrange(1 << 40) for _ in range(4)), num_drafts])
        tokens_SL[slot, :length] = torch.randint(TOKENS, (length,), generator=generator)
        room = tokens_SL[slot, length : length + nodes - 1]
        room.copy_(torch.tensor(tree.tokens[1 : 1 + len(room)]))
    masks = [[0 if is_chain else rng.randrange(1 << 60) for _ in range(nodes)] for _ in trees]
    forms = [(tree.parents, tree.depths, mask) for tree, mask in zip(trees, masks, strict=True)]
    fields = {
        "stop_SK": torch.tensor([[rng.randrange(-1, 8 * TOKENS) for _ in range(STOPS)] for _ in trees]),
        "tokens_SL": tokens_SL,
        "ints_SI": torch.tensor(ints),
        "table_SP": torch.tensor([[rng.randrange(1, 999) for _ in range(0, CONTEXT, PAGE)] for _ in trees]),
        "nodes_SN3": torch.tensor(forms).transpose(1, 2).contiguous(),
    }
    slot_R = rng.sample(range(slots), rows)
    target_ids = [trees[slot].target_ids[:query] for slot in slot_R]
    before = SlotTensors(**{name: tensor.clone() for name, tensor in fields.items()})
    exact = _exact(slot_R, target_ids, 1 + deepest, before, is_chain)
    if is_chain:
        del fields["nodes_SN3"]
    inputs = {"slot_R": torch.tensor(slot_R), "target_ids_RQ": torch.tensor(target_ids), "deepest": deepest, **fields}
    name, size = f"{rows} {'chains' if is_chain else 'trees'} of {query}", rows * query
    return KernelCase(name, inputs, exact, tolerance=0.0, flops=size * STOPS, bytes=size * 150)


def _draft(query: int, deepest: int, rng: Random, is_chain: bool) -> Tree:
    parents, depths, tokens = [0], [0], [0]
    for node in range(1, query):
        parents.append(
            node - 1 if is_chain else rng.choice([above for above in range(node) if depths[above] < deepest])
        )
        depths.append(1 + depths[parents[-1]])
        siblings = [tokens[other] for other in range(1, node) if parents[other] == parents[-1]]
        alike = siblings and rng.random() < 0.2  # a walk that followed both would have two nodes of a depth
        tokens.append(rng.choice(siblings) if alike else rng.randrange(TOKENS))
    target_ids = list[int]()
    for node in range(query):
        children = [tokens[child] for child in range(1, query) if parents[child] == node]
        other = rng.choice((rng.randrange(TOKENS), rng.randrange(-1, TOKENS)))
        target_ids.append(rng.choice(children) if children and rng.random() < 0.85 else other)
    return Tree(parents, depths, tokens, target_ids)


def _exact(
    slot_R: list[int], target_ids_RQ: list[list[int]], most: int, slots: SlotTensors, is_chain: bool
) -> tuple[Tensor, ...]:
    """Node by node: what `build_inputs` says of each, then what `verify` says of each path, and what the slots are."""
    assert slots.nodes_SN3 is not None, "also of chains"
    nodes, ints, rows, paths = (list[list[int]]() for _ in range(4))
    for slot, target_ids in zip(slot_R, target_ids_RQ, strict=True):
        length, num_computed, end, *others, num_drafts = slots.ints_SI[slot].tolist()
        table, forms = slots.table_SP[slot].tolist(), slots.nodes_SN3[slot, : len(target_ids)].tolist()
        places, first = [table[column // PAGE] * PAGE + column % PAGE for column in range(CONTEXT)], len(nodes)
        tokens, stops = slots.tokens_SL[slot].tolist(), {-1, *slots.stop_SK[slot].tolist()}
        for node, (_, depth, mask) in enumerate(forms):
            column, known = num_computed + node, length + depth
            if column < end and (is_chain or node <= num_drafts):
                nodes.append([tokens[column], num_computed + depth, column, mask, places[column], 1])
            else:
                nodes.append([0, 0, 0, mask, 0, 0])
            ints.append([min(known, CONTEXT), column, end if known < end else 0, *others, num_drafts])
        path = [0] if end else []
        while path and len(path) < end - length and target_ids[path[-1]] not in stops:
            children = [node for node in range(1, len(forms)) if node <= num_drafts and forms[node][0] == path[-1]]
            wanted = [target_ids[path[-1]], 1]
            going = [node for node in children if [nodes[first + node][0], nodes[first + node][5]] == wanted]
            if not going:
                break
            path.append(going[-1])  # of equal ones the last
        for ahead, node in enumerate(path):
            slots.tokens_SL[slot, length + ahead] = max(target_ids[node], 0)
            id, position, _, _, place, _ = nodes[first + node]
            paths.append([target_ids[node], node, first + node, id, position, 1, place, places[num_computed + ahead]])
        paths += [[0] * 8] * (most - len(path))
        new = length + len(path)
        alive = bool(path) and new < end and target_ids[path[-1]] not in stops
        slots.ints_SI[slot, :3] = torch.tensor([new, new - 1, end * alive])
        rows.append([len(path), int(not alive)])
    numbers = (torch.tensor(x) for x in (nodes, ints, rows, paths))
    return *numbers, slots.table_SP[torch.tensor(slot_R)], slots.tokens_SL[:, :CONTEXT], slots.ints_SI


def _run(
    kernels: Any, inputs: Any, slot_R: Tensor, target_ids_RQ: Tensor, deepest: int, **fields: Any
) -> tuple[Tensor, ...]:
    """kernels: has `verify`; inputs: has `build_inputs`. Without `nodes_SN3` drafts are chains."""
    slots, (rows, query), most = SlotTensors(**{"nodes_SN3": None} | fields), target_ids_RQ.shape, 1 + deepest
    pages = slots.table_SP.shape[1]
    if slots.nodes_SN3 is None:
        ahead_N = torch.arange(query, device=slot_R.device).repeat(rows)
        step = inputs.build_inputs(slot_R.repeat_interleave(query), ahead_N, slots, pages, PAGE)
        tree = {"columns_T": step.positions_T, "tree_mask_T": torch.zeros_like(ahead_N)}
        step = step._replace(table_RP=step.table_RP[::query], **tree)
    else:
        step = inputs.build_inputs(slot_R, None, slots, pages, PAGE, query)
    new, kinds = slot_R.new_empty, [torch.int64] * 3 + [torch.bool] + [torch.int64] * 2
    nodes_RD = new(rows, most)
    out = Verification(new(rows, most), nodes_RD, new(rows), new(rows, dtype=torch.bool))
    paths = AcceptedPaths(*(new(rows * most, dtype=kind) for kind in kinds))
    kernels.verify(target_ids_RQ.flatten(), step, slots, PAGE, out, paths)
    nodes = torch.stack((step.ids_T, step.positions_T, step.columns_T, step.tree_mask_T, step.write_T, step.real_T), 1)
    on_M = paths.real_M.to(torch.int64)  # behind a path some of these may be any
    first = out.tokens_RD.flatten() * on_M, nodes_RD.flatten() * on_M, paths.token_M * on_M
    results = nodes, step.ints_TI, torch.stack(out[2:], 1), torch.stack((*first, *paths[1:]), 1), step.table_RP
    return *results, slots.tokens_SL[:, :CONTEXT], slots.ints_SI


def run_ref(**inputs: Any) -> tuple[Tensor, ...]:
    return _run(ref, build_inputs, **inputs)


def run_triton(**inputs: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.build_inputs import triton as input_kernels
    from thalweg.kernels.verify import triton

    return _run(triton, input_kernels, **inputs)


BACKENDS = with_triton(run_ref, run_triton)
