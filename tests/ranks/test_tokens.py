"""Groups of processes give one rank's tokens, up to the first near tie: a covering array of layouts, drafts, grammars,
chunked prefill, prefix cache, preemption, n > 1, penalties, log-probabilities, overlap, captured steps, experts that
move and FP8 caches. Deterministic groups give their own bits whatever runs beside a request.

The requests and the reference are those of tests/compose: each request alone, on one rank.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.compose.covering import covering
from tests.compose.matrix import DRAFTING, MODEL, compare, name, settings
from tests.compose.test_compose_grammar import check, crowd
from tests.compose.test_compose_grammar import serve as serve_alone
from tests.compose.workload import Answer, Ask, take
from tests.cpu.test_sharded_models import SHAPES, written
from tests.ranks.group import ProcessGroup, RankError, Script, Served, dealt, serve, submits
from thalweg.core.grammar import Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine, choice_params
from thalweg.models import traced
from thalweg.text.tokenizer import Tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2-ep2": {"tp_size": 2, "ep_size": 2, "moe_dense_tp_size": 1},
    "dp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "dp2-ep2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
    "cp2": {"tp_size": 2, "attn_cp_size": 2},
    "pp2": {"pp_size": 2},
    "tp2-dcp2": {"tp_size": 2, "dcp_size": 2},
    "tp4": {"tp_size": 4},
    "tp4-ep4": {"tp_size": 4, "ep_size": 4},
    "tp2-dp2-ep4": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4},
    "tp2-dp2-ep2": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
    "dp4-ep4": {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "ep_size": 4},
    "tp4-dcp2-ep4": {"tp_size": 4, "dcp_size": 2, "ep_size": 4},
    "tp4-dcp4": {"tp_size": 4, "dcp_size": 4},
    "tp2-dcp2-dp2-ep4": {"tp_size": 4, "dcp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4},
    "cp2-tp2-ep4": {"tp_size": 4, "attn_cp_size": 2, "ep_size": 4, "cp_strategy": "zigzag"},
    "cp2-tp2-dcp2": {"tp_size": 4, "attn_cp_size": 2, "dcp_size": 2},
    "dp2-cp2-ep4": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2, "ep_size": 4},
    "pp2-cp2": {"pp_size": 2, "tp_size": 2, "attn_cp_size": 2, "cp_strategy": "zigzag"},
    "pp4": {"pp_size": 4},
    "pp2-tp2-dcp2": {"pp_size": 2, "tp_size": 2, "dcp_size": 2},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-dp2-ep2": {"pp_size": 2, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
}


# one of each kind of division; `make soak` has all layouts
PAIRED = ("tp2-ep2", "dp2-ep2", "cp2", "tp2-dcp2", "tp2-dp2-ep4", "pp2-tp2")
# that divide records, plans, both, tokens, contexts, and stages
ON_NODES = ("dp2-ep2", "tp4", "tp2-dp2-ep4", "cp2", "tp2-dcp2", "pp2-tp2")


@dataclass(frozen=True)
class Case:
    """One run of the mixed load. The pages are scarce on one rank; `pages` of each of several."""

    layout: str
    kind: str
    drafts: str = "none"
    grammar: str = "none"
    n: int = 1
    pages: int = 6
    prompt_logprobs: bool = False
    kv: str = "float32"
    fields: dict[str, Any] = field(default_factory=dict)
    is_uneven: bool = False  # one rank has all requests


def left_to_soak(cases: Sequence[Case], *layouts: str) -> list[Any]:
    """Parameters of a test, of which those with these layouts run in `make soak` alone, to save time."""
    return [pytest.param(one, marks=[pytest.mark.soak] * (one.layout in layouts), id=one.layout) for one in cases]


MOE_LAYERS = 3  # of the bundled model, without its NextN layer
REQUESTS, TOKENS = 5, 64  # of the load, and of an answer, to save time
EPLB = {"enable_eplb": True, "eplb_rebalance_num_iterations": 8, "ep_num_redundant_experts": 4}
GRAPHS: dict[str, dict[str, Any]] = {
    "none": {},
    "decode": {"cuda_graph_bs": (1, 8), "cuda_graph_mode": "full_and_piecewise"},
    "whole": {"cuda_graph_bs": (4, 16), "cuda_graph_mode": "full"},
}
MOST_JUMPS = {"float32": 1, "fp8_e4m3": 2}  # requests; rounding to e4m3 moves a near tie more often
COLUMNS: dict[str, list[Any]] = {
    "layout": list(PAIRED),
    "kind": ["greedy", "seeded", "penalised"],
    "drafts": ["none", "nextn-3", "nextn-tree", "adaptive"],
    "grammar": ["none", "json_schema", "regex"],
    "n": [1, 2],
    "pages": [5, 40],
    "prompt_logprobs": [False, True],
    "kv": ["float32", "fp8_e4m3"],
    "is_uneven": [False, True],
    "chunked_prefill_size": [48, 100],
    "max_steps_in_flight": [1, 2],
    "radix_cache": [True, False],
    "moe_a2a_backend": ["none", "alltoall"],
    "experts": ["fixed", "moving"],
    "graphs": list(GRAPHS),
    "nnodes": [1, 2],
}


def is_legal(levels: dict[str, Any]) -> bool:
    """Dispatch and moves need expert parallelism, uneven loads several ranks; the reference of FP8 has no grammar. Two
    nodes have a few layouts, to save time.
    """
    if levels["nnodes"] > 1 and levels["layout"] not in ON_NODES:
        return False
    has_experts, has_ranks = "ep" in levels["layout"], "dp" in levels["layout"]
    if not has_experts and (levels["moe_a2a_backend"], levels["experts"]) != ("none", "fixed"):
        return False
    return (has_ranks or not levels["is_uneven"]) and (levels["kv"] == "float32" or levels["grammar"] == "none")


def case_of(levels: dict[str, Any]) -> Case:
    own = {name: value for name, value in levels.items() if name in Case.__dataclass_fields__}
    names = ("chunked_prefill_size", "max_steps_in_flight", "radix_cache", "moe_a2a_backend", "nnodes")
    fields = {name: levels[name] for name in names} | GRAPHS[levels["graphs"]]
    return Case(**own, fields=fields | (EPLB if levels["experts"] == "moving" else {}))


CASES = covering(COLUMNS, 8, legal=is_legal)  # this seed needs few cases


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of an engine's start on a CPU is tracing its steps."""
    monkeypatch.setattr(traced, "ROWS", 0)


