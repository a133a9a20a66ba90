"""How data-parallel ranks agree on a step: `agree` makes one `AgreedStep` of the `Record` of every rank.

With expert parallelism every pass of a model is a collective, so all ranks must run the same passes with the same
padded shapes in the same order. Everything that decides this is a pure function of the records and never of the rows of
one rank: a rank without rows runs the padded passes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thalweg.core.plan import StepPlan

SCORE_CHUNK = 256  # positions of one head pass for prompt log-probabilities; bounds the logits in memory


class RanksDisagree(RuntimeError):
    """The records are of different steps or weights, or the ranks have run different passes."""


class Record(NamedTuple):
    """What one rank says about its next step."""

    step: int  # a record of another step is an error
    epoch: int = 0  # of the weights
    rows: int = 0
    tokens: int = 0
    emitting: int = 0  # rows that sample
    sampled_per_row: int = 1  # positions sampled of each emitting row
    is_verify: bool = True  # every row computes its last known token and its drafts, and samples
    is_uniform: bool = True  # every row has `sampled_per_row` tokens
    score_passes: int = 0  # head passes for prompt log-probabilities
    num_drafts: int = 0  # drafts wished for after this step
    has_drafter: bool = True  # False once the drafter of this rank has failed
    # tokens of earlier steps whose draft KV is deferred and is written
    leaving: int = 0  # before this step, since their slots or pages change hands
    deferred_if_kept: int = 0  # after this step, if the draft KV of this step is deferred as well
    deferred_if_extended: int = 0  # after this step, if the drafter extends by this step
    digest: int = 0  # of all passes that the rank has run


class AgreedStep(NamedTuple):
    """The passes of a step, the same on every rank. Sizes are the largest of any rank; smaller ranks are padded."""

    ranks: int
    rows: int
    tokens: int  # of the model pass; 0 if no rank has rows
    emitting: int
    sampled_per_row: int
    is_verify: bool
    is_uniform: bool
    score_passes: int
    num_drafts: int  # drafts made after the step
    has_drafter: bool
    leaving: int  # tokens of the draft pass before the step; 0 is no pass
    deferred: int  # tokens of the draft pass for deferred KV after the step; 0 is no pass
    extends: bool  # the drafter extends by the step; False defers the draft KV of the step

    @property
    def logits(self) -> int:
        """Rows of the head pass."""
        return self.emitting * self.sampled_per_row


def record_of(plan: StepPlan) -> Record:
    """What the plan alone says; a rank with a drafter adds its part (`Runner.record`)."""
    tokens = emitting = passes = most = 0
    is_verify, is_decode = True, True
    for _, _, _, n, drafts, emit, score_from, score_to, _ in plan.rows:  # this is in every step: one pass, no calls
        tokens += n
        emitting += emit
        if n > 1 or not emit or score_from < score_to:
            is_decode = False
            is_verify = is_verify and emit and n == 1 + drafts and score_from == score_to
            passes += -(-(score_to - score_from) // SCORE_CHUNK)
            if emit and drafts > most:
                most = drafts
    return Record(
        step=plan.step,
        rows=len(plan.rows),
        tokens=tokens,
        emitting=emitting,
        sampled_per_row=1 + most,
        is_verify=is_verify,
        is_uniform=is_decode or all(row.n == 1 + most for row in plan.rows),
        score_passes=passes,
        num_drafts=plan.num_drafts,
    )


def agree(records: Sequence[Record]) -> AgreedStep:
    """The step that every rank runs. Raises RanksDisagree."""
    first = records[0]
    if len(records) == 1:
        return _alone(first)
    for rank, record in enumerate(records):
        if (record.step, record.epoch) != (first.step, first.epoch):
            raise RanksDisagree(
                f"rank {rank} is at step {record.step} with weights {record.epoch}; rank 0 is at step {first.step} with"
                f" weights {first.epoch}"
            )
        if record.digest != first.digest:
            raise RanksDisagree(f"before step {first.step} rank {rank} ran other passes than rank 0")
    busy = [record for record in records if record.rows]
    has_drafter = all(record.has_drafter for record in records)
    # the wish of the busiest rank: a rank that samples nothing has no say
    busiest = max(records, key=lambda record: record.emitting)
    num_drafts = busiest.num_drafts if busiest.emitting and has_drafter else 0
    query = max((record.sampled_per_row for record in busy), default=1)
    extends = bool(busy) and has_drafter and (num_drafts > 0 or any(record.tokens > record.rows for record in busy))
    deferred = max(record.deferred_if_extended if extends else record.deferred_if_kept for record in records)
    return AgreedStep(
        ranks=len(records),
        rows=max(record.rows for record in records),
        tokens=max(record.tokens for record in records),
        emitting=max(record.emitting for record in records),
        sampled_per_row=query,
        is_verify=all(record.is_verify for record in busy),
        is_uniform=all(record.is_uniform and record.sampled_per_row == query for record in busy),
        score_passes=max(record.score_passes for record in records),
        num_drafts=num_drafts,
        has_drafter=has_drafter,
        leaving=max(record.leaving for record in records) if has_drafter else 0,
        deferred=deferred if has_drafter else 0,
        extends=extends,
    )


def _alone(own: Record) -> AgreedStep:
    """The same for one rank, in a fraction of the time."""
    num_drafts = own.num_drafts if own.emitting and own.has_drafter else 0
    extends = own.has_drafter and own.rows > 0 and (num_drafts > 0 or own.tokens > own.rows)
    deferred = own.deferred_if_extended if extends else own.deferred_if_kept
    return AgreedStep(
        1, own.rows, own.tokens, own.emitting, own.sampled_per_row, own.is_verify, own.is_uniform, own.score_passes,
        num_drafts, own.has_drafter, own.leaving * own.has_drafter, deferred * own.has_drafter, extends,
    )  # fmt: skip
