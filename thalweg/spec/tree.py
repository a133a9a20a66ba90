"""Drafts by a head that part ways: trees whose nodes are the head's best guesses behind each other.

A dynamic tree (EAGLE-2; Li et al. 2024, arXiv 2406.16858, §4) grows where the head is most certain: of each level the few nodes with the best
cumulative score are expanded, and of all that were made the best become the tree, by the same score. A static one has the same form in every step. A
score is the log-probability of a path under the head; for a row that samples, under its distribution with the coins that the target will draw with
(`sampling.random`), so that the children of a node are the best few of the race that the target runs.

The head's entries of what it expands lie behind the known tokens of its slot, in an order of their own, and are written again when tokens are
accepted.

Letters: E rows, M nodes of a level that are expanded, B children of each, C candidates, K nodes of the tree, W of a state, V vocabulary, D of the
head."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group, Tree
from thalweg.batch.prepare import gather
from thalweg.batch.slots import Slots
from thalweg.batch.upload import upload
from thalweg.core.plan import PAGE, Needs
from thalweg.core.tree import TreeShape
from thalweg.memory.planes import Planes
from thalweg.models.head import Head
from thalweg.sampling.drafts import Drawing
from thalweg.sampling.odds import Odds
from thalweg.spec.drafter import Asked, Proposed
from thalweg.spec.unroll import HIDDEN, Unrolled, spread, tokens_of

AT_ONCE = 256  # nodes whose logits stand beside each other: bounds what a level takes


class Node(NamedTuple):
    """Of a static tree. parent: its number; rank: which child of it, from 0 on; depth: 1 behind the root."""

    parent: int
    rank: int
    depth: int


class Stage(NamedTuple):
    """What a static tree gets by expanding the nodes of one depth. nodes: their numbers, and before: where their parents stand among those of the
    stage before. children: numbers of what they get, with behind: where their parents stand among `nodes`, and rank: which children they are."""

    nodes: tuple[int, ...]
    before: tuple[int, ...]
    children: tuple[int, ...]
    behind: tuple[int, ...]
    rank: tuple[int, ...]


class Rows(NamedTuple):
    """Whom trees are grown for. ints_EI: of their slots; state_EW: behind the token before the last known one."""

    slot_E: Tensor
    ints_EI: Tensor
    state_EW: Tensor
    reach: int
    needs: Needs


class Level(NamedTuple):
    """Nodes that are expanded together. ahead_EM: columns between the root's and theirs; hides_EM: see `batch.Tree`; depth: of all of them."""

    ids_EM: Tensor
    state_EMW: Tensor
    ahead_EM: Tensor
    hides_EM: Tensor
    depth: int


class Best(NamedTuple):
    """What expanding a level gave: states of its nodes, scores and tokens of their best children, best first."""

    state_EMW: Tensor
    score_EMB: Tensor
    token_EMB: Tensor


class Grown(NamedTuple):
    """A tree of each row: tokens, parents, depths and what is hidden, int64 [E, K]; the states of what was expanded last."""

    token_EK: Tensor
    parent_EK: Tensor
    depth_EK: Tensor
    hides_EK: Tensor
    state_EMW: Tensor


