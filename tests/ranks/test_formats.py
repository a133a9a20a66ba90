"""Groups of processes serve the bundled model in every published format, and give the tokens of one rank that has the
same weights: a covering array of formats, layouts, drafts, FP8 caches, deterministic inference, prefix cache, overlap
and captured steps. `make soak` runs all triples.

Where activations are rounded to 8 bits, ranks round their own columns of them, and a product's last bit can move a
code. Log-probabilities then move, by 0.06 for INT8 on two ranks (the median), and answers part; the median is held to
JUMP.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import CONFIGS, write
from tests.compose.covering import covering
from tests.compose.matrix import DRAFTING, MODEL, compare, name, settings
from tests.compose.workload import JUMP, Answer, serve
from tests.configs import changed
from tests.ranks.group import ProcessGroup, Script, dealt, submits
from tests.ranks.test_deterministic import asks
from tests.ranks.test_tokens import GRAPHS, answers_of, engine_config
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import TokenLogprob
from thalweg.engine.local import LocalEngine
from thalweg.models import traced
from thalweg.quantize.cli import main as quantize

WRITTEN: dict[str, tuple[str, ...]] = {  # by `thalweg quantize`: its flags
    "int4": ("--format", "int4", "--group-size", "32"),
    "int8": ("--format", "int8"),
    "w4afp8": ("--format", "w4afp8"),
}
COLUMNS: dict[str, list[Any]] = {
    "format": [
        *WRITTEN,
        "awq",
        "gptq",
        "gptq-desc-act",
        "modelopt-nvfp4",
        "modelopt-mxfp8",
        "quark-mxfp4",
        "gpt-oss-mxfp4",
        "int8-block",
        "fp8-channel",
    ],
    "layout": ["tp2", "tp2-ep2"],
    "drafts": ["none", "nextn-3"],
    "kv": ["float32", "fp8_e4m3"],
    "deterministic": [False, True],
    "radix_cache": [True, False],
    "max_steps_in_flight": [1, 2],
    "graphs": ["none", "decode"],
}
INT8_BLOCKS = CONFIGS["int8-block"] | {"weight_block_size": [64, 64]}  # an expert has 128 columns
ROUNDED = ("int8", "w4afp8")  # formats with activations of 8 bits
ASKS = [ask for ask, _ in asks()[-2:]]  # they have a page in common
SCRIPT: Script = tuple(
    (ask.turn, submit) for i, ask in enumerate(ASKS) for submit in submits(i, ask.prompt, ask.params)
)
MOST_JUMPS = {"float32": 1, "fp8_e4m3": len(ASKS)}  # requests; each of them by less than JUMP
SEED = 3


def is_legal(case: dict[str, Any]) -> bool:
    """Deterministic steps on a CPU compute tokens one by one, and none is captured."""
    if case["deterministic"] and case["graphs"] != "none":
        return False
    return case["layout"] != "tp2" or case["format"] != "w4afp8"  # two ranks cannot share a group of 128 columns


CASES = covering(COLUMNS, SEED, legal=is_legal)
TRIPLES = [case for case in covering(COLUMNS, SEED, strength=3, legal=is_legal) if case not in CASES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of the bundled model in a format."""
    root = tmp_path_factory.mktemp("formats")

    @cache
    def folder(of_format: str) -> str:
        if of_format in WRITTEN:
            assert quantize([MODEL, str(root / of_format), "--threads", "1", *WRITTEN[of_format]]) == 0
        else:
            config = INT8_BLOCKS if of_format == "int8-block" else CONFIGS[of_format]
            write(Path(MODEL), root / of_format, config)
        return str(root / of_format)

    return folder


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    made = ProcessGroup(2)
    yield made
    made.close()


@cache
def reference(folder: str, kv: str) -> list[Answer]:
    """Each request alone on one rank, whole prompts, depth 1."""
    limits = {"chunked_prefill_size": 4096, "num_pages": 200, "max_running_requests": 16, "kv_cache_dtype": kv}
    engine = LocalEngine(changed(settings(max_steps_in_flight=1, radix_cache=False, **limits), model_path=folder))
    return [answer for ask in ASKS for answer in serve(engine, [ask])]


def common(want: Answer, got: Answer) -> Iterator[tuple[TokenLogprob, TokenLogprob]]:
    """Log-probabilities of the tokens up to which two answers are the same."""
    yield from zip(want.prompt_logprobs, got.prompt_logprobs, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(want.tokens, got.tokens, strict=False))
    yield from zip(want.logprobs[: len([*same])], got.logprobs, strict=False)


def check(case: dict[str, Any], folder: str, group: ProcessGroup, bug: str = "") -> None:
    fields = {"chunked_prefill_size": 48, "num_pages": 3, "max_running_requests": 3} | DRAFTING[case["drafts"]]
    fields |= {name: case[name] for name in ("radix_cache", "max_steps_in_flight")} | GRAPHS[case["graphs"]]
    kernels = KernelConfig(deterministic=case["deterministic"], kv=case["kv"])
    config = changed(engine_config(case["layout"], kernels=kernels, **fields), model_path=folder)
    served = group.serve(config, dealt(SCRIPT, config.dp_size), bug)
    answers, wanted = answers_of(served), reference(folder, case["kv"])
    if case["format"] in ROUNDED:
        pairs = [pair for uid, want in enumerate(wanted) for pair in common(want, answers[uid])]
        moved = statistics.median(abs(a.logprob - b.logprob) for a, b in pairs)
        assert len(pairs) > 60 and moved < JUMP, moved
    else:
        jumps = sum(compare(ask, ask.params, wanted[i], answers[i], "seeded") for i, ask in enumerate(ASKS))
        assert jumps <= MOST_JUMPS[case["kv"]], f"{jumps} requests left the reference at near ties"
    assert (sum(rank.cached for rank in served) > 0) == case["radix_cache"]
    assert (sum(rank.accepted for rank in served) > 0) == (case["drafts"] != "none")
    assert all((rank.replays > rank.steps / 2) == (case["graphs"] != "none") for rank in served)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of an engine's start on a CPU is tracing its steps."""
    monkeypatch.setattr(traced, "ROWS", 0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_format_with_every_feature(
    case: dict[str, Any], checkpoint: Callable[[str], str], group: ProcessGroup
) -> None:
    check(case, checkpoint(case["format"]), group)


def test_a_planted_bug_is_caught_where_activations_are_rounded(
    checkpoint: Callable[[str], str], group: ProcessGroup
) -> None:
    case = next(case for case in CASES if case["format"] == "int8" and case["layout"] == "tp2")
    with pytest.raises(AssertionError):
        check(case, checkpoint("int8"), group, "stream not summed")


@pytest.mark.soak
@pytest.mark.parametrize("case", TRIPLES, ids=name)
def test_triples(case: dict[str, Any], checkpoint: Callable[[str], str], group: ProcessGroup) -> None:
    check(case, checkpoint(case["format"]), group)


def test_the_cases_cover_every_legal_pair() -> None:
    every = [dict(zip(COLUMNS, values, strict=True)) for values in itertools.product(*COLUMNS.values())]
    legal = [case for case in every if is_legal(case)]
    for a, b in itertools.combinations(COLUMNS, 2):
        assert {(case[a], case[b]) for case in CASES} == {(case[a], case[b]) for case in legal}, (a, b)
