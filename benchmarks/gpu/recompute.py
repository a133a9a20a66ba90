"""Whether a long generation stays what it should be: everything that the cache holds of it, and the logits behind its
last tokens, against the same tokens computed anew as a prompt.

A step of few tokens itself computes other numbers than a large one: it rounds otherwise, and where two experts, or two
tokens of a sparse context, are all but equally good, another one is taken, after which much is other. So the last pages
of the prompt are computed a second time, one page a step, and the generation may be as far from the prompt as twice
these are, or as rounding (`FLOORS`: of a handful of products behind each other in a layer, see
benchmarks/gpu/sparse_agreement.py). Where nothing was chosen before, in layer 0 and up to the first experts, every
single position must agree to rounding; elsewhere no more than one in a thousand may be so far off that it might be
another's: unrelated vectors are 141 % apart, one choice that is other costs 20 to 60 %.

What is no number is written into the cache as 0 or as the largest number: so a vector of zeros, and what is not finite,
count as broken. Of hidden states behind the last layer the entries of a next-token layer are made, which are compared
and counted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import CODECS
from thalweg.quant.catalog import quantized
from thalweg.spec.autoregressive import HIDDEN

FLOORS = {"float32": 1e-3, "bfloat16": 0.02, "fp8": 0.15}
RELATED = 0.7  # half of what unrelated vectors are apart: a median beyond it would say nothing
OTHERS = 0.9  # from here on a vector may be another position's; where something was zeroed it is 1
MOST = 1e-3  # of the positions of a plane
TWICE, RARE = 2.0, 0.99  # what counts of the differences: the middle one, and that of so many
AGAIN = 32  # pages that are computed a second time

Cut = tuple[int, int]
Where = tuple[str, int]


class Held(NamedTuple):
    """What the cache holds, by name and layer, [P, D] each of so many positions; and logits [N, V] of the last ones."""

    planes: dict[Where, Tensor]
    logits: Tensor


class Apart(NamedTuple):
    """How far each position is from the prompt's, float32 [P]. broken: of those that are no numbers, or were none."""

    error_P: Tensor
    broken: int


def generated(engine: LocalEngine, prompt: Sequence[int], tokens: int, seed: int) -> Request:
    """A request that has come to know at least so many tokens and goes on, at temperature 1: greedy tokens of random
    weights soon repeat themselves. Nothing is in flight. Its context must have room for two more steps.
    """
    most = engine.context - len(prompt)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=most, ignore_eos=True)
    (uid,) = engine.submit(prompt, params)
    requests = engine.loop.scheduler.requests
    engine.step()
    while requests[uid].num_tokens < tokens:
        engine.step()
    engine.loop.commit_until(0)
    return requests[uid]


@torch.inference_mode()
def check(engine: LocalEngine, r: Request, chunk: int) -> dict[str, Any]:
    """What generated this request against its tokens computed as a prompt in steps of `chunk` tokens, and the last
    pages of that one page a step. Its pages are written anew, and the engine serves nothing afterwards.
    """
    tokens, pages = r.tokens, tuple(r.pages)
    stop = (len(tokens) - 1) // PAGE * PAGE
    grown = _planes(engine, pages, stop)
    # of the last page logits are computed anew, from all that was generated before it
    made = Held(grown, computed(engine, r.slot, tokens, pages, [(stop, len(tokens))]))
    border = (
        (stop - 1) // chunk * chunk
    )  # the last step has at least the last page, of whose positions logits are compared
    cuts = [(at, at + chunk) for at in range(0, border, chunk)] + [(border, stop), (stop, len(tokens))]
    whole = Held({}, computed(engine, r.slot, tokens, pages, cuts))
    whole = Held(_planes(engine, pages, stop), whole.logits)
    again = max(stop - AGAIN * PAGE, PAGE)
    cuts = [(at, at + PAGE) for at in range(again, stop, PAGE)] + [(stop, len(tokens))]
    logits = computed(engine, r.slot, tokens, pages, cuts)
    small = Held({where: plane[again:] for where, plane in _planes(engine, pages, stop).items()}, logits)
    floor, rows = _floor(engine), []
    for (name, layer), plane in grown.items():
        there = whole.planes[name, layer]
        found = judged(
            apart(there, plane), apart(there[again:], small.planes[name, layer]), floor, _certain(engine, layer)
        )
        rows.append({"name": name, "layer": layer, **found})
    found = judged(apart(whole.logits, made.logits), apart(whole.logits, small.logits), floor, False)
    rows.append({"name": "logits", "layer": engine.runner.model.facts.layers, **found})
    fine = all(row["fine"] for row in rows)
    return {"tokens": len(tokens), "distinct_tokens": len(set(tokens)), "floor": floor, "fine": fine, "parts": rows}


