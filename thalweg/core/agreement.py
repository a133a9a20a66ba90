"""Coordinates a step of data-parallel ranks: `coordinate_step` makes one `AgreedStep` of the `RankStep` of every rank.

With expert parallelism every pass of a model is a collective, so all ranks must run the same passes with the same
padded shapes in the same order. The passes follow from all `RankStep`s and never from the rows of one rank. A rank
without rows runs the padded passes too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

from thalweg.core.plan import StepPlan

PROMPT_LOGPROBS_CHUNK = 256  # positions of one head pass for prompt log-probabilities; bounds the logits in memory


class RanksDisagree(RuntimeError):
    """The ranks are at different steps or weights, or have run different passes."""


class RankStep(NamedTuple):
    """Sizes of the next step of one rank."""

    step: int  # all ranks must be at the same step
    epoch: int = 0  # of the weights
    rows: int = 0
    tokens: int = 0
    sampled_rows: int = 0  # rows that sample
    sampled_per_row: int = 1  # positions sampled per row
    is_verify: bool = True  # every row computes its last known token and its drafts, and samples
    is_uniform: bool = True  # every row has `sampled_per_row` tokens
    prompt_logprobs_passes: int = 0  # head passes for prompt log-probabilities
    num_drafts: int = 0  # requested number of drafts after this step
    has_drafter: bool = True  # False once the drafter of this rank has failed
    # tokens of earlier steps whose deferred draft KV is written
    written_before: int = 0  # before this step, since their slots or pages change hands
    written_if_deferred: int = 0  # after this step, if the draft KV of this step is deferred as well
    written_if_extended: int = 0  # after this step, if the drafter extends by this step
    pass_checksum: int = 0  # checksum of all passes that the rank has run
    control: int = 0  # the control message that the rank carries out next; 0: none
    has_ended: bool = False  # it drains and has no request left
    prefill_wait: int = 0  # 0: no prompt waits; else 1 + the steps in which prompts waited for permission

    def pack(self) -> bytes:
        """PACKED_BYTES bytes, which other processes read."""
        return RANK_STEP.pack(*self).ljust(PACKED_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> RankStep:
        return cls(*RANK_STEP.unpack(data[: RANK_STEP.size]))


RANK_STEP = struct.Struct("=QIHIHB??HB?IIIII?B")
MAX_PREFILL_WAIT = 3  # steps after which a prompt is computed though few ranks have one
PACKED_BYTES = 56
assert RANK_STEP.size <= PACKED_BYTES


class AgreedStep(NamedTuple):
    """The passes of a step, the same on every rank. Sizes are the largest of any rank; smaller ranks are padded."""

    ranks: int  # processes that run it
    rows: int
    tokens: int  # of the model pass; 0 if no rank has rows
    sampled_rows: int
    sampled_per_row: int
    is_verify: bool
    is_uniform: bool
    prompt_logprobs_passes: int
    num_drafts: int  # drafts made after the step
    has_drafter: bool
    written_before: int  # tokens of the draft pass before the step; 0 is no pass
    written_after: int  # tokens of the draft pass for deferred KV after the step; 0 is no pass
    extends: bool  # the drafter extends by the step; False defers the draft KV of the step
    control: int = 0  # the control message that all ranks carry out after the step; 0: none
    has_ended: bool = False  # all ranks drain and have no request left
    may_prefill: bool = True  # prompts may be planned in the next step

    @property
    def logits(self) -> int:
        """Rows of the head pass."""
        return self.sampled_rows * self.sampled_per_row


def rank_step_of(plan: StepPlan) -> RankStep:
    """Sizes of a plan, without the drafter's part, which `Runner.rank_step` adds."""
    tokens = sampled_rows = passes = max_drafts = 0
    is_verify = is_decode = True
    for row in plan.rows:  # runs in every step: no calls
        tokens += row.n
        sampled_rows += row.samples
        if row.n > 1 or not row.samples or row.prompt_logprobs_start < row.prompt_logprobs_stop:
            is_decode = False
            is_verify = (
                is_verify
                and row.samples
                and row.n == 1 + row.num_drafts
                and row.prompt_logprobs_start == row.prompt_logprobs_stop
            )
            passes += -(-(row.prompt_logprobs_stop - row.prompt_logprobs_start) // PROMPT_LOGPROBS_CHUNK)
            if row.samples and row.num_drafts > max_drafts:
                max_drafts = row.num_drafts
    return RankStep(
        step=plan.step,
        rows=len(plan.rows),
        tokens=tokens,
        sampled_rows=sampled_rows,
        sampled_per_row=1 + max_drafts,
        is_verify=is_verify,
        is_uniform=is_decode or all(row.n == 1 + max_drafts for row in plan.rows),
        prompt_logprobs_passes=passes,
        num_drafts=plan.num_drafts,
    )


def coordinate_step(rank_steps: Sequence[RankStep]) -> AgreedStep:
    """The step that every rank runs. A rank without rows has the defaults of `RankStep`. Raises RanksDisagree."""
    if len(rank_steps) == 1:
        return _single_rank_step(rank_steps[0])
    (  # values by field: this runs in every step
        steps, epochs, rows, tokens, sampled, per_row, verify, uniform, passes, drafts, drafters, before, deferred,
        extended, checksums, controls, ended, waits,
    ) = zip(*rank_steps, strict=True)  # fmt: skip
    count = len(rank_steps)
    if not steps.count(steps[0]) == epochs.count(epochs[0]) == checksums.count(checksums[0]) == count:
        raise RanksDisagree(_difference(rank_steps))
    has_drafter, most_sampled, query = all(drafters), max(sampled), max(per_row)
    # the busiest rank decides; a rank that samples nothing is ignored
    num_drafts = drafts[sampled.index(most_sampled)] if most_sampled and has_drafter else 0
    extends = has_drafter and any(rows) and (num_drafts > 0 or any(map(gt, tokens, rows)))
    is_uniform = all(uniform)
    if is_uniform and per_row.count(query) < count:
        is_uniform = all(n == query or not own for n, own in zip(per_row, rows, strict=True))
    return AgreedStep(
        ranks=count,
        rows=max(rows),
        tokens=max(tokens),
        sampled_rows=most_sampled,
        sampled_per_row=query,
        is_verify=all(verify),
        is_uniform=is_uniform,
        prompt_logprobs_passes=max(passes),
        num_drafts=num_drafts,
        has_drafter=has_drafter,
        written_before=max(before) * has_drafter,
        written_after=max(extended if extends else deferred) * has_drafter,
        extends=extends,
        control=controls[0] if controls.count(controls[0]) == count else 0,
        has_ended=all(ended),
        may_prefill=_may_prefill(waits, any(rows)),
    )


def _difference(rank_steps: Sequence[RankStep]) -> str:
    """What the first rank that differs from rank 0 does otherwise."""
    first = rank_steps[0]
    for number, rank in enumerate(rank_steps):
        if (rank.step, rank.epoch) != (first.step, first.epoch):
            return (
                f"rank {number} is at step {rank.step} with weights {rank.epoch}; rank 0 is at step {first.step} with"
                f" weights {first.epoch}"
            )
        if rank.pass_checksum != first.pass_checksum:
            return f"before step {first.step} rank {number} ran other passes than rank 0"
    raise AssertionError("the ranks agree")


def _may_prefill(waits: Sequence[int], has_rows: bool) -> bool:
    """All ranks pad to the longest step, so prompts are computed on many ranks together: when at least half of them
    have some, when one has waited long enough, or when no rank has anything else to do.
    """
    return not has_rows or 2 * waits.count(0) <= len(waits) or max(waits) > MAX_PREFILL_WAIT


def _single_rank_step(own: RankStep) -> AgreedStep:
    """As `coordinate_step` for one rank, in a fraction of the time."""
    num_drafts = own.num_drafts if own.sampled_rows and own.has_drafter else 0
    extends = own.has_drafter and (num_drafts > 0 or own.tokens > own.rows)
    written_after = own.written_if_extended if extends else own.written_if_deferred
    return AgreedStep(
        ranks=1,
        rows=own.rows,
        tokens=own.tokens,
        sampled_rows=own.sampled_rows,
        sampled_per_row=own.sampled_per_row,
        is_verify=own.is_verify,
        is_uniform=own.is_uniform,
        prompt_logprobs_passes=own.prompt_logprobs_passes,
        num_drafts=num_drafts,
        has_drafter=own.has_drafter,
        written_before=own.written_before * own.has_drafter,
        written_after=written_after * own.has_drafter,
        extends=extends,
        control=own.control,
        has_ended=own.has_ended,
    )
