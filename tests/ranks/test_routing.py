"""Which data-parallel rank gets a request."""

from __future__ import annotations

import random

from thalweg.core.messages import Submit, TokenDelta
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.engine.routing import RequestRouter
from thalweg.llm.llm import submission_order

PARAMS = SamplingParams()


def submit(uid: int, prompt: list[int], **fields: int) -> Submit:
    return Submit(uid, tuple(prompt), PARAMS, **fields)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_a_burst_is_spread_by_tokens() -> None:
    router = RequestRouter(2, 100, PAGE)
    ranks = [router.route(submit(i, text(i, length))) for i, length in enumerate((1000, 100, 100, 100, 800))]
    assert ranks == [0, 1, 1, 1, 1]
    router.follow(TokenDelta(0, (), "stop"))
    assert router.route(submit(9, text(9, 50))) == 0


def test_output_counts_until_its_end() -> None:
    router = RequestRouter(2, 100, PAGE)
    assert router.route(submit(0, text(0, 100))) == 0
    assert router.route(submit(1, text(1, 120))) == 1
    router.follow(TokenDelta(0, tuple(range(50))))
    assert router.route(submit(2, text(2, 10))) == 1
    router.forget(1)
    router.follow(TokenDelta(2, (1,), "length"))
    assert [rank.work for rank in router.ranks] == [150, 0]


def test_a_prefix_goes_where_it_is_cached_unless_that_rank_is_busy() -> None:
    router, prefix = RequestRouter(2, 100, PAGE), text(0, 10 * PAGE)
    assert router.route(submit(0, prefix + [1])) == 0
    router.forget(0)
    assert router.route(submit(1, text(1, 100))) == 0
    assert router.route(submit(2, prefix + [2])) == 0, "100 + 1 tokens there, 641 elsewhere"
    assert router.route(submit(3, text(3, 700))) == 1
    router.flush()
    router.forget(2)
    assert router.route(submit(4, prefix + [3])) == 0, "100 tokens of work are less than 700"
    assert router.route(submit(5, prefix + [4], salt=7)) == 1, "another salt finds nothing"


def test_what_a_rank_remembers_is_bounded_by_its_pages() -> None:
    router = RequestRouter(2, 4, PAGE)
    router.route(submit(0, text(0, 10 * PAGE)))
    assert [len(rank.pages) for rank in router.ranks] == [4, 0]


def test_siblings_follow_the_first() -> None:
    router = RequestRouter(4, 100, PAGE)
    first = router.route(submit(0, text(0, 500)))
    assert [router.route(submit(i, text(0, 500), sibling=0)) for i in (1, 2, 3)] == [first] * 3
    assert router.by_rank([0, 1, 2, 3, 99]) == {first: (0, 1, 2, 3)}


def test_one_rank_gets_everything() -> None:
    router = RequestRouter(1, 100, PAGE)
    assert router.route(submit(0, text(0, 5))) == 0
    assert router.by_rank([5, 6]) == {0: (5, 6)}


def test_prompts_that_are_known_together_are_assigned_longest_first() -> None:
    lengths = [100] * 30 + [900, 1000]
    assert submission_order(lengths, 1) == list(range(32))
    order = submission_order(lengths, 4)
    assert order[:2] == [31, 30] and order[2:] == list(range(30)), "equal ones in their order"
    most = []
    for numbers in (range(32), order):
        router = RequestRouter(4, 1000, PAGE)
        for number in numbers:
            router.route(submit(number, text(number, lengths[number])))
        most.append(max(rank.work for rank in router.ranks))
    assert most == [1700, 1300], "of 4,900 tokens"
