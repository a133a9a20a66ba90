"""Accepting drafts: whatever drafts, sequences are distributed as the target's own, and truncated where they must be.

The target here is a Markov chain: its logits follow from the token before. What comes out is compared with its distribution over the first two
tokens; rules that are known to be biased must fail the same comparison, or it would show nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, Needs
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.truncate.ref import truncate
from thalweg.sampling import chain, sample
from thalweg.sampling.sample import Sampled, accept, draw

VOCAB, DRAWS, ROWS, FIRST = 8, 200_000, 4000, 3
SEED = torch.seed() % 2**31
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02)
NEEDS = Needs(random=True, truncated=True)
STOP = 7

Drafter = Callable[[Tensor, Tensor, Tensor], Tensor]  # draft logits [N, V], seeds [N], position → drafts [N]
Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # p, q [N, V], drafts [N] → tokens [N], accepted [N]


class World:
    """Logits of target and draft model behind each token."""

    def __init__(self) -> None:
        print(f"TEST_SEED={SEED}")
        generator = torch.Generator().manual_seed(SEED)
        self.target_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        self.draft_VV = self.target_VV + torch.randn(VOCAB, VOCAB, generator=generator)
        self.draft_VV[:, 5] = -torch.inf  # the draft model's vocabulary is smaller
        count = torch.ones(VOCAB)
        scaled_VV = self.target_VV / PARAMS.temperature
        self.p_VV = truncate(scaled_VV, count.long() << 30, count * PARAMS.top_p, count * PARAMS.min_p).softmax(-1)
        self.q_VV = (self.draft_VV / PARAMS.temperature).softmax(-1)
        self.joint_VV = self.p_VV[FIRST][:, None] * self.p_VV

    def far(self, first_N: Tensor, second_N: Tensor) -> float:
        """How many times the sampling noise these pairs lie from the target's distribution, in total variation."""
        got = torch.bincount(first_N * VOCAB + second_N, minlength=VOCAB * VOCAB) / len(first_N)
        want = self.joint_VV.flatten()
        noise = (2 * want * (1 - want) / (math.pi * len(first_N))).sqrt().sum() / 2
        return float((got - want).abs().sum() / 2 / noise)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def coupled(logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """A sample that races with the target's coins."""
    floats_NF = torch.tensor([PARAMS.temperature, 1.0, 0.0]).expand(len(seed_N), 3)
    return draw(logits_NV, floats_NF, seed_N, seed_N, position_N, False)


def best(logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
    return logits_NV.argmax(-1)


def third(logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
    return logits_NV.topk(3, -1).indices[:, 2]


def any_token(logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
    return torch.randint(VOCAB, seed_N.shape)


def decode(world: World, drafter: Drafter, drafts: int) -> tuple[Tensor, Tensor, float]:
    """DRAWS sequences, two tokens of each, verified in chains of `drafts`; and the share of first drafts that were accepted."""
    slots = Slots(ROWS, 16, torch.device("cpu"))
    index = torch.arange(ROWS)
    pairs: list[Tensor] = []
    accepted = 0
    slots.bind([Bind(row, (FIRST,), 1, 0, 16, row, (), PARAMS) for row in range(ROWS)])
    bound_SI = slots.ints_SI.clone()
    for turn in range(DRAWS // ROWS):
        slots.ints_SI.copy_(bound_SI)
        slots.seed += turn * ROWS
        seed_N = slots.seed.clone()
        for step in range(2):
            before_N, length_N = slots.tokens_SL[index, slots.length - 1].long(), slots.length.clone()
            for ahead in range(drafts):
                last_N = slots.tokens_SL[index, length_N + ahead - 1].long()
                made_N = drafter(world.draft_VV[last_N], seed_N, length_N + ahead)
                slots.tokens_SL[index, length_N + ahead] = made_N.int()
            slots.made.fill_(drafts)
            path_NQ = torch.stack([before_N, *(slots.tokens_SL[index, length_N + j].long() for j in range(drafts))], 1)
            found = accept(
                world.target_VV[path_NQ.flatten()], slots, index, slots.ints_SI.clone(), NEEDS, slots.context
            )
            if step == 0:
                accepted += int((found.count_E > 1).sum())
        pairs.append(slots.tokens_SL[:, 1:3].long().clone())
    both = torch.cat(pairs)
    return both[:, 0], both[:, 1], accepted / DRAWS


@pytest.mark.parametrize("drafter", [coupled, best, third, any_token])
@pytest.mark.parametrize("drafts", [1, 2])
def test_whatever_drafts_the_tokens_are_the_targets(world: World, drafter: Drafter, drafts: int) -> None:
    first, second, _ = decode(world, drafter, drafts)
    assert world.far(first, second) < 3, f"TEST_SEED={SEED}"


def test_plain_decoding_gives_the_very_same_sequences(world: World) -> None:
    plain = decode(world, best, 0)
    for drafter in (coupled, any_token):
        got = decode(world, drafter, 2)
        assert torch.equal(plain[0], got[0]) and torch.equal(plain[1], got[1]), f"TEST_SEED={SEED}"


def test_coupled_drafts_are_accepted_as_often_as_the_theorem_says(world: World) -> None:
    far = float((world.p_VV[FIRST] - world.q_VV[FIRST]).abs().sum() / 2)
    share = decode(world, coupled, 1)[2]
    noise = 4 * (0.25 / DRAWS) ** 0.5
    assert (1 - far) / (1 + far) - noise <= share <= 1 - far + noise, f"TEST_SEED={SEED}"
    assert abs(decode(world, best, 1)[2] - float(world.p_VV[FIRST][world.draft_VV[FIRST].argmax()])) < noise


def test_coins_of_another_position_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every position of a path draws with the coins of the first."""

    def one_coin(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> chain.Path:
        right = chain.path(slots, slot_E, ints_EI, query)
        right.ints_NI[:, 0] = ints_EI[:, 0].repeat_interleave(query)
        return right

    monkeypatch.setattr(sample, "path", one_coin)
    first, second, _ = decode(world, coupled, 1)
    assert world.far(first, second) > 3


# ---- rules of other engines, right and wrong, by the same measure


def residual(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    return (p_NV - q_NV).clamp(min=0)


def pick(weight_NV: Tensor) -> Tensor:
    return torch.multinomial(weight_NV, 1)[:, 0]


def at(x_NV: Tensor, token_N: Tensor) -> Tensor:
    return x_NV.gather(1, token_N[:, None])[:, 0]


def standard(p_NV: Tensor, q_NV: Tensor, draft_N: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, algorithm 1."""
    ok_N = torch.rand(len(draft_N)) < at(p_NV, draft_N) / at(q_NV, draft_N)
    return torch.where(ok_N, draft_N, pick(residual(p_NV, q_NV) + 1e-30)), ok_N


def no_residual(p_NV: Tensor, q_NV: Tensor, draft_N: Tensor) -> tuple[Tensor, Tensor]:
    """Biased: what is drawn in the place of a refused draft may be that draft again."""
    ok_N = torch.rand(len(draft_N)) < at(p_NV, draft_N) / at(q_NV, draft_N)
    return torch.where(ok_N, draft_N, pick(p_NV)), ok_N


def threshold(p_NV: Tensor, q_NV: Tensor, draft_N: Tensor) -> tuple[Tensor, Tensor]:
    """Biased: accepts what is likely enough."""
    ok_N = at(p_NV, draft_N) / 0.7 > torch.rand(len(draft_N))
    left_NV = p_NV.scatter(1, draft_N[:, None], 0.0)
    return torch.where(ok_N, draft_N, pick(left_NV + 1e-30)), ok_N


def same_coin(p_NV: Tensor, q_NV: Tensor, draft_N: Tensor) -> tuple[Tensor, Tensor]:
    """Biased: the coin that refused a draft draws the token in its place, too."""
    coin_N = torch.rand(len(draft_N))
    ok_N = coin_N < at(p_NV, draft_N)
    left_NV = p_NV.scatter(1, draft_N[:, None], 0.0)
    left_NV = left_NV / left_NV.sum(1, keepdim=True).clamp(min=1e-30)
    drawn_N = torch.searchsorted(left_NV.cumsum(1), coin_N[:, None])[:, 0].clamp(max=VOCAB - 1)
    return torch.where(ok_N, draft_N, drawn_N), ok_N


def simulate(world: World, rule: Rule, sampled: bool) -> float:
    """`World.far` of two tokens that come by this rule, each from one draft: sampled, or the most likely."""
    last_N = torch.full((DRAWS,), FIRST)
    tokens: list[Tensor] = []
    for _ in range(2):
        p_NV, q_NV = world.p_VV[last_N], world.q_VV[last_N]
        draft_N = pick(q_NV) if sampled else q_NV.argmax(-1)
        last_N, _ = rule(p_NV, q_NV, draft_N)
        tokens.append(last_N)
    return world.far(*tokens)


def test_the_standard_rule_passes_and_biased_ones_fail(world: World) -> None:
    assert simulate(world, standard, True) < 3, f"TEST_SEED={SEED}"
    for rule, sampled in ((no_residual, True), (threshold, True), (same_coin, False), (standard, False)):
        assert simulate(world, rule, sampled) > 3, f"{rule.__name__} was not noticed, TEST_SEED={SEED}"


# ---- where a path ends


def verify(
    drafts: list[int], drawn: list[int], made: int | None = None, end: int = 40, **fields: object
) -> tuple[list[int], bool, Slots]:
    """A greedy slot of three known tokens whose target draws `drawn`, one more than there are drafts."""
    slots = Slots(2, 64, torch.device("cpu"))
    params = SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]
    slots.bind([Bind(1, (1, 2, 3), 2, 2, end, 0, (STOP,), params)])
    slots.tokens_SL[1, 3 : 3 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    slots.made[1] = len(drafts) if made is None else made
    logits = torch.nn.functional.one_hot(torch.tensor(drawn), VOCAB).float()
    index, needs = torch.tensor([1]), Needs(biased=params.min_tokens > 0)
    found: Sampled = accept(logits, slots, index, slots.ints_SI[index], needs, slots.context)
    count = int(found.count_E)
    return found.tokens_EQ[0, :count].tolist(), bool(found.done_E), slots


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    assert verify([4, 5, 6], [4, 5, 6, 2])[:2] == ([4, 5, 6, 2], False)
    assert verify([4, 5, 6], [4, 2, 6, 2])[:2] == ([4, 2], False)
    tokens, done, slots = verify([4, 5, 6], [0, 5, 6, 2])
    assert (tokens, done) == ([0], False)
    assert slots.length[1] == 4 and slots.at[1] == 3 and slots.tokens_SL[1, 3] == 0


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
    found = accept(torch.randn(3, VOCAB), slots, index, slots.ints_SI[index], Needs(), slots.context)
    assert not found.count_E and found.done_E
    assert torch.equal(slots.tokens_SL[1, :64], before[0]) and torch.equal(slots.ints_SI[1], before[1])


def test_penalties_count_the_drafts_before_each_position() -> None:
    """A token that the path has had twice already is penalised twice."""
    slots = Slots(1, 64, torch.device("cpu"))
    slots.bind([Bind(0, (1, 2), 1, 1, 40, 0, (), SamplingParams(temperature=0.0, frequency_penalty=1.0))])
    slots.tokens_SL[0, 2:4] = 4
    slots.made[0] = 2
    logits = torch.zeros(3, VOCAB)
    logits[:, 4], logits[:, 6] = 1.5, 0.0
    index = torch.tensor([0])
    found = accept(logits, slots, index, slots.ints_SI[index], Needs(penalised=True), slots.context)
    assert found.tokens_EQ[0, : int(found.count_E)].tolist() == [4, 4, 0]  # 1.5, 0.5, then -0.5 against 0
