"""Every feature with every other: a covering array. Each case gives the plain engine's tokens.

The plain engine runs one request at a time, whole prompts, no prefix cache, plenty of pages, depth 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.compose.covering import covering
from tests.compose.workload import JUMP, ROUNDING, Answer, Ask, gap, serve, workload
from tests.configs import config
from thalweg.config.engine import EngineConfig
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine, choice_params

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
COLUMNS: dict[str, list[Any]] = {
    "chunked_prefill_size": [48, 100, 2048],
    "max_steps_in_flight": [1, 2],
    "radix_cache": [True, False],
    "num_pages": [7, 10, 200],  # the longest sequence takes 5
    "schedule_policy": ["fcfs", "lpm", "priority"],
    "max_running_requests": [3, 16],
    "kind": ["greedy", "seeded", "penalised"],
    "logprobs": [True, False],
    "prompt_logprobs": [True, False],
    "n": [1, 2],
    "drafts": ["none", "nextn-3", "nextn-tree", "ngram-4", "adaptive"],
}
# the columns that are fields of an engine's configuration
SCHEDULING = (
    "chunked_prefill_size",
    "max_steps_in_flight",
    "radix_cache",
    "num_pages",
    "schedule_policy",
    "max_running_requests",
)
DRAFTING: dict[str, dict[str, Any]] = {
    "none": {},
    "nextn-3": {"speculative_algorithm": "NEXTN", "num_drafts": 3},
    "ngram-4": {"speculative_algorithm": "NGRAM", "num_drafts": 4},
    "nextn-tree": {"speculative_algorithm": "NEXTN", "num_drafts": 9, "tree": TreeShape(3, 3, 9)},
    # a fixed tree, or what is left of it: one token, or none; times that make every width the best for some number of
    # requests and some odds
    "adaptive": {
        "speculative_algorithm": "NEXTN",
        "num_drafts": 5,
        "tree": TreeShape(2, 3, 5, dynamic=False),
        "speculative_step_times": ((1, 64, (1.0, 1.1, 1.2, 1.3, 1.35, 1.4)), (8, 64, (1.0, 1.5, 2.0, 2.3, 2.4, 2.5))),
    },
}
# and what has weights of its own; of heads the folder comes with the case. The bundled model drafts for itself
DRAFTING |= {
    "eagle3-tree": {"speculative_algorithm": "EAGLE3", "num_drafts": 6, "tree": TreeShape(2, 3, 6)},
    "eagle": {"speculative_algorithm": "EAGLE3", "num_drafts": 2},
    "small-2": {"speculative_algorithm": "STANDALONE", "num_drafts": 2, "speculative_draft_model_path": MODEL},
}
# a draft must be the model's best token: greedy ones are then the model's own, and others are not
RELAXED = {"speculative_relaxed_topk": 1, "speculative_relaxed_delta": 0.0}
SEED = 7
Make = Callable[..., LocalEngine]  # takes fields of `EngineConfig`
CASES = covering(COLUMNS, SEED)


# kinds of drafters and rules of acceptance that are no columns above, each with what asks most of it; all else as it
# comes
MORE: list[dict[str, Any]] = [
    case | {"kind": kind, "n": n, "drafts": drafts, "rule": rule}
    for case, (kind, n, drafts, rule) in zip(
        (one for one in CASES if one["chunked_prefill_size"] < 2048 and one["max_steps_in_flight"] == 2),
        (
            ("penalised", 2, "eagle3-tree", "gumbel-max"),
            ("seeded", 2, "eagle", "gumbel-max"),
            ("seeded", 1, "small-2", "rejection-sampling"),
            ("greedy", 2, "small-2", "rejection-sampling"),
            ("penalised", 1, "nextn-tree", "relaxed"),
        ),
        strict=False,
    )
]


def name(case: dict[str, Any]) -> str:
    return "-".join(f"{value}" for value in case.values())


def settings(device: str = "cpu", **fields: Any) -> EngineConfig:
    """The engine of these tests; `fields` as `tests.configs.fields`."""
    common = {"model_path": MODEL, "context_length": 400, "eos_ids": (1,), "show_progress": False, "warmup": False}
    return config(device=device, **common, **fields)


def on_cpu(**fields: Any) -> LocalEngine:
    return LocalEngine(settings(**fields))


@cache
def plain(kind: str, n: int, make: Make) -> tuple[list[Ask], list[Answer]]:
    """The reference, with everything that a case may ask for; each request runs alone."""
    engine = make(
        chunked_prefill_size=4096,
        max_steps_in_flight=1,
        radix_cache=False,
        num_pages=200,
        max_running_requests=16,
    )
    asks = workload(SEED, engine.vocab, kind, logprobs=True, prompt_logprobs=True, n=n)
    return asks, [answer for ask in asks for answer in serve(engine, [ask])]


def per_sequence(asks: list[Ask]) -> list[tuple[Ask, SamplingParams]]:
    return [(ask, choice_params(ask.params, i)) for ask in asks for i in range(ask.params.n)]


def check(case: dict[str, Any], make: Make = on_cpu, heads: Path | None = None, most_jumps: int = 2) -> None:
    """Asserts that this engine gives the plain one's tokens, and that all its pages come home. Rules that sample other
    tokens give as many as were asked for. heads: has the drafters' folders by their names.
    """
    kind, n, rule = case["kind"], case["n"], case.get("rule", "gumbel-max")
    drafting = DRAFTING[case["drafts"]] | (
        {} if heads is None else {"speculative_draft_model_path": str(heads / case["drafts"])}
    )
    reference_asks, reference = plain(kind, n, make)
    engine = make(
        **{name: value for name, value in case.items() if name in SCHEDULING},
        **{"speculative_acceptance": rule, **RELAXED, **drafting},
    )
    asks = workload(SEED, engine.vocab, kind, case["logprobs"], case["prompt_logprobs"], n)
    answers = serve(engine, asks)
    jumped: set[Ask] = set()  # n siblings jump together
    for (ask, params), want, got in zip(per_sequence(reference_asks), reference, answers, strict=True):
        if rule != "gumbel-max" and kind == "seeded":
            whole(params, got)
        elif compare(ask, params, want, got, kind):
            jumped.add(ask)
    assert len(jumped) <= most_jumps, f"{len(jumped)} requests left the reference at near ties: too many to be rounding"
    allocator = engine.loop.scheduler.allocator
    assert allocator.num_available() == allocator.num_pages, "a page did not come home"


def whole(params: SamplingParams, got: Answer) -> None:
    """Asserts that it ends where it must."""
    assert got.finish == ("stop" if len(got.tokens) < params.max_tokens else "length") or got.tokens[-1] == 1
    assert len(got.tokens) == params.max_tokens or not params.ignore_eos
    assert params.logprobs is None or not got.logprobs or len(got.logprobs) == len(got.tokens)


def compare(ask: Ask, params: SamplingParams, want: Answer, got: Answer, kind: str) -> bool:
    """Asserts that the sequences are the same; says whether a near tie moved one of them."""
    parted = next((i for i, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=False)) if a != b), None)
    if parted is None:
        assert got.tokens == want.tokens and got.finish == want.finish
    else:
        apart = gap(params, want.logprobs[parted], len(ask.prompt) + parted, params.seed or 0, kind)
        assert apart < JUMP, f"parted at {parted} of {len(want.tokens)}, where the candidates are {apart} apart"
    if got.prompt_logprobs:
        assert len(got.prompt_logprobs) == len(ask.prompt) - 1
    pairs = [*zip(want.logprobs[:parted], got.logprobs[:parted], strict=False)]
    pairs += zip(want.prompt_logprobs, got.prompt_logprobs, strict=False)
    moved = max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0)
    assert moved < JUMP
    return parted is not None or moved > ROUNDING
