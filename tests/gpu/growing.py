"""Builds a dynamic tree from synthetic logits by kernels and by the reference, level by level, on a GPU or in Triton's
interpreter.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs.ref import INTS, SlotTensors
from thalweg.kernels.build_tree import ref
from thalweg.kernels.build_tree.ref import BuiltTree, TreeCandidates, TreeLevel

PAGE, CONTEXT, WIDTH = 16, 200, 300


class Scene(NamedTuple):
    """Slots, some of them near their end; logits of each level's nodes."""

    slot_E: Tensor
    fields: SlotTensors
    logits: list[Tensor]
    given_EW: Tensor
    state_TW: Tensor


def scene(
    many: int, branches: int, deepest: int, vocab: int, device: torch.device, generator: torch.Generator
) -> Scene:
    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    slots, nodes = many + 2, branches * (1 + branches * (deepest - 1))
    ints_SI = whole(0, 1 << 40, slots, len(INTS))
    ints_SI[:, 0] = whole(1, CONTEXT - 1, slots)
    ints_SI[:, 1] = ints_SI[:, 0] - 1
    ints_SI[:, 2] = (ints_SI[:, 0] + whole(1, 60, slots)).clamp(max=CONTEXT) * (whole(0, 5, slots) > 0)
    tokens_SL, table_SP = whole(0, 50, slots, CONTEXT + 1).to(torch.int32), whole(1, 99, slots, -(-CONTEXT // PAGE))
    fields = SlotTensors(
        whole(0, 9, slots, 3), tokens_SL, ints_SI, table_SP, torch.zeros(slots, 1 + nodes, 3, dtype=torch.int64)
    )
    logits = [
        torch.randn(many * (branches if level else 1), vocab, generator=generator) * 2 for level in range(deepest)
    ]
    state_TW = torch.randn(many * branches, WIDTH, generator=generator).bfloat16().float()
    state_TW[0, 7] = torch.inf
    given_EW = torch.randn(many, WIDTH, generator=generator).bfloat16().float()
    slot_E = torch.randperm(slots, generator=generator)[:many]
    held = SlotTensors(*(x.to(device) for x in fields))
    return Scene(slot_E.to(device), held, [x.to(device) for x in logits], given_EW.to(device), state_TW.to(device))


def grown(of: ModuleType, made: Scene, width: int, branches: int, ids_D: Tensor | None = None) -> list[Tensor]:
    """All that growing it leaves, of each level and in the end."""
    slot_E, fields, left = made.slot_E, SlotTensors(*(x.clone() for x in made.fields)), list[Tensor]()
    many, device, deepest = len(slot_E), slot_E.device, len(made.logits)
    ints_EI = fields.ints_SI.index_select(0, slot_E)
    nothing = torch.zeros(many, 1, dtype=torch.int64, device=device)
    level = TreeLevel(nothing, nothing, nothing, nothing.to(torch.float32))
    count = ref.first_candidate(deepest, branches)
    token_EC = torch.zeros(many, count, dtype=torch.int64, device=device)
    candidates = TreeCandidates(token_EC.to(torch.float32), token_EC, token_EC.clone())
    for depth, logits in enumerate(made.logits):
        top_children = of.top_children(logits, branches, ids_D)
        level, placed = of.expand_level(*top_children, level, depth, slot_E, ints_EI, fields.table_SP, PAGE, candidates)
        left += [*top_children, *level, *placed]
    trees = token_EC.new_zeros(many, min(width, count)), token_EC.new_zeros(many, min(width, count))
    found = BuiltTree(*trees, torch.zeros(many, dtype=torch.bool, device=device))
    of.store_best_tree(candidates, branches, made.state_TW, made.given_EW, slot_E, ints_EI, fields, found)
    return [*left, *candidates, *found, fields.tokens_SL[:, :CONTEXT], fields.ints_SI, fields.nodes_SN3]


def differences(of: ModuleType, made: Scene, width: int, branches: int, ids_D: Tensor | None = None) -> list[int]:
    """Which of what is left is not the reference's; scores round."""
    pairs = zip(grown(of, made, width, branches, ids_D), grown(ref, made, width, branches, ids_D), strict=True)
    return [i for i, (x, y) in enumerate(pairs) if not _same(x, y)]


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) if not x.is_floating_point() else torch.allclose(x, y, rtol=1e-5, atol=1e-4)


def impossible(of: ModuleType, device: torch.device) -> bool:
    """Whether of logits that are no numbers, or all but two of which are impossible, different tokens come, none of
    which may be.
    """
    logits_TD = torch.randn(3, 5000, device=device)
    logits_TD[0, 4999] = torch.nan
    logits_TD[1] = -torch.inf
    logits_TD[2, :4998] = -torch.inf
    score_TB, token_TB = of.top_children(logits_TD, 4, None)
    apart = all(len(set(tokens)) == 4 and min(tokens) >= 0 and max(tokens) < 5000 for tokens in token_TB.tolist())
    return apart and (score_TB > -torch.inf).sum(1).tolist() == [0, 0, 2]


def sound(of: ModuleType, device: torch.device) -> list[bool]:
    """Of trees of three ways and two levels: numbers everywhere; none behind the root; none behind its best child; its
    last child impossible, and so what is behind that.
    """
    branches, width = 3, 5
    parents = [0] * branches + [1 + i // branches for i in range(branches**2)]
    score_EC = -torch.arange(1.0, 1.0 + len(parents)).repeat(4, 1)
    score_EC[1] = score_EC[2, branches : 2 * branches] = score_EC[3, 2] = score_EC[3, -branches:] = -torch.inf
    parent_EC = torch.tensor(parents).repeat(4, 1)
    made = TreeCandidates(*(one.to(device) for one in (score_EC, parent_EC.clone(), parent_EC)))
    ints_SI = torch.tensor([[9, 8, 99, 0, 0, 0, 0, 0]]).repeat(4, 1)
    shapes = (4, 1), (4, CONTEXT + 1), (4, 4), (4, 1 + len(parents), 3)
    stop, tokens, table, nodes = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes)
    fields = SlotTensors(stop, tokens.to(torch.int32), ints_SI.to(device), table, nodes)
    out = BuiltTree(
        *(torch.zeros(4, width, dtype=torch.int64, device=device) for _ in range(2)), torch.zeros(4, device=device) > 0
    )
    state_TW, given_EW = torch.ones(4 * branches, 7, device=device), torch.ones(4, 7, device=device)
    slot_E = torch.arange(4, device=device)
    of.store_best_tree(made, branches, state_TW, given_EW, slot_E, fields.ints_SI.clone(), fields, out)
    return out.is_valid_E.tolist()