def engine_config(layout: str, **fields: Any) -> Any:
    size = LAYOUTS[layout].get
    tp = size("tp_size", 1) // (size("dp_size", 1) * size("attn_cp_size", 1))
    return settings(**{"moe_dense_tp_size": tp} | LAYOUTS[layout] | fields)


def script_of(asked: list[tuple[Ask, Grammar]]) -> tuple[Script, list[list[int]]]:
    """The submits in order of arrival, and the uids of each request."""
    made, uids, first = list[Any](), list[list[int]](), 0
    for ask, grammar in asked:
        some = submits(first, ask.prompt, ask.params, grammar=grammar)
        made += ((ask.turn, submit) for submit in some)
        uids.append([submit.uid for submit in some])
        first += len(some)
    return tuple(sorted(made, key=lambda entry: entry[0])), uids


def answers_of(served: list[Served]) -> dict[int, Answer]:
    answers = {}
    for rank in served:
        assert not rank.rejected
        for uid, delta in rank.deltas.items():
            take(answers.setdefault(uid, Answer([], [], [])), delta)
    return answers


@cache
def reference(kind: str, grammar: str, kv: str, pattern: str = "") -> list[list[Answer]]:
    """Two choices of each request: alone, whole prompts, no prefix cache, plenty of pages, depth 1. pattern: as
    `EngineConfig.index_topk_pattern`.
    """
    limits = {"chunked_prefill_size": 4096, "num_pages": 200, "max_running_requests": 16}
    own = {"kv_cache_dtype": kv, "index_topk_pattern": pattern}
    engine = LocalEngine(settings(max_steps_in_flight=1, radix_cache=False, **own, **limits))
    return [serve_alone(engine, [one]) for one in load(kind, grammar, n=2, prompt_logprobs=True)]


