"""Every kind of step that an engine with these limits may run, each once: what is run before the first request so that
none of them compiles within one. Plans only; no request stands behind their slots, so all their rows are padding.

A kernel is compiled for ranges of a few numbers: tokens of a step, rows, longest context. The ladders below have a step
in each range, and where numbers count by their divisibility too, one that is a multiple of 16 and one that is not.
Nothing here knows a kernel; a test on a GPU counts what is compiled after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from thalweg.core.plan import PAGE, Row, SamplingNeeds, StepPlan
from thalweg.scheduler.draft_length import draft_length_choices

DENSE = 80  # tokens up to which every number is met
DECODE_QUERY = 4  # more tokens of a row than this are a prompt's
CHUNK = 1 << 14  # tokens of context up to which prompts' rows are attended to in one piece
SCORES = 5, 20, 100, 299  # positions of a prompt that go through the head: other kernels up to 8, 64, 128 and beyond
GREEDY = SamplingNeeds()
NEEDS = (
    SamplingNeeds(random=True),
    SamplingNeeds(random=True, truncated=True),
    SamplingNeeds(penalised=True),
    SamplingNeeds(biased=True),
    SamplingNeeds(random=True, truncated=True, penalised=True, biased=True),
    SamplingNeeds(logprobs=0),
    SamplingNeeds(logprobs=20),
    SamplingNeeds(random=True, truncated=True, logprobs=5),
)
ALL_NEEDS = SamplingNeeds(random=True, truncated=True, penalised=True, biased=True, logprobs=20)

Part = tuple[int, int, bool]  # tokens before the step, tokens of the step, whether it samples


def plan(parts: Sequence[Part], needs: SamplingNeeds = GREEDY, scored: bool = False, drafts: int = 0) -> StepPlan:
    """A step of these rows, each of a slot of its own. scored: with the log-probabilities of the last row's prompt
    tokens. drafts: of each row that emits and has so many tokens besides its own.
    """
    rows = [
        Row(0, slot, start, n, drafts if emit and n == 1 + drafts else 0, emit)
        for slot, (start, n, emit) in enumerate(parts)
    ]
    if scored:
        start, n, _ = parts[-1]
        rows[-1] = rows[-1]._replace(score_from=start, score_to=start + n - 1, score_top=5)
    return StepPlan(0, 0, tuple(rows), needs=needs, max_kv_len=max(start + n for start, n, _ in parts))


def ladder(most: int) -> list[int]:
    """Numbers of tokens up to `most`: all at first, then every sixteenth, sixty-fourth, 256th, and fourth part more,
    each with the next odd one.
    """
    return _rungs(most, [*range(96, 257, 16), *range(320, 1025, 64), *range(1280, 8193, 256)])


def fine(most: int) -> list[int]:
    """The same, every sixty-fourth up to 8,192: for what is cheap to run alone."""
    return _rungs(most, [*range(96, 257, 16), *range(320, 8193, 64)])


def _rungs(most: int, rungs: list[int]) -> list[int]:
    while rungs[-1] < most:
        rungs.append(-(-rungs[-1] * 5 // 4 // 64) * 64)
    return sorted(
        {count for count in [*range(1, DENSE + 1), *rungs, *(rung + 1 for rung in rungs), most] if count <= most}
    )


def few(most: int) -> list[int]:
    """Numbers of rows up to `most`: around the sizes of tiles."""
    rungs = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257]
    return sorted({rows for rows in [*rungs, *range(384, most + 1, 128), most] if rows <= most})


def reaches(context: int) -> list[int]:
    """Lengths of the longest context: a page, then twice as long each time."""
    found = [min(PAGE, context)]
    while found[-1] < context:
        found.append(min(2 * found[-1], context))
    return found


def prompts(tokens: int, context: int) -> list[Part]:
    """Fresh rows of so many tokens together."""
    return [(0, min(context, tokens - first), True) for first in range(0, tokens, context)]


def kinds(slots: int, budget: int, context: int, width: int = 0, trees: bool = False) -> Iterator[StepPlan]:
    """See above. slots, budget, context, width: as of `config.engine.EngineConfig`; trees: whether drafts may part
    ways.
    """
    most = min(budget, slots * context)
    for tokens in ladder(most):
        yield plan(prompts(tokens, context))
    decoding = few(min(slots, most))
    for rows, reach in product(decoding, reaches(context)):
        yield plan([(reach - 1, 1, True)] * rows)
    for rows, n, start in product(decoding, range(1, DECODE_QUERY + 1), (0, PAGE, context // 2)):
        if rows * n <= most and start + n <= context:  # the last tokens of prompts
            yield plan([(start, n, False)] * rows)
    for n, start in product((5, 16, 17, 64, 100, 300, 1000), (1, PAGE, 1000, context // 2, context - 1000)):
        if n <= most and 0 < start and start + n <= context:
            yield plan([(start, n, True)])
            if slots > 1 and 2 * n <= most:
                yield plan([(start, n, False), (0, n, True)])
    rows = CHUNK // context + 1
    if rows <= slots and 5 * rows <= most and context > 5:
        yield plan([(context - 5, 5, False)] * rows)
    if rows < slots and 2 * rows < most and context > 2:
        yield plan([(context - 1, 1, True)] + [(context - 2, 2, False)] * rows)
    for rows, n, start in product([0, *few(slots - 1)], (5, 48, 300), (0, PAGE)):
        if 0 < rows <= most - n and start + n <= context:
            yield plan([(start + n - 1, 1, True)] * rows + [(start, n, True)])
            yield plan([(context - 1, 1, True)] * rows + [(start, n, False)])
    if min(most, context) > 1:
        yield from scored(min(most, context))
    for rows, reach in product(decoding if width else (), reaches(context)):
        yield from _verification([reach] * rows, 1 + width, most)
    if trees:
        yield from _trees(decoding, most, context, width)


def _verification(contexts: Sequence[int], n: int, most: int) -> Iterator[StepPlan]:
    """Of rows with `n` tokens each."""
    if len(contexts) * n <= most and n <= min(contexts):
        yield plan([(reach - n, n, True) for reach in contexts], drafts=n - 1)


def _trees(decoding: Sequence[int], most: int, context: int, width: int) -> Iterator[StepPlan]:
    """With every number of drafts that is chosen from, of all rows or of some: other kernels than those of the
    widest.
    """
    for rows, reach, drafts in product({1, 2, decoding[-1]}, reaches(context), draft_length_choices(width)[1:]):
        yield from _verification([reach] * rows, 1 + drafts, most)
        if rows == 2 and 3 + drafts <= min(most, reach):
            yield plan([(reach - 2, 2, True), (reach - 1 - drafts, 1 + drafts, True)], drafts=drafts)


def scored(most: int) -> Iterator[StepPlan]:
    """Prompts of up to so many tokens, whose log-probabilities are asked for."""
    for tokens in sorted({min(most, positions + 1) for positions in SCORES}):
        yield plan([(0, tokens, True)], scored=True)


def singles(context: int) -> Iterator[StepPlan]:
    """One token behind contexts of every length: all that a model runs which computes its tokens one by one."""
    for reach in reaches(context):
        yield plan([(reach - 1, 1, True)])


def samplings(rows: int, context: int) -> Iterator[StepPlan]:
    """Every way to sample, for each number of emitting rows."""
    for emitting, needs in product(few(rows), (GREEDY, *NEEDS)):
        yield plan([(min(PAGE, context) - 1, 1, True)] * emitting, needs)


def largest(slots: int, budget: int, context: int, width: int = 0) -> Iterator[StepPlan]:
    """The steps that take most memory: a whole budget of fresh prompts, and one of a prompt's end beside as many
    decoding requests as there are, with their drafts, where every row asks for everything that can be asked of
    sampling. What gathers most context: `cached`.
    """
    most = min(budget, slots * context)
    yield plan(prompts(most, context))
    each = min(1 + width, context)
    decoding = min(slots - 1, (most - 1) // each)
    n = min(most - decoding * each, context)
    yield plan([(context - each, each, True)] * decoding + [(context - n, n, True)], ALL_NEEDS, drafts=each - 1)


def cached(slots: int, budget: int, context: int) -> Iterator[StepPlan]:
    """A budget of prompts' tokens that found at least as many computed: of as much context as is gathered in one piece,
    and a row more.
    """
    reach = min(context, CHUNK)
    for rows in (CHUNK // reach, CHUNK // reach + 1):
        rows = min(rows, slots, budget)
        n = min(budget // rows, reach // 2)
        if n:
            yield plan([(reach - n, n, True)] * rows)
