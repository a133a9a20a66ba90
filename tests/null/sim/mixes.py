"""Random mixes of requests. Every sequence must equal the sequential decoder's, and every page must be freed."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.null.sim.clock import Clock
from tests.null.sim.fleet import CONTEXT, PAGE, CountingTree, Rank, Setting, serve
from tests.null.sim.front import Case
from tests.null.sim.model import VOCAB, chain
from thalweg.core.messages import FlushCache, Submit
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape


class Result(NamedTuple):
    steps: int
    tokens: int
    preempted: int
    cached: int
    aborted: int


class Mix:
    """One random mix, drawn from `seed`. tight: long outputs, few pages, small chunks, so that prompts are preempted
    half way; None draws that too.
    """

    def __init__(self, seed: int, tight: bool | None = None) -> None:
        self.rng, self.clock = random.Random(seed), Clock()
        self.keeps = random.Random(seed + 1)  # beside the other draws, which are known to catch what they must
        self.bounds, self.shapes = random.Random(seed + 2), random.Random(seed + 3)
        rng = self.rng
        drawn = rng.random() < 0.3
        self.tight = drawn if tight is None else tight
        self.scored, self.empty, self.burst = (
            rng.choice((0.1, 0.7)),
            rng.choice((0.05, 0.05, 0.4)),
            rng.choice((60, 60, 6)),
        )
        stages = rng.choice((1, 1, 2, 3, 4))
        depth = stages + 1 if rng.random() < 0.6 else rng.randint(1, stages + 1)
        self.ranks = [Rank(self.clock, rng, self._setting(stages, depth)) for _ in range(rng.choice((1, 1, 2, 3)))]
        for rank in self.ranks:
            rank.device.fails = self.bounds.choice((-1, -1, -1, self.bounds.randrange(60)))
        self.arrivals: list[tuple[int, Rank, Case]] = []
        self.aborts: list[tuple[int, Rank, Case]] = []
        self.flushes: list[tuple[int, Rank, int]] = []
        for k, rank in enumerate(self.ranks):
            self._draw(rank, 0 if k and rng.random() < 0.4 else 7)
        self.arrivals.sort(key=lambda a: a[0])

    def _setting(self, stages: int, depth: int) -> Setting:
        rng = self.rng
        return Setting(
            slots=rng.randint(2, 6),
            pages=10 if self.tight else rng.choice((10, 10, 12, 40)),
            budget=rng.choice((5, 6, 7) if self.tight else (5, 9, 64)),
            stages=stages,
            depth=depth,
            fail=rng.choice((0, 0.3, 1)),
            policy=rng.choice(("fcfs", "fcfs", "lpm", "priority")),
            radix=rng.random() < 0.9,
            shares_steps=self.bounds.random() < 0.5,
            tree=self.shapes.choice((CHAIN, CHAIN, TreeShape(2, 2, 3), TreeShape(4, 2, 3), TreeShape(3, 3, 3, False))),
        )

    def _draw(self, rank: Rank, most: int) -> None:
        rng, first, at, salt = self.rng, -1, 0, 0
        prompt: tuple[int, ...] = ()
        shared = [self._tokens(1, 14) for _ in range(2)]
        for uid in range(most):
            if rng.random() >= 0.9:
                break
            if first < 0 or rng.random() < 0.7:
                prompt = (rng.choice(shared) + self._tokens(0, 6))[:16]
                salt, at, first = rng.randrange(2), rng.randrange(self.burst), -1
            submit = Submit(
                uid, prompt, self._params(), priority=rng.randrange(3), salt=salt, sibling=first, retention=self._keep()
            )
            first = uid if first < 0 else first
            case = Case(submit, CONTEXT, masked=rng.random() < 0.3, send=rng.random() < 0.3)
            self.arrivals.append((at, rank, case))
            if rng.random() < 0.3:
                case.cut = rng.randrange(1, VOCAB)
            if rng.random() < 0.4:
                rank.tier.put(chain(salt, prompt))
            case.next_turn = rng.random() < 0.3
            if rng.random() < 0.2:
                case.hurt = True
                self.aborts.append((at + rng.randrange(60), rank, case))
        if rng.random() < 0.2:
            self.flushes.append((rng.randrange(90), rank, 7))

    def _tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, VOCAB) for _ in range(self.rng.randint(low, high)))

    def _params(self) -> SamplingParams:
        rng = self.rng
        limit = (
            None
            if rng.random() < 0.05
            else 0
            if rng.random() < self.empty
            else rng.randint(12 if self.tight else 1, 16)
        )
        return SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(99),
            max_tokens=limit,
            min_tokens=rng.randint(0, limit) if limit and rng.random() < 0.2 else 0,
            ignore_eos=self.tight or rng.random() < 0.2,
            stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.2 else (),
            logprobs=rng.randrange(3) if rng.random() < 0.2 else None,
            prompt_logprobs=rng.randrange(3) if rng.random() < self.scored else None,
        )

    def _keep(self) -> CacheRetention:
        rng = self.keeps
        if rng.random() < 0.4:
            return RETAIN_ALL
        return CacheRetention(
            False, rng.choice((-1, -1, rng.randrange(1, VOCAB))), rng.choice((-1, rng.randrange(1, VOCAB)))
        )

    # ---- the front

    def receive(self, turn: int) -> bool:
        """Arrivals, flushes, aborts, stop strings that it finds late, and the next turns of conversations."""
        while self.arrivals and self.arrivals[0][0] <= turn:
            _, rank, case = self.arrivals.pop(0)
            rank.submit(case)
        for flush in [f for f in self.flushes if f[0] <= turn]:
            self.flushes.remove(flush)
            flush[1].channel.inbox.append(FlushCache(flush[2]))
        for rank in self.ranks:
            for case in list(rank.cases.values()):
                self._watch(turn, rank, case)
        for entry in [a for a in self.aborts if a[0] <= turn and a[2].submit.uid in a[1].cases]:
            self.aborts.remove(entry)
            entry[1].abort(entry[2])
        return bool(self.arrivals)

    def _watch(self, turn: int, rank: Rank, case: Case) -> None:
        if case.cut in case.tokens and not case.aborted:
            case.aborted = True
            self.aborts.append((turn + self.rng.randrange(6), rank, case))
        elif case.finish and case.next_turn:
            case.next_turn = False
            text = (*case.submit.prompt, *case.tokens, 1, 2)
            if len(text) < CONTEXT - 2:
                params = SamplingParams(seed=case.submit.params.seed, max_tokens=4)
                submit = Submit(case.submit.uid + 100, text, params, salt=case.submit.salt)
                rank.submit(Case(submit, CONTEXT, masked=case.masked))

    # ---- the proof

    def run(self) -> Result:
        steps = serve(self.ranks, self.receive, self.clock, self.rng)
        cases = [case for rank in self.ranks for case in rank.cases.values()]
        for case in cases:
            case.check()
        for rank in self.ranks:
            rank.check_home()
            self._check_stats(rank)
            self._check_kept(rank)
        tallies = [rank.scheduler.counters for rank in self.ranks]
        preempted = sum(t.preemptions for t in tallies)
        work = sum(len(case.tokens) + len(case.submit.prompt) + 4 for case in cases)
        assert steps <= work + 20 * preempted, "too many steps: each must bring a token or a chunk"
        return Result(
            steps,
            sum(len(case.tokens) for case in cases),
            preempted,
            sum(t.cached_tokens for t in tallies),
            sum(t.aborted for t in tallies),
        )

    def _check_stats(self, rank: Rank) -> None:
        stats, cases = rank.scheduler.stats(0.0), rank.cases.values()
        assert stats.finished + stats.aborted == len(cases), "each ends once"
        assert stats.decode_tokens == sum(len(case.tokens) for case in cases)
        assert stats.aborted or stats.decode_tokens == rank.device.accepted, "a token was computed twice"
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.cached_tokens <= stats.prompt_tokens
        self._check_drafts(rank)
        tree = rank.allocator.tree
        if isinstance(tree, CountingTree) and not tree.evicted:
            self._check_siblings(rank)

    def _check_drafts(self, rank: Rank) -> None:
        """Each that was made was verified or wasted, and those of all requests add up."""
        stats, aborted = rank.scheduler.stats(0.0), rank.scheduler.counters.aborted
        drafts = stats.acceptance
        assert sum(drafts.histogram) == drafts.verifications
        assert rank.setting.tree.is_tree or sum(drafts.drafted_at) == drafts.drafted
        assert sum(drafts.accepted_at) == drafts.accepted
        assert rank.device.proposed == drafts.drafted + stats.wasted_drafts
        ended = [case.deltas[-1].acceptance for case in rank.cases.values() if case.deltas]
        assert aborted or sum(one.accepted for one in ended if one) == drafts.accepted
        assert aborted or sum(one.verifications for one in ended if one) == drafts.verifications

    def _check_kept(self, rank: Rank) -> None:
        """What the cache holds is the beginning of a prompt, or of a sequence whose output may stay; where nothing was
        evicted, flushed or trimmed, all of it.
        """
        tree = rank.allocator.tree
        if not isinstance(tree, CountingTree):
            return
        cached, whole = tree.prefixes(), not (tree.evicted or rank.done or rank.scheduler.counters.preemptions)
        useful: set[tuple[int, tuple[int, ...]]] = set()
        for case in rank.cases.values():
            submit, ended = case.submit, case.finish in ("stop", "length")
            out = () if submit.retention.drops_output(case.tokens, ended) else case.tokens
            tokens = (*submit.prompt, *out)
            pages = {(submit.salt, tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}
            useful |= pages
            if whole and ended:
                computed = len(submit.prompt) + len(case.tokens) - 1
                missing = {page for page in pages if len(page[1]) <= computed} - cached
                assert not missing, f"{submit.uid} is not cached as far as it may be: {missing}"
        assert cached <= useful, f"cached for nobody: {cached - useful}"

    def _check_siblings(self, rank: Rank) -> None:
        """Where nothing is evicted, no sibling computes a page of the shared prompt again."""
        flushed = bool(rank.done)
        for case in rank.cases.values():
            first = rank.cases.get(case.submit.sibling)
            if first is None or flushed or first.finish == "abort" or case.finish == "abort":
                continue
            size = len(case.submit.prompt)
            scored = case.submit.params.prompt_logprobs is not None  # it uses what is kept, if the first kept as much
            most = 0 if scored else (size - 1) // PAGE * PAGE
            assert case.deltas[0].cached >= most, (
                f"sibling {case.submit.uid} computed again what {first.submit.uid} had"
            )


def mix(seed: int, tight: bool | None = None) -> Result:
    return Mix(seed, tight).run()