def load(kind: str, grammar: str, n: int, prompt_logprobs: bool) -> list[tuple[Ask, Grammar]]:
    wish = {"kind": kind, "n": n, "grammar": grammar, "logprobs": True, "prompt_logprobs": prompt_logprobs}
    asked = crowd(types.SimpleNamespace(vocab=2048), wish)[:REQUESTS]  # type: ignore[arg-type]
    return [(replace(ask, params=shortened(ask.params)), held) for ask, held in asked]


def shortened(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, TOKENS))


def run_case(group: ProcessGroup, case: Case, plant: str = "") -> tuple[list[Served], int]:
    """What the ranks served, and how many requests left the reference at near ties."""
    asked = load(case.kind, case.grammar, case.n, case.prompt_logprobs)
    script, uids = script_of(asked)
    # pages that several ranks share hold more tokens: as many tokens, so that they are as scarce
    pages = -(-case.pages // LAYOUTS[case.layout].get("dcp_size", 1))
    limits = {"num_pages": pages, "max_running_requests": 4, "kv_cache_dtype": case.kv}
    config = engine_config(case.layout, **{"chunked_prefill_size": 48} | limits | DRAFTING[case.drafts] | case.fields)
    ranks = config.dp_size
    served = group.serve(config, [script, *[()] * (ranks - 1)] if case.is_uneven else dealt(script, ranks), plant)
    answers, tokenizer, jumped = answers_of(served), Tokenizer(Path(MODEL)), 0
    wanted = reference(case.kind, case.grammar, case.kv, case.fields.get("index_topk_pattern", ""))
    for (ask, grammar), some, choices in zip(asked, uids, wanted, strict=True):
        has_jumped = False
        for i, (uid, want) in enumerate(zip(some, choices, strict=False)):
            got, params = answers[uid], choice_params(ask.params, i)
            if grammar.is_set:
                has_jumped |= got.tokens != want.tokens
                check(grammar, params, tokenizer.decode(got.tokens), got)
            else:
                has_jumped |= compare(ask, params, want, got, case.kind)
        jumped += has_jumped
    return served, jumped


@pytest.mark.parametrize("levels", CASES, ids=name)
def test_a_group_gives_one_ranks_tokens(levels: dict[str, Any], groups: dict[int, ProcessGroup]) -> None:
    check_levels(levels, groups)


def check_levels(levels: dict[str, Any], groups: dict[int, ProcessGroup]) -> None:
    case = case_of(levels)
    served, jumped = run_case(groups[engine_config(case.layout).processes], case)
    assert jumped <= MOST_JUMPS[case.kv], f"{jumped} requests left the reference at near ties"
    assert len({rank.steps for rank in served}) == 1, "all ranks run the same steps"
    assert len({rank.checksum for rank in served}) == 1, "of the same sizes"
    assert all((rank.replays > rank.steps / 2) == (levels["graphs"] != "none") for rank in served)
    assert (sum(rank.expert_moves for rank in served) > 20) == (levels["experts"] == "moving")
    if levels["experts"] == "moving":
        layers = MOE_LAYERS + (case.drafts != "none")
        assert {rank.balanced_layers for rank in served} == {layers}, "those of a NextN layer, too"
    assert (sum(rank.accepted for rank in served) > 10) == (case.drafts != "none")


def test_stages_of_ranks_of_which_one_verifies_trees(groups: dict[int, ProcessGroup]) -> None:
    """The other one begins a prompt in the same step: both publish what their own plans sampled."""
    served, jumped = run_case(groups[4], Case("pp2-dp2-ep2", "seeded", "nextn-tree", n=2, pages=40))
    assert jumped <= 1 and all(rank.accepted for rank in served)


def test_scarce_pages_do_preempt(groups: dict[int, ProcessGroup]) -> None:
    """The column is worth nothing if it never bites."""
    served, jumped = run_case(groups[2], Case("tp2", "penalised", "nextn-3", "json_schema", n=2, pages=5))
    assert jumped <= 1 and served[0].preemptions > 0


def test_ranks_that_share_contexts_hold_as_many_more_tokens(groups: dict[int, ProcessGroup]) -> None:
    """The load above, on as many pages, which are twice as large: nothing is preempted."""
    served, jumped = run_case(groups[2], Case("tp2-dcp2", "penalised", "nextn-3", "json_schema", n=2, pages=2 * 5))
    assert jumped <= 1 and served[0].preemptions == 0


OTHERS = [
    Case("tp2", "greedy", "nextn-3", prompt_logprobs=True, kv="fp8_e4m3", pages=5, fields=GRAPHS["whole"]),
    Case("pp2", "penalised", "nextn-tree", "regex", fields={"max_steps_in_flight": 2}),
    Case("tp4", "seeded", "adaptive", "json_schema", pages=5, fields={"nnodes": 2}),
    Case("tp2-dcp2-dp2-ep4", "seeded", "nextn-tree", pages=5),
    Case("pp2-tp2-dcp2", "greedy", "nextn-3", pages=5, fields={"max_steps_in_flight": 2}),
    Case("dp2", "penalised", "nextn-3", n=2, pages=5),
    Case("dp4-ep4", "seeded", "nextn-tree", fields={"moe_a2a_backend": "alltoall", "max_steps_in_flight": 2}),
]


@pytest.mark.parametrize("case", left_to_soak(OTHERS, "tp2", "pp2", "dp2"))
def test_layouts_whose_pairs_are_left_to_soak(case: Case, groups: dict[int, ProcessGroup]) -> None:
    served, jumped = run_case(groups[engine_config(case.layout).processes], case)
    assert jumped <= 1 and all(rank.accepted for rank in served)


SHARED_INDEXER = {"shard_indexer": True, "index_share_for_mtp_iteration": True}
SHARED_INDEXERS = [
    Case("tp2", "seeded", "nextn-tree", fields=SHARED_INDEXER),
    Case("tp2-ep2", "greedy", "nextn-3", fields=SHARED_INDEXER | GRAPHS["decode"]),
    Case("tp4", "greedy", "adaptive", "json_schema", fields=SHARED_INDEXER | {"max_steps_in_flight": 2}),
    Case("tp2-dp2-ep4", "seeded", "nextn-3", kv="fp8_e4m3", fields=SHARED_INDEXER),
    Case("cp2-tp2-ep4", "greedy", "nextn-tree", fields=SHARED_INDEXER),
    Case("pp2-tp2", "seeded", "nextn-3", fields=SHARED_INDEXER),
    Case("tp2-dcp2", "seeded", "nextn-tree", fields={"index_share_for_mtp_iteration": True}),
]


@pytest.mark.parametrize(
    "case", left_to_soak(SHARED_INDEXERS, "tp2-ep2", "tp4", "tp2-dp2-ep4", "cp2-tp2-ep4", "pp2-tp2")
)
def test_ranks_share_the_heads_of_an_indexer(case: Case, groups: dict[int, ProcessGroup]) -> None:
    """And the steps of a draft share a selection: all ranks select alike, or they would draft and answer otherwise. Of
    ranks that share contexts only the latter.
    """
    served, jumped = run_case(groups[engine_config(case.layout).processes], case)
    assert jumped <= MOST_JUMPS[case.kv] and sum(rank.accepted for rank in served) > 10
    assert len({rank.checksum for rank in served}) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case("tp2-dcp2", "greedy", "small-2", pages=5),
        pytest.param(Case("cp2-tp2-dcp2", "greedy", "small-2"), marks=pytest.mark.soak),
    ],
    ids=lambda case: case.layout,
)
def test_a_drafter_keeps_whole_contexts(case: Case, groups: dict[int, ProcessGroup]) -> None:
    """The bundled model drafts for itself, so its drafts are right where its own KV is."""
    served, jumped = run_case(groups[engine_config(case.layout).processes], case)
    tokens = sum(len(delta.tokens) for delta in served[0].deltas.values())
    assert jumped <= 1 and served[0].accepted > 0.6 * tokens


