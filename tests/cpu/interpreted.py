"""Kernels of sampling under Triton's interpreter, which needs no GPU, against their references; a process of its own, since Triton looks once whether
it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, Needs
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.adjust import triton as adjusting
from thalweg.kernels.temper import case
from thalweg.kernels.temper import triton as tempering
from thalweg.sampling.sample import BANNED, REFERENCE

EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": -0.7, "frequency_penalty": 0.1, "min_tokens": 99, "logit_bias": ((3, 5.0),)},
    {"frequency_penalty": 0.4},
]  # fmt: skip


@triton.jit
def logarithm(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


def tempered(lists: int) -> None:
    """lists: ids that a row may list; of more the border is searched."""
    vars(tempering).update(LIST=lists, SHORT=lists // 2)
    for one in case.cases(torch.Generator().manual_seed(lists)):
        errors = one.errors(case.run_triton(**one.given(), device="cpu"))
        assert max(errors) <= one.tolerance, (lists, one.name, errors)


def adjusted(vocab: int, query: int, drafts: int) -> None:
    """Nodes of trees, and rows that are none."""
    generator = torch.Generator().manual_seed(vocab)
    slots = Slots(len(EDITS), 200, torch.device("cpu"))
    for slot, edit in enumerate(EDITS):
        known = torch.randint(0, vocab, (5 + 60 * slot,), generator=generator).tolist()
        slots.bind([Bind(slot, tuple(known), 3, 0, 199, slot, (7, 1), SamplingParams(**edit))])
    for each, behind in (
        (query, torch.randint(-1, vocab, (len(EDITS), query, drafts), generator=generator)),
        (1, None),
    ):
        slot_N = torch.arange(len(EDITS)).repeat_interleave(each)
        logits, ints_NI = torch.randn(len(slot_N), vocab, generator=generator) * 3, slots.ints_SI[slot_N]
        want, got = logits.clone(), logits.clone()
        REFERENCE.edit(want, slots, slot_N, ints_NI, Needs(penalised=True, biased=True), 200, None, behind)
        held = slots.floats_SF, slots.tokens_SL, slots.stop_SK, (slots.bias_ids_SB, slots.bias_SB)
        adjusting.adjust(got, slot_N, ints_NI, *held, True, True, BANNED, behind)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert not torch.equal(want, logits)


def main() -> int:
    tl.extra.cuda.libdevice.fast_logf = logarithm  # the device's own is nothing that is interpreted
    vars(adjusting)["BLOCK"] = 32  # so that sequences have several
    for lists in (256, 16):
        tempered(lists)
    for shape in ((12, 4, 3), (60, 16, 4)):
        adjusted(*shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
