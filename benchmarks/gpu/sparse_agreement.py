"""Whether a model with sparse attention (DSA) and experts computes the same however a prompt is cut.

    python benchmarks/gpu/sparse_agreement.py --model FOLDER [--check choices|bits] [--tokens 3000] [--out
    sparse_agreement.json]

Both kinds of choice, context tokens by an indexer and experts by a router, are top-k of scores that are rounded. Steps
of other sizes round otherwise, so candidates that are nearly equal at the k-th place change places, and after one that
does, everything is other. Of random weights there are many: 2,048 of 3,000 tokens are chosen where their density is
largest.

choices: one prompt whole, in chunks, and behind a prefix hit, by the plain (fast) kernels; twice each: with its own
choices, and with those of the whole run imposed. If no more than rounding differs then
  - with imposed choices the logits agree to rounding. In bf16 each product rounds its result to 2^-9, and a handful of
    them follow one another in a layer: 2 %. With FP8 weights activations are quantised, too: where rounding takes a
    number over the border between two codes, it moves by a sixteenth, so that 0.4 % becomes the root of 0.4 % · 6 %,
    1.5 % a product, and five products follow one another in a layer: 15 %. (The bounds of tests/gpu/test_models.py.
    Results that have nothing to do with each other are 141 % apart.)
  - choices that would be other (what a layer would have chosen by itself, from its own, hardly different input) are
    about as many as normal noise of the measured size makes of the whole run's scores ("expected"), and lie within it:
    two candidates that change places have a gap of no more than NEAR times the noise of a difference of two scores. The
    noise is rounding's, too: of the spread of a token's scores, each a product of a query, a key and a weight, no more
    than twice the bound of the logits. (Of the median token; of each three times as much.)
  - experts are what the router's formula gives for its input, but for ties. bits: with --enable-deterministic-inference
tokens and log-probabilities, bit for bit: whole; behind a prefix hit; in chunks beside other requests; behind a hit
beside others.

The exit status is 1 if any of this does not hold. Wants a FOLDER of DeepSeek V3.2's kind, random weights unless
--load-format says otherwise.

H100, deepseek-v32-slim, chunks of 512: the logits behind the last of 3,000 tokens are 30 % apart, with imposed choices
7.7 % (no token 8.3 %, after any layer); in bf16 (a config.json without quantization_config, 3 layers) 1.5 % and 0.9 %.
Layer 0's index scores differ by 0.07 % of their spread, and 92 of 1.9 million choices do. A deterministic token of a
prompt takes 12 ms. (benchmarks/gpu/h100/sparse_agreement_*.json)
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.attention.selection import Selection, select_top_k
from thalweg.batch.inputs import build_inputs
from thalweg.bench.results import provenance, write
from thalweg.config.tree import options_of
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.layers.moe import MoeBlock

SEED, BF16 = 3, 2.0**-9
BOUNDS = {False: 0.02, True: 0.15}  # by whether weights are FP8
NEAR = 8.0
# of scores near 1: what a tensor core's sum of thousands of products in float32 is off; bf16 would be off by more
FORMULA = 1e-4
NEW, OTHERS = 8, (40, 75, 130)  # tokens generated, and the lengths of the prompts beside
KINDS = ("context", "groups", "experts")

Cut = tuple[int, int]


class Picks(NamedTuple):
    """What one layer chose among, and what, by position: scores float32 [T, C], -inf where there is no candidate;
    chosen bool [T, C].
    """

    scores: Tensor
    chosen: Tensor

    def keep(self, at: Tensor | slice, scores: Tensor, chosen: Tensor) -> None:
        width = scores.shape[1]
        self.scores[at, :width], self.chosen[at, :width] = scores, chosen


class Run:
    """What a run computed of positions from `first` on: hidden states after each layer, logits of the last ones, picks
    by kind and layer.
    """

    def __init__(self, first: int, tokens: int, device: torch.device) -> None:
        self.first, self.tokens, self.device = first, tokens, device
        self.hidden: dict[int, list[Tensor]] = {}
        self.logits = torch.empty(0)
        self.picks: dict[tuple[str, int], Picks] = {}
        self.off = 0  # tokens whose experts are not the formula's

    def of(self, kind: str, layer: int, candidates: int) -> Picks:
        if (kind, layer) not in self.picks:
            size = self.tokens, candidates
            scores = torch.full(size, -torch.inf, device=self.device)
            self.picks[kind, layer] = Picks(scores, torch.zeros(size, dtype=torch.bool, device=self.device))
        return self.picks[kind, layer]


class Watch:
    """Keeps what a model computes, and imposes the choices of an earlier run on it."""

    def __init__(self, model: Any, width: int) -> None:
        """width: the longest context, in whole pages."""
        self.model, self.width, self.at = model, width, slice(0)
        self.run: Run | None = None
        self.imposed: Run | None = None
        for layer, block in enumerate(model.layers):
            block.register_forward_hook(self._hidden(layer))
            if block.attention.indexer is not None:
                block.attention.indexer.selection = self._selection(layer)
            if isinstance(block.mlp, MoeBlock):
                self._watch_reference(layer, block.mlp)
            elif model.facts.moe.in_layer(layer):
                self._watch_fused(layer, block.mlp)

    def _hidden(self, layer: int) -> Any:
        def keep(module: nn.Module, given: tuple[Any, ...], result: object) -> None:
            assert self.run is not None
            self.run.hidden.setdefault(layer, []).append(given[0].value().clone())

        return keep

    def _selection(self, layer: int) -> Selection:
        def select(scores_NS: Tensor, topk: int) -> Tensor:
            assert self.run is not None
            index, candidate = select_top_k(scores_NS, topk), scores_NS > -torch.inf
            at = candidate.sum(1) - 1  # a token may attend to all before it and to itself
            chosen = torch.zeros_like(candidate).scatter_(1, index, True) & candidate
            self.run.of("context", layer, self.width).keep(at, scores_NS, chosen)
            if self.imposed is None:
                return index
            return select_top_k(self.imposed.picks["context", layer].chosen[at, : scores_NS.shape[1]].float(), topk)

        return select

    def _watch_fused(self, layer: int, part: Any) -> None:
        from thalweg.kernels.norm.triton import rows_of  # needs Triton

        run, topk = part.run, part.router.rule.topk

        def watched(out_TH: Tensor, x: Any, routed: Any, weights: Any) -> None:
            given = self._route(layer, rows_of(x), part.router, routed.ids_TK[:, :topk].long())
            if given is not None:
                routed.weights_TK[:, :topk], routed.ids_TK[:, :topk] = given
            run(out_TH, x, routed, weights)

        part.run = watched

    def _watch_reference(self, layer: int, block: MoeBlock) -> None:
        forward = block.router.forward

        def watched(x_TH: Tensor) -> tuple[Tensor, Tensor]:
            weights_TK, ids_TK = forward(x_TH)
            given = self._route(layer, x_TH, block.router, ids_TK)
            return (weights_TK, ids_TK) if given is None else given

        block.router.forward = watched  # type: ignore[method-assign]

    def _route(self, layer: int, x_TH: Tensor, router: Any, ids_TK: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keeps a choice of experts by sigmoid scores; → weights and ids of the imposed one."""
        assert self.run is not None
        rule = router.rule
        scores_TE = torch.mm(x_TH.float(), router.weight.float().t()).sigmoid()
        biased_TE = scores_TE + router.bias
        worth_TG = biased_TE.view(len(x_TH), rule.groups, -1).topk(2).values.sum(-1)
        each = rule.experts // rule.groups
        self.run.off += _off(biased_TE, worth_TG, ids_TK, min(rule.topk_groups, rule.groups))
        # the groups of the chosen, and of the others the best: the formula's but for ties
        held_TG = _mask(ids_TK // each, worth_TG)
        kept_TG = _mask(worth_TG.masked_fill(held_TG, torch.inf).topk(rule.topk_groups).indices, worth_TG)
        biased_TE = biased_TE.masked_fill_(~kept_TG.repeat_interleave(each, 1), -torch.inf)
        self.run.of("groups", layer, rule.groups).keep(self.at, worth_TG, kept_TG)
        self.run.of("experts", layer, rule.experts).keep(self.at, biased_TE, _mask(ids_TK, biased_TE))
        if self.imposed is None:
            return None
        ids_TK = self.imposed.picks["experts", layer].chosen[self.at].float().topk(rule.topk).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if rule.renormalize:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        return weights_TK * rule.scale, ids_TK


def _off(biased_TE: Tensor, worth_TG: Tensor, ids_TK: Tensor, kept: int) -> int:
    """How many tokens' experts are not the best ones of the `kept` best groups, by more than FORMULA."""
    each = biased_TE.shape[1] // worth_TG.shape[1]
    best_TG = torch.nn.functional.pad(worth_TG, (0, 1), value=-torch.inf).sort(1, descending=True).values
    maybe_TG, sure_TG = worth_TG > best_TG[:, kept - 1, None] - FORMULA, worth_TG > best_TG[:, kept, None] + FORMULA
    chosen_TE = _mask(ids_TK, biased_TE)
    least, most = _border(
        biased_TE.masked_fill(~sure_TG.repeat_interleave(each, 1) & ~chosen_TE, -torch.inf), chosen_TE
    )
    outside = (chosen_TE & ~maybe_TG.repeat_interleave(each, 1)).any(1)
    return int((outside | (most > least + FORMULA)).sum())


def _mask(index_NK: Tensor, like_NC: Tensor) -> Tensor:
    return torch.zeros_like(like_NC, dtype=torch.bool).scatter_(1, index_NK, True)


def _border(scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The least score that was chosen and the largest that was not, of each token."""
    return scores.masked_fill(~chosen, torch.inf).amin(1), scores.masked_fill(chosen, -torch.inf).amax(1)


@torch.inference_mode()
def computed(engine: LocalEngine, watch: Watch, prompt: tuple[int, ...], cuts: list[Cut], imposed: Run | None) -> Run:
    """One prompt in these steps, on pages 1 and on; what stands before the first cut is found there."""
    runner, first = engine.runner, cuts[0][0]
    run = watch.run = Run(first, len(prompt), runner.planes.device)
    watch.imposed = imposed
    params = SamplingParams(temperature=0.0)
    bind = Bind(0, prompt, len(prompt), first, engine.context, 0, (), params)
    pages = tuple(range(1, -(-len(prompt) // PAGE) + 1))
    runner.slots.bind([bind])
    runner.slots.append([PageAppend(0, 0, pages)])
    for start, stop in cuts:
        row = Row(0, 0, start, stop - start, 0, stop == len(prompt))
        watch.at = slice(start, stop)
        hidden_TH = runner.model.forward(
            build_inputs(StepPlan(0, 0, (row,), max_kv_len=stop), runner.slots).batch, runner.planes
        )
    run.logits = runner.model.logits(hidden_TH[-(len(prompt) % PAGE or PAGE) :])
    return run


def apart(there_ND: Tensor, here_ND: Tensor) -> Tensor:
    """|here - there| / |there|, of each token."""
    there, here = there_ND.double(), here_ND.double()
    relative_N: Tensor = (here - there).norm(dim=1) / there.norm(dim=1)
    return relative_N


def flips(there: Picks, here: Picks, rows: Tensor) -> dict[str, float]:
    """How the choices of these tokens differ, and what the scores say of it. noise: of a score, root mean square of a
    token's differences.
    """
    s0, c0, s1, c1 = (x[rows] for x in (*there, *here))
    both, lost, won = (s0 > -torch.inf) & (s1 > -torch.inf), c0 & ~c1, c1 & ~c0
    count, moved = both.sum(1).clamp(min=2), torch.where(both, s1 - s0, 0.0)
    noise = (moved.square().sum(1) / count).sqrt()
    mean = torch.where(both, s0, 0.0).sum(1) / count
    spread = (torch.where(both, s0 - mean[:, None], 0.0).square().sum(1) / count).sqrt()
    least, most = _border(s0, c0)
    # a candidate changes sides where noise takes it over the border; every pair that does is counted at both
    away = (s0 - ((least + most) / 2)[:, None]).abs() / noise.clamp(min=1e-30)[:, None]
    expected = torch.where(both, 0.5 * torch.erfc(away / 2**0.5), 0.0).sum() / 2
    some = lost.any(1) & won.any(1)
    gap = (s0.masked_fill(~lost, -torch.inf).amax(1) - s0.masked_fill(~won, torch.inf).amin(1))[some]
    within = gap / (noise[some] * 2**0.5).clamp(min=1e-30)  # of an exact tie 0
    return {
        "chosen": int(c0.sum()),
        "flipped": int(lost.sum()),
        "expected": round(float(expected), 1),
        "noise_over_spread": float((noise / spread).median()) if len(noise) else 0.0,
        "largest_noise_over_spread": float((noise / spread).max()) if len(noise) else 0.0,
        "noise_in_bf16_roundings": float((noise / spread).median()) / BF16 if len(noise) else 0.0,
        "largest_gap_over_spread": float((gap / spread[some]).max()) if len(gap) else 0.0,
        "largest_gap_over_noise": float(within.max()) if len(gap) else 0.0,
    }


def compared(there: Run, here: Run, topk: int) -> dict[str, Any]:
    """topk: of the indexer; tokens before it have no choice."""
    own = slice(here.first, here.tokens)
    logits = apart(there.logits, here.logits)
    tops = there.logits.topk(2).values
    found: dict[str, Any] = {
        "logits_error": float(logits[-1]),
        "logits_error_median": float(logits.median()),
        "logits_error_max": float(logits.max()),
        "same_best_token": float((there.logits.argmax(1) == here.logits.argmax(1)).float().mean()),
        "gap_of_the_two_best_over_spread": float(((tops[:, 0] - tops[:, 1]) / there.logits.std(1)).median()),
        "experts_off_formula": here.off,
        "layers_error": [],
    }
    for layer, parts in here.hidden.items():
        error = apart(torch.cat(there.hidden[layer])[own], torch.cat(parts))
        found["layers_error"].append({"median": float(error.median()), "max": float(error.max())})
    at = torch.arange(here.tokens, device=here.device)
    for kind in KINDS:
        by_layer = {}
        for layer in (layer for name, layer in there.picks if name == kind):
            rows = at >= max(here.first, topk if kind == "context" else 0)
            if kind == "experts":  # in other groups are other candidates
                rows &= (there.picks["groups", layer].chosen == here.picks["groups", layer].chosen).all(1)
            by_layer[layer] = flips(there.picks[kind, layer], here.picks[kind, layer], rows)
        found[kind] = by_layer
    return found


def total(found: dict[str, Any], kind: str, what: str) -> float:
    values = [one[what] for one in found[kind].values()]
    return sum(values) if what in ("chosen", "flipped", "expected") else max(values, default=0.0)


def near(found: dict[str, Any], bound: float) -> bool:
    """Whether a run with imposed choices differs by rounding only: the middle of its tokens, and each."""
    error, furthest = found["logits_error_median"], max(one["max"] for one in found["layers_error"])
    noise = max(total(found, kind, "noise_over_spread") for kind in KINDS)
    largest = max(total(found, kind, "largest_noise_over_spread") for kind in ("context", "experts"))
    gap = max(total(found, kind, "largest_gap_over_noise") for kind in KINDS)
    small = (
        max(error, found["logits_error"]) < bound and furthest < 3 * bound and noise < 2 * bound and largest < 6 * bound
    )
    return small and gap < NEAR and not found["experts_off_formula"]


def check_choices(engine: LocalEngine, prompt: tuple[int, ...], chunk: int) -> dict[str, Any]:
    model: Any = engine.runner.model
    facts, tokens = model.facts, len(prompt)
    fp8 = bool(facts.quantization_config) and engine.config.kernels.decode != "reference"
    watch = Watch(model, -(-tokens // PAGE) * PAGE)
    whole = computed(engine, watch, prompt, [(0, tokens)], None)
    hit = (tokens - 1) // PAGE * PAGE
    # a hit first: it goes on from what the whole run left on the pages
    ways = {
        "prefix hit": [(hit, tokens)],
        f"chunks of {chunk}": [(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)],
    }
    results, fine = {}, whole.off == 0
    print(f"{'':28} error of logits: last, median   in layers (median)", flush=True)
    for way, cuts in ways.items():
        for name, imposed in (("own choices", None), ("imposed", whole)):
            found = compared(whole, computed(engine, watch, prompt, cuts, imposed), facts.indexer.topk)
            if imposed is not None:
                found["rounding_only"] = near(found, BOUNDS[fp8])
                fine = fine and found["rounding_only"]
            results[f"{way}, {name}"] = found
            show(f"{way}, {name}", found)
    bound = BOUNDS[fp8]
    print(
        f"rounding only: {fine} (imposed: below {bound:.0%}, noise below {2 * bound:.0%}, gaps below {NEAR} of noise)",
        flush=True,
    )
    return {"bound": bound, "near": NEAR, "rounding_only": fine, "runs": results}


def show(name: str, found: dict[str, Any]) -> None:
    layers = " ".join(f"{one['median']:.4f}" for one in found["layers_error"])
    print(f"{name:28} {found['logits_error']:.4f} {found['logits_error_median']:.4f}   {layers}")
    for kind in KINDS:
        flipped, expected, chosen = (total(found, kind, what) for what in ("flipped", "expected", "chosen"))
        noise, gap, wide = (
            total(found, kind, what)
            for what in ("noise_over_spread", "largest_gap_over_noise", "largest_gap_over_spread")
        )
        print(
            f"    {kind:8} {flipped:8.0f} of {chosen:9.0f} flipped, {expected:9.0f} expected of noise {noise:.2%} of"
            f" the spread; largest gap {wide:.2%} of it, {gap:.1f} of noise",
            flush=True,
        )


def served(engine: LocalEngine, prompts: list[tuple[int, ...]]) -> tuple[dict[str, Any], int]:
    """The first prompt's tokens and log-probabilities, and how many of its tokens came from the cache; the others run
    beside it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=4, ignore_eos=True)
    uids = [engine.submit(prompt, params)[0] for prompt in prompts]
    tokens: list[int] = []
    logprobs: list[Any] = []
    cached = 0
    while not engine.idle:
        for delta in engine.step():
            if delta.uid == uids[0]:
                tokens += delta.tokens
                logprobs += delta.logprobs
                cached = max(cached, delta.cached)
    return {"tokens": tokens, "logprobs": logprobs}, cached


def check_bits(engine: LocalEngine, prompt: tuple[int, ...], chunk: int, rng: random.Random) -> dict[str, Any]:
    others = [tuple(rng.randrange(engine.vocab) for _ in range(tokens)) for tokens in OTHERS]
    limits = engine.loop.scheduler.limits
    # name, prompts, tokens a step, whether what the cache holds is forgotten first
    cases = [
        ("whole", [prompt], limits.budget, True),
        ("prefix hit", [prompt], limits.budget, False),
        ("prefix hit beside others", [prompt, *others], limits.budget, False),
        (f"chunks of {chunk} beside others", [prompt, *others], chunk, True),
    ]
    results: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, prompts, budget, fresh in cases:
        if fresh:
            engine.flush_cache()
        engine.loop.scheduler.limits = dataclasses.replace(limits, budget=budget)
        begin = time.perf_counter()
        got, cached = served(engine, prompts)
        plain = plain or got
        same = got == plain and len(got["tokens"]) == NEW and (cached == 0) == fresh
        results[name] = {"same_bits": same, "cached": cached, "seconds": round(time.perf_counter() - begin, 2)}
        print(f"{name:28} same bits: {same} ({cached} tokens from the cache), {got['tokens']}", flush=True)
    return {"same_bits": all(one["same_bits"] for one in results.values()), "runs": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder; its config.json is enough for random weights")
    parser.add_argument("--check", choices=("choices", "bits"), default="choices")
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt; well past index_topk")
    parser.add_argument("--chunk", type=int, default=512, help="tokens; whole pages")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--out", default="sparse_agreement.json")
    said = parser.parse_args()
    begin = time.perf_counter()
    config = options_of(
        model=said.model,
        load_format=said.load_format,
        dtype=said.dtype,
        context_length=4096,
        max_running_requests=4,
        max_total_tokens=4 * 4096,
        chunked_prefill_size=4096,
        deterministic_inference=said.check == "bits",
        random_seed=1,
        warmup=False,
    )
    engine = LocalEngine(resolve(config, weights=False, progress=False).engine)
    facts = engine.runner.model.facts
    if facts.indexer is None or facts.moe is None or facts.moe.method != "noaux_tc":
        parser.error(
            f"{said.model}: has no indexer, or no experts chosen by sigmoid scores, so there is nothing to compare"
        )
    if not facts.indexer.topk < said.tokens < engine.context:
        parser.error(f"--tokens must be more than index_topk, {facts.indexer.topk}, and less than {engine.context}")
    if said.chunk % PAGE:
        parser.error(f"--chunk must be a multiple of {PAGE}, got {said.chunk}")
    ready = time.perf_counter()
    rng = random.Random(SEED)
    prompt = tuple(rng.randrange(engine.vocab) for _ in range(said.tokens))
    if said.check == "choices":
        found = check_choices(engine, prompt, said.chunk)
    else:
        found = check_bits(engine, prompt, said.chunk, rng)
    found["seconds"] = {"start": round(ready - begin, 1), "check": round(time.perf_counter() - ready, 1)}
    told = {"model": Path(said.model).name, "layers": facts.layers, "fp8": bool(facts.quantization_config), **found}
    command = (
        f"python benchmarks/gpu/sparse_agreement.py --model {told['model']} --check {said.check} --tokens {said.tokens}"
    )
    write(Path(said.out), told | provenance("", [], {}) | {"command": f"{command} --chunk {said.chunk}"})
    return 0 if found.get("rounding_only", found.get("same_bits")) else 1


if __name__ == "__main__":
    sys.exit(main())