SHARED_SELECTION = {"index_topk_pattern": "FFSS", "max_steps_in_flight": 2}
CUT = {"pp_layer_partition": (2, 2)}  # before the third layer, which has no indexer
CROSSINGS = [
    Case("pp2", "greedy", "nextn-tree", pages=5, fields=SHARED_SELECTION | CUT | GRAPHS["decode"]),
    Case("pp4", "seeded", "nextn-3", fields=SHARED_SELECTION | GRAPHS["decode"]),
    Case("pp2-cp2", "seeded", "nextn-3", kv="fp8_e4m3", fields=SHARED_SELECTION | CUT),
    Case("pp2-tp2-dcp2", "greedy", "adaptive", "json_schema", fields=SHARED_SELECTION | CUT),
]


@pytest.mark.parametrize("case", left_to_soak(CROSSINGS, "pp4", "pp2-cp2", "pp2-tp2-dcp2"))
def test_stages_share_a_selection_of_context(case: Case, groups: dict[int, ProcessGroup]) -> None:
    """Prompts in chunks, decode rows and verifications; contexts are longer than a selection."""
    served, jumped = run_case(groups[engine_config(case.layout).processes], case)
    assert jumped <= MOST_JUMPS[case.kv] and sum(rank.accepted for rank in served) > 10


