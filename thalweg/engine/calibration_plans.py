"""Plans of every kind of step that an engine may run. Start-up runs each once, so that no kernel is compiled within a
request. No request uses their slots, so all rows are padding.

Kernels are compiled for ranges of a few numbers: tokens, rows, longest context. The lists below have a number in each
range, and where divisibility matters a multiple of 16 and another one. Nothing here knows a kernel; a test on a GPU
counts what is compiled after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from thalweg.core.plan import PAGE, Row, SamplingNeeds, StepPlan
from thalweg.scheduler.draft_length import draft_length_choices

DENSE = 80  # every number of tokens up to this is run
DECODE_QUERY = 4  # rows with more tokens are prompts for the kernels
CHUNK = 1 << 14  # tokens of context that attention of prompts gathers in one piece
SCORES = 5, 20, 100, 299  # scored positions of a prompt: kernels change at 8, 64 and 128
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
ALL_NEEDS = SamplingNeeds(random=True, truncated=True, penalised=True, biased=True, logprobs=20, num_logprob_ids=20)

RowSpec = tuple[int, int, bool]  # tokens before the step, tokens of the step, whether it samples


def plan(parts: Sequence[RowSpec], needs: SamplingNeeds = GREEDY, scored: bool = False, drafts: int = 0) -> StepPlan:
    """A step of these rows, each in its own slot.

    scored: the last row wants the log-probabilities of its prompt. drafts: of each sampling row with 1 + drafts tokens.
    """
    rows = [
        Row(0, slot, start, n, drafts if samples and n == 1 + drafts else 0, samples)
        for slot, (start, n, samples) in enumerate(parts)
    ]
    if scored:
        start, n, _ = parts[-1]
        rows[-1] = rows[-1]._replace(
            prompt_logprobs_start=start, prompt_logprobs_stop=start + n - 1, prompt_logprobs_top_k=5
        )
    return StepPlan(0, 0, tuple(rows), needs=needs, max_kv_len=max(start + n for start, n, _ in parts))


def token_counts(most: int) -> list[int]:
    """Numbers of tokens up to `most`: all at first, then in growing distances, each with the next odd number."""
    return _counts(most, [*range(96, 257, 16), *range(320, 1025, 64), *range(1280, 8193, 256)])


def fine_token_counts(most: int) -> list[int]:
    """The same with every 64th up to 8,192, for work that is cheap alone."""
    return _counts(most, [*range(96, 257, 16), *range(320, 8193, 64)])


def _counts(most: int, counts: list[int]) -> list[int]:
    while counts[-1] < most:
        counts.append(-(-counts[-1] * 5 // 4 // 64) * 64)
    counts = [*range(1, DENSE + 1), *counts, *(count + 1 for count in counts), most]
    return sorted({count for count in counts if count <= most})


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`, around the sizes of tiles."""
    counts = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257]
    return sorted({rows for rows in [*counts, *range(384, most + 1, 128), most] if rows <= most})


def context_lengths(context: int) -> list[int]:
    """Lengths of the longest context: a page, then doubled each time."""
    lengths = [min(PAGE, context)]
    while lengths[-1] < context:
        lengths.append(min(2 * lengths[-1], context))
    return lengths


def prompts(tokens: int, context: int) -> list[RowSpec]:
    """Rows of fresh prompts with `tokens` tokens in all."""
    return [(0, min(context, tokens - first), True) for first in range(0, tokens, context)]


def all_steps(slots: int, budget: int, context: int, num_drafts: int = 0, trees: bool = False) -> Iterator[StepPlan]:
    """All kinds of steps within these limits. num_drafts: most drafts; trees: drafts may branch."""
    most = min(budget, slots * context)
    for tokens in token_counts(most):
        yield plan(prompts(tokens, context))
    decoding = row_counts(min(slots, most))
    for rows, reach in product(decoding, context_lengths(context)):
        yield plan([(reach - 1, 1, True)] * rows)
    for rows, n, start in product(decoding, range(1, DECODE_QUERY + 1), (0, PAGE, context // 2)):
        if rows * n <= most and start + n <= context:  # ends of prompts
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
    for rows, n, start in product([0, *row_counts(slots - 1)], (5, 48, 300), (0, PAGE)):
        if 0 < rows <= most - n and start + n <= context:
            yield plan([(start + n - 1, 1, True)] * rows + [(start, n, True)])
            yield plan([(context - 1, 1, True)] * rows + [(start, n, False)])
    if min(most, context) > 1:
        yield from scored_prompts(min(most, context))
    for rows, reach in product(decoding if num_drafts else (), context_lengths(context)):
        yield from _verification([reach] * rows, 1 + num_drafts, most)
    if trees:
        yield from _trees(decoding, most, context, num_drafts)


def _verification(contexts: Sequence[int], n: int, most: int) -> Iterator[StepPlan]:
    """A step that verifies `n` - 1 drafts of each row."""
    if len(contexts) * n <= most and n <= min(contexts):
        yield plan([(reach - n, n, True) for reach in contexts], drafts=n - 1)


def _trees(decoding: Sequence[int], most: int, context: int, num_drafts: int) -> Iterator[StepPlan]:
    """Steps with each number of drafts that may be chosen, of all rows or of some: they use other kernels."""
    for rows, reach, drafts in product(
        {1, 2, decoding[-1]}, context_lengths(context), draft_length_choices(num_drafts)[1:]
    ):
        yield from _verification([reach] * rows, 1 + drafts, most)
        if rows == 2 and 3 + drafts <= min(most, reach):
            yield plan([(reach - 2, 2, True), (reach - 1 - drafts, 1 + drafts, True)], drafts=drafts)


def scored_prompts(most: int) -> Iterator[StepPlan]:
    """Prompts of up to `most` tokens that want log-probabilities."""
    for tokens in sorted({min(most, positions + 1) for positions in SCORES}):
        yield plan([(0, tokens, True)], scored=True)


def single_tokens(context: int) -> Iterator[StepPlan]:
    """One token after contexts of every length: all steps of a model that computes its tokens one by one."""
    for reach in context_lengths(context):
        yield plan([(reach - 1, 1, True)])


def sampling_steps(rows: int, context: int) -> Iterator[StepPlan]:
    """All ways to sample, for each number of rows."""
    for sampled_rows, needs in product(row_counts(rows), (GREEDY, *NEEDS)):
        yield plan([(min(PAGE, context) - 1, 1, True)] * sampled_rows, needs)


def largest_steps(slots: int, budget: int, context: int, num_drafts: int = 0) -> Iterator[StepPlan]:
    """The steps that take most memory: a budget of fresh prompts, and the end of a prompt with as many decoding rows as
    possible, their drafts and all sampling features. `cached_prompts` gather the longest context.
    """
    most = min(budget, slots * context)
    yield plan(prompts(most, context))
    each = min(1 + num_drafts, context)
    decoding = min(slots - 1, (most - 1) // each)
    n = min(most - decoding * each, context)
    yield plan([(context - each, each, True)] * decoding + [(context - n, n, True)], ALL_NEEDS, drafts=each - 1)


def cached_prompts(slots: int, budget: int, context: int) -> Iterator[StepPlan]:
    """A budget of prompts that hit the prefix cache, with as much context as is gathered in one piece, and with one row
    more.
    """
    reach = min(context, CHUNK)
    for rows in (CHUNK // reach, CHUNK // reach + 1):
        rows = min(rows, slots, budget)
        n = min(budget // rows, reach // 2)
        if n:
            yield plan([(reach - n, n, True)] * rows)
