"""Accepting trees of drafts: the accepted path, where it ends, and the state of the slots afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from thalweg.batch.batch import Group, RowExtent
from thalweg.batch.inputs import build_inputs
from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, SamplingNeeds, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.memory.planes import Planes, vector_plane
from thalweg.runner.accepted_path import compact_accepted_path, kv_mover
from thalweg.sampling import drafts
from thalweg.sampling.sample import REFERENCE, Sampled, accept
from thalweg.spec.drafter import DraftExtendInput
from thalweg.spec.tree import tree_masks_of

VOCAB, STOP, NODES = 10, 9, 6
SHAPE, GREEDY = TreeShape(3, 3, NODES), SamplingNeeds()
# the last known token is 3; drafts by node:      1  2  3  4  5  6
TOKENS, PARENTS = (4, 5, 6, 7, 5, 8), (0, 0, 1, 1, 3, 2)
# 3 → 4 → 6 → 5
#   → 5 → 8    7 (a child of 4)


def grown(slots: Slots, slot: int, tokens: tuple[int, ...] = TOKENS, parents: tuple[int, ...] = PARENTS) -> None:
    """Puts a tree behind the known tokens of a slot."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    masks = tree_masks_of(torch.tensor([parents]), torch.tensor([depth[1:]]), max(depth))[0, 1:]
    slots.nodes_SN3[slot, 1 : 1 + len(parents)] = torch.stack(
        (torch.tensor(parents), torch.tensor(depth[1:]), masks), 1
    )
    known = int(slots.length[slot])
    slots.tokens_SL[slot, known : known + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    slots.num_drafts[slot] = len(tokens)


def scene(end: int = 40, shape: TreeShape = SHAPE, **fields: object) -> Slots:
    """A greedy slot, number 1, of three known tokens, of which one is output."""
    slots = Slots(2, 64, torch.device("cpu"), tree=shape)
    params = SamplingParams(**{"temperature": 0.0} | fields)  # type: ignore[arg-type]
    slots.bind([Bind(1, (1, 2, 3), 2, 2, end, 5, (STOP,), params)])
    return slots


def logits_of(drawn: dict[int, int]) -> Tensor:
    """Of root and nodes; those that are not named draw token 0."""
    return torch.nn.functional.one_hot(torch.tensor([drawn.get(node, 0) for node in range(1 + NODES)]), VOCAB).float()


def verify(slots: Slots, logits: Tensor, needs: SamplingNeeds = GREEDY, masks: GrammarMasks | None = None) -> Sampled:
    index = torch.tensor([1])
    return accept(logits, slots, index, slots.ints_SI[index], needs, slots.context, masks)


def tokens(found: Sampled) -> list[int]:
    return found.tokens_EQ[0, : int(found.count_E)].tolist()


def nodes(found: Sampled) -> list[int]:
    assert found.nodes_EQ is not None
    return found.nodes_EQ[0, : int(found.count_E)].tolist()


@pytest.mark.parametrize(
    ("drawn", "wanted", "path"),
    [
        ({0: 1}, [1], [0]),
        ({0: 4, 1: 0}, [4, 0], [0, 1]),
        ({0: 4, 1: 6, 3: 5, 5: 2}, [4, 6, 5, 2], [0, 1, 3, 5]),
        ({0: 4, 1: 7, 4: 1}, [4, 7, 1], [0, 1, 4]),
        ({0: 5, 2: 8, 6: 6}, [5, 8, 6], [0, 2, 6]),
        ({0: 5, 2: 6, 3: 5, 5: 5}, [5, 6], [0, 2]),  # 6 stands behind 4 only
        ({0: 6, 1: 6, 3: 5}, [6], [0]),  # what other nodes draw does not matter
    ],
)
def test_the_path_that_is_drawn(drawn: dict[int, int], wanted: list[int], path: list[int]) -> None:
    slots = scene()
    grown(slots, 1)
    found = verify(slots, logits_of(drawn))
    assert tokens(found) == wanted and nodes(found) == path and not found.done_E
    assert slots.length[1] == 3 + len(wanted) and slots.num_computed[1] == slots.length[1] - 1
    assert slots.tokens_SL[1, 3 : 3 + len(wanted)].tolist() == wanted


def test_of_equal_children_one_is_taken() -> None:
    """Or a path would have two nodes of one depth, and tokens that nobody drew."""
    slots = scene()
    grown(slots, 1, tokens=(4, 4, 6, 6, 5, 8), parents=(0, 0, 1, 2, 3, 4))
    found = verify(slots, logits_of({0: 4, 1: 6, 2: 6, 3: 5, 4: 5}))
    assert tokens(found) == [4, 6, 5] and nodes(found) == [0, 2, 4]
    assert slots.tokens_SL[1, 3:6].tolist() == [4, 6, 5] and slots.length[1] == 6


WHOLE = {0: 4, 1: 6, 3: 5, 5: 2}


def test_only_nodes_that_were_made() -> None:
    for made, wanted in ((6, [4, 6, 5, 2]), (5, [4, 6, 5, 2]), (4, [4, 6, 5]), (2, [4, 6]), (0, [4])):
        slots = scene()
        grown(slots, 1)
        slots.num_drafts[1] = made
        assert tokens(verify(slots, logits_of(WHOLE))) == wanted, made


def test_a_stop_id_within_the_path_ends_it() -> None:
    slots = scene()
    grown(slots, 1, tokens=(4, 5, STOP, 7, 5, 8))
    found = verify(slots, logits_of({0: 4, 1: STOP, 3: 5, 5: 2}))
    assert tokens(found) == [4, STOP] and found.done_E and slots.end[1] == 0


def test_a_path_is_cut_at_the_end_of_the_sequence() -> None:
    """Nodes whose columns lie at the end or beyond were not computed, and nothing of them is believed."""
    for end, wanted, done in ((4, [4], True), (5, [4, 6], True), (6, [4, 6, 5], True), (7, [4, 6, 5], False)):
        slots = scene(end=end)
        grown(slots, 1)
        found = verify(slots, logits_of(WHOLE))
        assert (tokens(found), bool(found.done_E)) == (wanted, done), end
    slots = scene(end=8)
    grown(slots, 1)
    assert tokens(verify(slots, logits_of(WHOLE))) == [4, 6, 5, 2]


def test_a_slot_that_has_ended_is_left_alone() -> None:
    slots = scene()
    grown(slots, 1)
    slots.end[1] = 0
    before = slots.tokens_SL[1, :64].clone(), slots.ints_SI[1].clone()
    found = verify(slots, logits_of(WHOLE))
    assert not found.count_E and found.done_E
    assert torch.equal(slots.tokens_SL[1, :64], before[0]) and torch.equal(slots.ints_SI[1], before[1])


def test_the_minimum_length_turns_along_the_path() -> None:
    slots = scene(min_tokens=3)  # known is one token of output: the stop id may be the fourth
    grown(slots, 1)
    logits = logits_of({0: 4, 1: 6, 3: 5, 5: 2})
    logits[:, STOP] = 5.0
    assert tokens(verify(slots, logits, SamplingNeeds(biased=True))) == [4, 6, STOP]


def test_penalties_of_a_node_are_those_of_its_sequence() -> None:
    """Of each as a slot of its own that knows its path; of several rows, and drafts that are known, repeated or not
    made.
    """
    fields = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    slots = Slots(4, 64, torch.device("cpu"), tree=SHAPE)
    for slot, known in ((1, (1, 2, 3)), (3, (4, 4, 5, 6, 7))):
        slots.bind([Bind(slot, known, 2, len(known) - 1, 40, 5, (STOP,), SamplingParams(**fields))])  # type: ignore[arg-type]
        grown(slots, slot, tokens=(4, 5, 4, 7, 4, 8))
    index, logits = torch.tensor([3, 1]), torch.randn(2 * (1 + NODES), VOCAB)
    along = drafts.sampled_positions(slots, index, slots.ints_SI[index], 1 + NODES)
    edited, needs = logits.clone(), SamplingNeeds(penalised=True)
    REFERENCE.edit_logits(
        edited, slots, along.slot_N, along.ints_NI, needs, 64, None, drafts.tree_paths(slots, along, 1 + NODES)
    )
    for n, (row, wanted) in enumerate(zip(logits, edited, strict=True)):
        slot, node, path = int(index[n // (1 + NODES)]), n % (1 + NODES), list[int]()
        while node:
            path.insert(0, (4, 5, 4, 7, 4, 8)[node - 1])
            node = PARENTS[node - 1]
        known = slots.tokens_SL[slot, : slots.length[slot]].tolist()
        alone = Slots(1, 64, torch.device("cpu"))
        alone.bind([Bind(0, (*known, *path), 2, 1, 40, 5, (), SamplingParams(**fields))])  # type: ignore[arg-type]
        mine = row.unsqueeze(0).clone()
        REFERENCE.edit_logits(mine, alone, torch.tensor([0]), alone.ints_SI, needs, 64, None)
        assert torch.equal(mine[0], wanted), (slot, path)


def test_penalties_count_the_path_alone() -> None:
    """5 stands in the tree beside the path, and within it; what other paths have is not counted."""
    slots = scene(frequency_penalty=1.0)
    grown(slots, 1)
    logits = torch.zeros(1 + NODES, VOCAB)
    logits[:, 5] = 0.5
    logits[0, 4], logits[1, 6] = 2.0, 2.0
    # behind 4 6 the 5 of node 2 must not be counted; behind 4 6 5 that of node 5 must
    assert tokens(verify(slots, logits, SamplingNeeds(penalised=True))) == [4, 6, 5, 0]
    slots = scene(frequency_penalty=1.0)
    grown(slots, 1)
    logits = torch.zeros(1 + NODES, VOCAB)
    logits[:, 5], logits[:, 8] = 1.5, 0.6
    assert tokens(verify(slots, logits, SamplingNeeds(penalised=True))) == [5, 8, 5], (
        "1.5 less one for the 5 before it: 0.5, and 0.6 is left of 8"
    )


def test_a_mask_for_each_node() -> None:
    slots = scene()
    grown(slots, 1)
    bits = np.full((2, 1), -1, dtype=np.int32)
    bits[0] &= ~(1 << 6)  # behind node 1
    bits[1] &= ~(1 << 0)  # behind node 4
    logits = logits_of({0: 4, 1: 6})
    logits[1, 7] = 0.5
    found = verify(slots, logits, masks=GrammarMasks((1, 4), bits))
    assert tokens(found) == [4, 7, 1]


def test_log_probabilities_are_those_of_the_path() -> None:
    slots = scene()
    grown(slots, 1)
    logits = (
        logits_of({0: 4, 1: 7, 4: 1}) + torch.rand(1 + NODES, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.3
    )
    found = verify(slots, logits.clone(), SamplingNeeds(logprobs=2))
    want = logits.log_softmax(-1)
    assert found.logprob_N is not None and tokens(found) == [4, 7, 1]
    torch.testing.assert_close(found.logprob_N[:3], torch.stack([want[0, 4], want[1, 7], want[4, 1]]))


def test_a_row_without_drafts_beside_a_tree() -> None:
    """Its only position is repeated, as many times as the tree has nodes."""
    slots = scene()
    slots.bind([Bind(0, (1, 2), 2, 1, 40, 0, (STOP,), SamplingParams(temperature=0.0))])
    grown(slots, 1)
    logits = torch.cat([logits_of(dict.fromkeys(range(1 + NODES), 8)), logits_of(WHOLE)])
    index = torch.tensor([0, 1])
    found = accept(logits, slots, index, slots.ints_SI[index], SamplingNeeds(), slots.context)
    assert found.count_E.tolist() == [1, 4] and found.tokens_EQ[0, 0] == 8


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_those_of_plain_decoding(seed: int) -> None:
    """Of a Markov chain, whatever the trees: the coins are those of the positions."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    target_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    target_VV[:, STOP] = -20.0
    params, needs = {"temperature": 0.8, "top_p": 0.9}, SamplingNeeds(random=True, truncated=True)
    plain, grove = scene(**params), scene(**params)
    index, accepted = torch.tensor([1]), 0
    while plain.end[1]:
        last = int(plain.tokens_SL[1, plain.length[1] - 1])
        accept(target_VV[last : last + 1].clone(), plain, index, plain.ints_SI[index], needs, plain.context)
    while grove.end[1]:
        parents = tuple(rng.randrange(max(node - 3, 0), node) for node in range(1, 1 + NODES))
        drafts: list[int] = []
        for node, parent in enumerate(parents):
            siblings = {drafts[i] for i in range(node) if parents[i] == parent}
            drafts.append(rng.choice([token for token in range(VOCAB) if token not in siblings]))
        if max(depths(parents)) > SHAPE.max_depth:
            continue
        grown(grove, 1, tuple(drafts), parents)
        before = [int(grove.tokens_SL[1, grove.length[1] - 1]), *drafts]
        found = accept(target_VV[before].clone(), grove, index, grove.ints_SI[index], needs, grove.context)
        accepted += int(found.count_E) - 1
    assert torch.equal(plain.tokens_SL[1, :40], grove.tokens_SL[1, :40]) and int(grove.length[1]) == 40
    assert accepted > 0


def depths(parents: tuple[int, ...]) -> list[int]:
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


# ---- what a drafter sees, and what the pages hold


def test_a_tree_becomes_a_chain() -> None:
    """Behind a prompt's chunk; the path crosses the border of a page."""
    slots = Slots(2, 200, torch.device("cpu"), tree=SHAPE)
    params = SamplingParams(temperature=0.0)
    slots.bind([Bind(0, tuple(range(5)), 5, 0, 40, 0, (), params), Bind(1, (*[1] * 62, 3), 2, 62, 190, 0, (), params)])
    slots.append([PageAppend(0, 0, (7,)), PageAppend(1, 0, (4, 2))])
    grown(slots, 1)
    rows = (Row(1, 1, 62, 1 + NODES, NODES, True), Row(0, 0, 0, 3, 0, False))
    plan = StepPlan(0, 0, rows, max_kv_len=62 + 1 + NODES)
    inputs = build_inputs(plan, slots)
    batch = inputs.batch
    assert batch.tree is not None and batch.tree.rows == 1
    assert batch.tree.columns_T.tolist() == [*range(62, 69), 0, 1, 2]
    assert batch.positions_T.tolist() == [62, 63, 63, 64, 64, 65, 64, 0, 1, 2]
    specs = (vector_plane("latent", 0, 1, torch.float32),)
    planes = Planes(specs, 9)
    planes.write("latent", 0, batch.write_T, torch.arange(10.0).unsqueeze(1))
    hidden = torch.arange(10.0).unsqueeze(1)
    found = accept(
        logits_of({0: 5, 2: 8, 6: 6}),
        slots,
        inputs.slot_E,
        inputs.ints_EI,
        SamplingNeeds(),
        plan.max_kv_len,
        sampler=REFERENCE,
    )
    assert found.nodes_EQ is not None and tokens(found) == [5, 8, 6]
    given = inputs.slot_E, inputs.ints_EI, found.nodes_EQ, found.count_E
    seen = compact_accepted_path(DraftExtendInput(plan, batch, hidden), *given, slots, kv_mover(planes, specs))
    kept = planes.tokens("latent", 0)[:, 0]
    assert kept[[4 * PAGE + 62, 4 * PAGE + 63, 2 * PAGE]].tolist() == [0.0, 2.0, 6.0], "root, then nodes 2 and 6"
    assert kept[[7 * PAGE, 7 * PAGE + 1, 7 * PAGE + 2]].tolist() == [7.0, 8.0, 9.0]
    compacted = seen.batch
    assert compacted.tree is None and compacted.groups == (Group(0, 1, 0, 4, 66), Group(1, 1, 4, 3, 3))
    assert compacted.extents == (RowExtent(4, 66), RowExtent(3, 3))
    assert (
        compacted.ids_T.tolist() == [3, 5, 8, 0, 0, 1, 2]
        and compacted.real_T.tolist() == [True] * 3 + [False] + [True] * 3
    )
    assert compacted.positions_T.tolist() == [62, 63, 64, 0, 0, 1, 2]
    assert compacted.write_T.tolist() == [
        4 * PAGE + 62,
        4 * PAGE + 63,
        2 * PAGE,
        0,
        7 * PAGE,
        7 * PAGE + 1,
        7 * PAGE + 2,
    ]
    assert seen.hidden_TH[:, 0].tolist() == [0.0, 2.0, 6.0, 0.0, 7.0, 8.0, 9.0]
    assert [(row.n, row.num_drafts) for row in seen.plan.rows] == [(4, 3), (3, 0)]


def test_a_chain_has_no_tree_state() -> None:
    """One draft, or a shape of one branch: no masks, no moves."""
    slots = scene()
    grown(slots, 1, (4,), (0,))
    slots.append([PageAppend(1, 0, (1,))])
    plan = StepPlan(0, 0, (Row(1, 1, 2, 2, 1, True),), max_kv_len=4)
    inputs = build_inputs(plan, slots)
    assert inputs.batch.tree is None and inputs.batch.columns_T is inputs.batch.positions_T
    found = verify(slots, logits_of({0: 4, 1: 6})[:2])
    assert tokens(found) == [4, 6] and found.nodes_EQ is None
    slots = scene(shape=TreeShape(1, 3, 3))
    slots.append([PageAppend(1, 0, (1,))])
    slots.num_drafts[1] = 3
    assert build_inputs(StepPlan(0, 0, (Row(1, 1, 2, 4, 3, True),), max_kv_len=6), slots).batch.tree is None
    assert slots.nodes_SN3.shape[1] == 1