def test_the_cases_cover_every_legal_pair() -> None:
    free = {name: levels[0] for name, levels in COLUMNS.items()}
    ruled = ("layout", "is_uneven", "kv", "grammar", "moe_a2a_backend", "experts", "nnodes")  # what `is_legal` looks at
    legal = [
        levels
        for values in itertools.product(*(COLUMNS[name] for name in ruled))
        if is_legal(levels := free | dict(zip(ruled, values, strict=True)))
    ]

    def levels_of(name: str, case: dict[str, Any]) -> list[Any]:
        return [case[name]] if name in ruled else COLUMNS[name]

    for a, b in itertools.combinations(COLUMNS, 2):
        pairs = {pair for case in legal for pair in itertools.product(levels_of(a, case), levels_of(b, case))}
        assert {(case[a], case[b]) for case in CASES} == pairs, (a, b)


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        ("stream not summed", Case("tp2", "greedy")),
        ("masks lost", Case("tp2", "greedy", "none", "regex")),
        ("own step", Case("dp2-ep2", "greedy")),
        ("residual twice", Case("dp2-ep2", "greedy")),
        ("own vocabulary", Case("tp2", "greedy", fields=GRAPHS["decode"])),
        ("not published", Case("pp2", "greedy")),
        ("LSE in base 2", Case("tp2-dcp2", "greedy")),
        ("owner off by one", Case("tp2-dcp2", "greedy")),
        ("not exchanged", Case("cp2", "greedy")),
    ],
)
def test_planted_bugs_are_caught(bug: str, case: Case, groups: dict[int, ProcessGroup]) -> None:
    """In the last rank of the group."""
    try:
        _, jumped = run_case(groups[2], case, bug)
    except (AssertionError, RankError):
        return
    assert jumped > 1


@pytest.mark.parametrize("layout", ["tp2", "tp2-dcp2", "tp4", "cp2"])
def test_ranks_share_a_key_head(layout: str, groups: dict[int, ProcessGroup], tmp_path: Path) -> None:
    """Grouped-query attention with more ranks than key heads, or whose ranks divide tokens; prompt log-probabilities;
    random weights.
    """
    folder, script = written(tmp_path, SHAPES["one-key-head"]), list[Any]()
    for i, length in enumerate((5, 90, 33, 150)):
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=2)
        prompt = [(31 * at + 7 * i) % 900 + 3 for at in range(length)]
        script += ((1 + i, submit) for submit in submits(i, prompt, params))
    fields: dict[str, Any] = {"chunked_prefill_size": 64, "num_pages": 20, "max_running_requests": 3}
    alone, several = (
        msgspec.structs.replace(made, model_path=str(folder), eos_ids=())
        for made in (settings(**fields), engine_config(layout, **fields))
    )
    want = answers_of([serve(alone, tuple(script))])
    (served,) = groups[LAYOUTS[layout]["tp_size"]].serve(several, [tuple(script)])
    for uid, got in answers_of([served]).items():
        assert got.tokens == want[uid].tokens
        assert len(got.prompt_logprobs) == len(want[uid].prompt_logprobs) > 0
        pairs = [*zip(got.logprobs, want[uid].logprobs, strict=True)]
        pairs += zip(got.prompt_logprobs, want[uid].prompt_logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in pairs)