class Branching(Unrolled):
    """The `Drafter` of one head that drafts trees of up to this shape. One draft is a chain."""

    def __init__(self, head: Head, drawing: Drawing, shape: TreeShape, apart: bool = False) -> None:
        super().__init__(head, drawing, apart)
        self.shape = shape
        self.order = () if shape.dynamic else static(shape)

    def propose(self, asked: Asked, width: int, slots: Slots, planes: Planes) -> Proposed | None:
        if not self.shape.parts(1 + width):
            return super().propose(asked, width, slots, planes)
        slot_E = asked.slot_E
        ints_EI, state_EW = slots.ints_SI.index_select(0, slot_E), slots.extra[HIDDEN].index_select(0, slot_E)
        rows = Rows(slot_E, ints_EI, state_EW, asked.reach, asked.needs)
        grow = self._dynamic if self.shape.dynamic else self._static
        token_EK, *shape, state_EMW = grow(rows, width, slots, planes)
        nodes, columns = token_EK.shape[1], slots.tokens_SL.shape[1]
        slots.made.index_fill_(0, slot_E, nodes)
        slots.nodes_SN3[:, 1 : 1 + nodes].index_copy_(0, slot_E, torch.stack(shape, 2))
        column_EK = rows.ints_EI[:, :1] + torch.arange(nodes, device=slot_E.device)
        place_EK = slot_E.unsqueeze(1) * columns + column_EK.clamp(max=slots.context)
        slots.tokens_SL.view(-1).index_copy_(0, place_EK.flatten(), token_EK.flatten().to(torch.int32))
        sound_E = state_EMW.isfinite().flatten(1).all(1) | ~rows.state_EW.isfinite().all(1)
        return Proposed(token_EK, slots.made.index_select(0, slot_E), sound_E, shape[0])

    def _static(self, rows: Rows, width: int, slots: Slots, planes: Planes) -> Grown:
        order, device, many = self.order[:width], rows.slot_E.device, len(rows.slot_E)
        forms = [node.parent for node in order], [node.depth for node in order]
        parent_1K, depth_1K = upload(forms, torch.int64, device).chunk(2)
        hides_1N = hides_of(parent_1K, depth_1K, self.shape.deepest)
        root_E1 = self._known(rows, slots)
        token_EN, state_EMW = root_E1.repeat(1, 1 + len(order)), rows.state_EW.unsqueeze(1)
        for depth, stage in enumerate(stages(order)):
            node_M, before_M = upload((stage.nodes, stage.before), torch.int64, device)
            places = node_M.expand(many, -1), hides_1N[0, node_M].expand(many, -1)
            level = Level(token_EN[:, node_M], state_EMW[:, before_M], *places, depth)
            state_EMW, _, token_EMB = self._expanded(level, rows, slots, planes)
            children, behind, rank = upload((stage.children, stage.behind, stage.rank), torch.int64, device)
            token_EN[:, children] = token_EMB[:, behind, rank]
        parent_EK, depth_EK, hides_EK = (x.expand(many, -1) for x in (parent_1K, depth_1K, hides_1N[:, 1:]))
        return Grown(token_EN[:, 1:], parent_EK, depth_EK, hides_EK, state_EMW)

    def _dynamic(self, rows: Rows, width: int, slots: Slots, planes: Planes) -> Grown:
        """Candidates are numbered as they are made, from 1 on, so that parents have smaller numbers; 0 is the root."""
        branches, many = self.shape.branches, len(rows.slot_E)
        nothing_E1 = torch.zeros(many, 1, dtype=torch.int64, device=rows.slot_E.device)
        level = Level(self._known(rows, slots), rows.state_EW.unsqueeze(1), nothing_E1, nothing_E1, 0)
        number_EM, score_EM1 = nothing_E1, nothing_E1.to(torch.float32).unsqueeze(2)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        parents: list[Tensor] = []
        depths: list[Tensor] = []
        count = 0
        deepest = min(self.shape.deepest, width)
        for depth in range(deepest):
            state_EMW, score_EMB, token_EMB = self._expanded(level, rows, slots, planes)
            score_EMB = score_EMB + score_EM1
            tokens.append(token_EMB.flatten(1))
            scores.append(score_EMB.flatten(1))
            parents.append(number_EM.repeat_interleave(branches, 1))
            if depth + 1 < deepest:
                best_EM = scores[-1].topk(min(branches, scores[-1].shape[1]), 1).indices
                number_EM, score_EM1 = best_EM + count + 1, scores[-1].gather(1, best_EM).unsqueeze(2)
                level = _next(level, state_EMW, tokens[-1].gather(1, best_EM), best_EM, branches)
            depths.append(torch.full_like(tokens[-1], depth + 1))
            count += tokens[-1].shape[1]
        made = torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1)
        return Grown(*_ranked(torch.cat(scores, 1), *made, width, deepest), state_EMW)

    def _known(self, rows: Rows, slots: Slots) -> Tensor:
        """int64 [E, 1]: the last known tokens, the roots."""
        return slots.tokens_SL[rows.slot_E, rows.ints_EI[:, 1]].to(torch.int64).unsqueeze(1)

    def _expanded(self, level: Level, rows: Rows, slots: Slots, planes: Planes) -> Best:
        many, nodes = level.ids_EM.shape
        batch = self._batch(level, rows, slots)
        state_TW = self.steps.forward(batch.ids_T, level.state_EMW.flatten(0, 1), batch, planes)
        state_EMW = state_TW.view(many, nodes, -1)
        at_once = max(AT_ONCE // nodes, 1)
        chunks = zip(*(torch.split(x, at_once) for x in (state_EMW, rows.slot_E, rows.ints_EI)), strict=True)
        parts = [self._best(state, slot, ints, level.depth, rows.needs, slots) for state, slot, ints in chunks]
        score_EMB, token_EMB = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
        return Best(state_EMW, score_EMB, token_EMB)

    def _best(
        self, state_EMW: Tensor, slot_E: Tensor, ints_EI: Tensor, depth: int, needs: Needs, slots: Slots
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [E, M, B] of the likeliest children. What is no number counts as impossible: a tree must be one whatever a
        drafter computes."""
        logits_TD, nodes = self.head.logits(state_EMW.flatten(0, 1)), state_EMW.shape[1]
        if needs.random:
            logits_TV = spread(logits_TD, self.head)
            logits_TD = _raced(self.drawing.odds, logits_TV, slots, slot_E, ints_EI, depth, needs.truncated)
        score_TD = logits_TD.log_softmax(-1).nan_to_num_(nan=-torch.inf)
        score_TB, token_TB = score_TD.topk(self.shape.branches, -1)
        if not needs.random:
            token_TB = tokens_of(token_TB, self.head)
        by_row = -1, nodes, self.shape.branches
        return score_TB.view(by_row), token_TB.view(by_row)

    def _batch(self, level: Level, rows: Rows, slots: Slots) -> Batch:
        """The nodes of a level as a step."""
        many, nodes = level.ids_EM.shape
        slot_T, ints_TI = rows.slot_E.repeat_interleave(nodes), rows.ints_EI.repeat_interleave(nodes, 0)
        column_T, hides_T = (rows.ints_EI[:, 1:2] + level.ahead_EM).flatten(), level.hides_EM.flatten()
        _, column_T, write_T, real_T = gather(slot_T, column_T, ints_TI, slots.tokens_SL, slots.table_SP)
        reach = min(rows.reach + 1 + (self.shape.room(slots.tree.nodes) if level.depth else 0), slots.context)
        return Batch(
            ids_T=level.ids_EM.flatten() * real_T,
            positions_T=(ints_TI[:, 1] + level.depth) * real_T,
            write_T=write_T,
            table_RP=slots.table_SP[:, : -(-reach // PAGE)].index_select(0, rows.slot_E),
            real_T=real_T,
            emit_N=slot_T,
            groups=(Group(0, many, 0, nodes, reach),),
            extents=(Extent(nodes, reach),) * many,
            tree=Tree(column_T, hides_T * real_T, many) if level.depth else None,
        )


def _raced(
    odds: Odds, logits_TV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, depth: int, truncated: bool
) -> Tensor:
    """Logits of the rows that sample, as they stand in the race that draws the token behind each node; its coins are the target's."""
    nodes = len(logits_TV) // len(slot_E)
    slot_T, ints_TI = slot_E.repeat_interleave(nodes), ints_EI.repeat_interleave(nodes, 0)
    scaled_TV = odds.tempered(logits_TV, slots, slot_T, ints_TI, truncated)
    race_TV = odds.raced(scaled_TV, ints_EI[:, 3], ints_EI[:, 0] + depth)
    return torch.where(slots.floats_SF[:, :1].index_select(0, slot_T) == 0, logits_TV, race_TV)


def _next(level: Level, state_EMW: Tensor, ids_EM: Tensor, best_EM: Tensor, branches: int) -> Level:
    """The level of these children. Each is entered behind all that were expanded before."""
    parent_EM, count = best_EM // branches, best_EM.shape[1]
    first = 1 + level.depth * branches
    ahead_EM = torch.arange(first, first + count, device=ids_EM.device).expand_as(best_EM)
    further_EM = ahead_EM - level.ahead_EM.gather(1, parent_EM)
    hides_EM = hidden_behind(level.hides_EM.gather(1, parent_EM), further_EM)
    state_EMW = state_EMW.gather(1, parent_EM.unsqueeze(2).expand(-1, -1, state_EMW.shape[2]))
    return Level(ids_EM, state_EMW, ahead_EM, hides_EM, level.depth + 1)


def _ranked(
    score_EC: Tensor, token_EC: Tensor, parent_EC: Tensor, depth_EC: Tensor, width: int, deepest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, depths and what is hidden, of the best candidates, best first: a parent is never worse than its children, and comes first
    where they are equal."""
    order_EK = score_EC.sort(dim=1, descending=True, stable=True).indices
    number_EC = torch.empty_like(order_EK).scatter_(
        1, order_EK, torch.arange(1, order_EK.shape[1] + 1, device=order_EK.device).expand_as(order_EK)
    )
    order_EK = order_EK[:, :width]
    parent_EK = torch.nn.functional.pad(number_EC, (1, 0)).gather(1, parent_EC.gather(1, order_EK))
    depth_EK = depth_EC.gather(1, order_EK)
    return token_EC.gather(1, order_EK), parent_EK, depth_EK, hides_of(parent_EK, depth_EK, deepest)[:, 1:]


def hides_of(parent_EK: Tensor, depth_EK: Tensor, deepest: int) -> Tensor:
    """int64 [E, 1 + K]: what each node hides, the root first, if nodes stand behind each other in their order."""
    hides_EN = torch.nn.functional.pad(torch.zeros_like(parent_EK), (1, 0))
    further_EK = torch.arange(1, parent_EK.shape[1] + 1, device=parent_EK.device) - parent_EK
    for depth in range(1, deepest + 1):
        behind_EK = hidden_behind(hides_EN.gather(1, parent_EK), further_EK)
        hides_EN[:, 1:] = torch.where(depth_EK == depth, behind_EK, hides_EN[:, 1:])
    return hides_EN


def hidden_behind(hides: Tensor, further: Tensor) -> Tensor:
    """What a child hides that stands so many columns further than its parent, which hides this: that, and all between them."""
    return (hides << further) | ((1 << further) - 2)


def static(shape: TreeShape) -> tuple[Node, ...]:
    """The nodes of a full tree whose paths have the lowest sums of ranks, the first being 1."""
    found: list[Node] = []
    waiting: list[tuple[int, tuple[int, ...], int]] = [(1 + rank, (rank,), 0) for rank in range(shape.branches)]
    while waiting and len(found) < shape.nodes:
        cost, path, parent = heappop(waiting)
        found.append(Node(parent, path[-1], len(path)))
        if len(path) < shape.deepest:
            for rank in range(shape.branches):
                heappush(waiting, (cost + 1 + rank, (*path, rank), len(found)))
    return tuple(found)


def stages(order: Sequence[Node]) -> list[Stage]:
    """How a static tree of these nodes is grown."""
    depths, inner = (0, *(node.depth for node in order)), {node.parent for node in order}
    found: list[Stage] = []
    nodes: tuple[int, ...] = (0,)
    before: tuple[int, ...] = (0,)
    for depth in range(max(depths)):
        children = tuple(i for i, own in enumerate(depths) if own == depth + 1)
        behind = tuple(nodes.index(order[i - 1].parent) for i in children)
        found.append(Stage(nodes, before, children, behind, tuple(order[i - 1].rank for i in children)))
        going = [(i, place) for i, place in zip(children, behind, strict=True) if i in inner]
        nodes, before = tuple(i for i, _ in going), tuple(place for _, place in going)
    return found
