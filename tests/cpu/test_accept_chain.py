"""Accepting a chain of drafts: where acceptance stops and where sequences are truncated. `test_acceptance_rules` tests
the distribution of tokens.
"""

from __future__ import annotations

import torch

from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.sampling.sample import Sampled, accept

VOCAB, STOP = 8, 7


def verify(
    drafts: list[int], drawn: list[int], made: int | None = None, end: int = 40, **fields: object
) -> tuple[list[int], bool, Slots]:
    """A greedy slot of three known tokens whose target draws `drawn`, one more than there are drafts."""
    slots = Slots(2, 64, torch.device("cpu"))
    params = SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]
    slots.bind([Bind(1, (1, 2, 3), 2, 2, end, 0, (STOP,), params)])
    slots.tokens_SL[1, 3 : 3 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    slots.num_drafts[1] = len(drafts) if made is None else made
    logits = torch.nn.functional.one_hot(torch.tensor(drawn), VOCAB).float()
    index, needs = torch.tensor([1]), SamplingNeeds(biased=params.min_tokens > 0)
    found: Sampled = accept(logits, slots, index, slots.ints_SI[index], needs, slots.context)
    count = int(found.count_E)
    return found.tokens_EQ[0, :count].tolist(), bool(found.done_E), slots


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    assert verify([4, 5, 6], [4, 5, 6, 2])[:2] == ([4, 5, 6, 2], False)
    assert verify([4, 5, 6], [4, 2, 6, 2])[:2] == ([4, 2], False)
    tokens, done, slots = verify([4, 5, 6], [0, 5, 6, 2])
    assert (tokens, done) == ([0], False)
    assert slots.length[1] == 4 and slots.num_computed[1] == 3 and slots.tokens_SL[1, 3] == 0


def test_only_as_many_drafts_as_were_made() -> None:
    assert verify([4, 5, 6], [4, 5, 6, 2], made=1)[0] == [4, 5]
    assert verify([4, 5, 6], [4, 5, 6, 2], made=0)[0] == [4]


def test_a_stop_id_within_the_path_ends_it() -> None:
    tokens, done, slots = verify([4, STOP, 6], [4, STOP, 6, 2])
    assert (tokens, done) == ([4, STOP], True) and slots.end[1] == 0 and slots.length[1] == 5


def test_a_path_is_cut_at_the_end_of_the_sequence() -> None:
    for end, tokens in ((4, [4]), (5, [4, 5]), (6, [4, 5, 6]), (7, [4, 5, 6, 2])):
        assert verify([4, 5, 6], [4, 5, 6, 2], end=end)[:2] == (tokens, True), end
    assert verify([4, 5, 6], [4, 5, 6, 2], end=8)[:2] == ([4, 5, 6, 2], False)
    assert verify([4, STOP, 6], [4, STOP, 6, 2], end=4)[:2] == ([4], True)


def test_the_minimum_length_turns_within_the_path() -> None:
    """Known are three tokens, of them one of output: the stop id may be the fourth of output at the earliest."""
    bias = ((STOP, 10.0), (0, 5.0))  # where the stop id may not come, token 0 does
    assert verify([0, 0, 0], [1, 1, 1, 1], min_tokens=3, logit_bias=bias)[:2] == ([0, 0, STOP], True)
    assert verify([0, 0, 0], [1, 1, 1, 1], min_tokens=5, logit_bias=bias)[:2] == ([0, 0, 0, 0], False)


def test_a_slot_that_has_ended_is_left_alone() -> None:
    slots = verify([4, STOP], [4, STOP, 6])[2]
    before = slots.tokens_SL[1, :64].clone(), slots.ints_SI[1].clone()
    index = torch.tensor([1])
    found = accept(torch.randn(3, VOCAB), slots, index, slots.ints_SI[index], SamplingNeeds(), slots.context)
    assert not found.count_E and found.done_E
    assert torch.equal(slots.tokens_SL[1, :64], before[0]) and torch.equal(slots.ints_SI[1], before[1])


def test_penalties_count_the_drafts_before_each_position() -> None:
    """A token that the path has had twice already is penalised twice."""
    slots = Slots(1, 64, torch.device("cpu"))
    slots.bind([Bind(0, (1, 2), 1, 1, 40, 0, (), SamplingParams(temperature=0.0, frequency_penalty=1.0))])
    slots.tokens_SL[0, 2:4] = 4
    slots.num_drafts[0] = 2
    logits = torch.zeros(3, VOCAB)
    logits[:, 4], logits[:, 6] = 1.5, 0.0
    index = torch.tensor([0])
    found = accept(logits, slots, index, slots.ints_SI[index], SamplingNeeds(penalised=True), slots.context)
    assert found.tokens_EQ[0, : int(found.count_E)].tolist() == [4, 4, 0]  # 1.5, 0.5, then -0.5 against 0


def test_rows_of_a_batch_accept_what_each_accepts_alone() -> None:
    """Rows of equal and of different lengths, with all drafts right, some, and none."""
    drafts, ends = [4, 5, 6], (40, 40, 40, 40, 6)
    drawn = ([4, 5, 6, 2], [4, 2, 6, 2], [0, 5, 6, 2], [4, 5, 0, 2], [4, 5, 6, 2])
    for lengths in ((3, 3, 3, 3, 3), (3, 4, 5, 3, 4), (5, 5, 5, 3, 3)):
        slots, count = Slots(6, 64, torch.device("cpu")), len(drawn)
        for i, length in enumerate(lengths):
            prompt = tuple(range(1, length + 1))
            params, end = SamplingParams(temperature=0.0), ends[i] + length - 3
            slots.bind([Bind(i, prompt, length - 1, length - 1, end, 0, (STOP,), params)])
            slots.tokens_SL[i, length : length + 3] = torch.tensor(drafts, dtype=torch.int32)
            slots.num_drafts[i] = 3 if i != 3 else 1
        logits = torch.nn.functional.one_hot(torch.tensor(drawn).flatten(), VOCAB).float()
        index = torch.arange(count)
        found = accept(logits, slots, index, slots.ints_SI[index], SamplingNeeds(), slots.context)
        tokens = [found.tokens_EQ[i, : int(found.count_E[i])].tolist() for i in range(count)]
        assert tokens == [[4, 5, 6, 2], [4, 2], [0], [4, 5], [4, 5, 6]], lengths
        new = [length + len(more) for length, more in zip(lengths, tokens, strict=True)]
        assert slots.length[:count].tolist() == new and found.done_E.tolist() == [False] * 4 + [True], lengths