def _floor(engine: LocalEngine) -> float:
    fp8 = (
        quantized(engine.runner.model.facts.quantization_config) is not None
        and engine.config.kernels.decode != "reference"
    )
    return FLOORS["fp8" if fp8 else engine.config.dtype]


def _certain(engine: LocalEngine, layer: int) -> bool:
    """Whether nothing is chosen before what this layer keeps."""
    facts = engine.runner.model.facts
    experts = facts.moe is not None and any(facts.moe.in_layer(one) for one in range(layer))
    return layer == 0 or not (experts or facts.indexer or layer >= facts.layers)


def computed(
    engine: LocalEngine, slot: int, tokens: tuple[int, ...], pages: tuple[int, ...], cuts: Sequence[Cut]
) -> Tensor:
    """float32 [N, V]: logits of the positions of the last of these steps. What stands before the first of them is found
    on the pages.
    """
    runner = engine.runner
    greedy = SamplingParams(temperature=0.0)
    binds: tuple[Bind, ...] = (Bind(slot, tokens, len(tokens), cuts[0][0], engine.context, 0, (), greedy),)
    appends: tuple[PageAppend, ...] = (PageAppend(slot, 0, pages),)
    logits = torch.empty(0)
    for start, stop in cuts:
        row = Row(0, slot, start, stop - start, 0, stop == len(tokens))
        plan = StepPlan(0, 0, (row,), binds=binds, appends=appends, max_kv_len=stop)
        binds, appends = (), ()
        forwarded = runner.forward(plan)
        assert forwarded is not None and forwarded.draft_input is not None, "the step has a row"
        if row.samples:
            logits = runner.model.logits(forwarded.draft_input.hidden_TH[: row.n]).clone()
        runner.draft(forwarded, runner.sample(forwarded), 0)
    return logits


def _planes(engine: LocalEngine, pages: Sequence[int], stop: int) -> dict[Where, Tensor]:
    """What lies on these pages of each position before `stop`, a whole number of pages."""
    planes = engine.runner.planes
    index = torch.tensor(pages[: stop // PAGE], device=planes.device)
    return {
        (spec.name, spec.layer): planes.bytes[spec.name, spec.layer].index_select(0, index).view(CODECS[spec.codec]).view(stop, -1)
        for spec in planes.specs
        if spec.name != HIDDEN  # a vector of a page, not of a token
    }  # fmt: skip


def judged(made: Apart, again: Apart, floor: float, certain: bool) -> dict[str, Any]:
    """Whether the generation is as near to the prompt as it must be. again: how near a part of that is to itself.
    certain: whether nothing was chosen before.
    """
    middle, rare = (float(made.error_P.quantile(share)) for share in (0.5, RARE))
    noise, rare_noise = (float(again.error_P.quantile(share)) for share in (0.5, RARE))
    bound, rare_bound = min(max(TWICE * noise, floor), RELATED), min(max(TWICE * rare_noise, 3 * floor), OTHERS)
    others = int((made.error_P >= OTHERS).sum())
    if len(made.error_P) * (1 - RARE) < 1:
        rare_bound = OTHERS  # of so few positions a single other choice is more than that share
    if certain:
        bound = rare_bound = floor
        others += int((made.error_P > floor).sum())
    fine = (
        not made.broken
        and middle <= bound
        and rare <= rare_bound
        and others <= MOST * len(made.error_P) * (not certain)
    )
    return {
        "error_median": middle,
        "error_p99": rare,
        "error_max": float(made.error_P.max()),
        "noise_median": noise,
        "noise_p99": rare_noise,
        "bound_median": bound,
        "bound_p99": rare_bound,
        "others": others,
        "broken": made.broken,
        "fine": fine,
    }


def apart(there_PD: Tensor, here_PD: Tensor) -> Apart:
    """|here - there| / |there|, and infinite where that is no number."""
    there_PD, here_PD = there_PD.float(), here_PD.float()
    broken = int((~here_PD.isfinite()).any(1).sum() + (here_PD == 0).all(1).sum())
    relative_P: Tensor = (here_PD - there_PD).norm(dim=1) / there_PD.norm(dim=1)
    return Apart(torch.nan_to_num(relative_P, nan=torch.inf, posinf=torch.inf), broken)
