"""The resolver's decisions, with made-up models and machines: arithmetic, reasons, and refusals that name the nearest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts, facts_of
from thalweg.config.tree import config_of
from thalweg.core.errors import CannotServe
from thalweg.core.plan import PAGE
from thalweg.launch.decide import RULES, TYPICAL, Decided, Ledger, buckets, cpu, decide, gpu, size
from thalweg.launch.resolved import Decision, Plane, Sizes

GB = 10**9
BYTES = {"float32": 4, "bfloat16": 2}


def facts(context: int = 8192, **more: Any) -> ModelFacts:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "eos_token_id": 2,
    }
    return facts_of(config | more, "test")


def machine(free: int = 100 * GB, cores: int = 8, gpus: tuple[str, ...] = (), gpu_free: int = 0) -> Machine:
    return Machine("Test CPU", cores, 2 * free, free, gpus, gpu_free)


def sizes(parameters: int = GB, kv: int = 1000) -> Any:
    """kv: numbers a token in each of two layers."""
    return lambda device, attention, dtype: Sizes(
        parameters, parameters * BYTES[dtype], (Plane("kv", 2, 2 * kv * BYTES[dtype]),)
    )


def run(
    of: Any = None, on: Machine | None = None, parameters: int = GB, kv: int = 1000, **wishes: Any
) -> tuple[Decided, dict[str, Decision]]:
    ledger = Ledger()
    found = decide(config_of(model="m", **wishes), of or facts(), on or machine(), sizes(parameters, kv), ledger)
    names = [one.name for one in ledger.decisions]
    assert len(names) == len(set(names)), "each choice is noted once"
    return found, {one.name: one for one in ledger.decisions}


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(CannotServe) as caught:
        run(*args, **kwargs)
    return str(caught.value)


def test_everything_left_to_the_resolver() -> None:
    found, why = run()
    assert (found.device, found.dtype, found.threads, found.depth) == ("cpu", "float32", 7, 1)
    assert (found.slots, found.budget, found.context) == (cpu(machine()).slots, cpu(machine()).budget, 8192)
    assert found.pages == cpu(machine()).slots * TYPICAL // PAGE
    assert all(one.reason for one in why.values()), "what was chosen has a reason"
    assert {one.source for one in why.values()} == {"auto", "model"}


def test_everything_asked_for_is_kept() -> None:
    wishes = {
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "threads": 3,
        "overlap_schedule": True,
        "max_running_requests": 5,
        "chunked_prefill_size": 77,
        "context_length": 1000,
        "max_total_tokens": 6400,
        "mem_fraction_static": 0.5,
        "random_seed": 11,
        "attention_backend": "reference",
    }
    found, why = run(**wishes)
    assert (found.dtype, found.threads, found.depth, found.slots, found.budget) == ("bfloat16", 3, 2, 5, 77)
    assert (found.context, found.pages, found.seed) == (1000, 100, 11)
    assert {name for name, one in why.items() if one.source == "asked"} == (set(wishes) - {"max_total_tokens"}) | {
        "pages"
    }


def test_pages_from_memory_with_the_arithmetic() -> None:
    found, why = run(on=machine(10 * GB), kv=100_000)
    page = 2 * 100_000 * 4 * PAGE
    assert found.dtype == "float32"
    assert found.pages == (8 * GB - 4 * GB) // page
    assert why["pages"].reason == f"(10.0 GB free x 0.8 - 4.0 GB weights) / 51.2 MB a page = {found.pages}"


def test_context_shrinks_to_memory_only_when_it_was_not_asked_for() -> None:
    found, why = run(facts(100_000), machine(10 * GB), kv=100_000)
    assert found.context == found.pages * PAGE < 100_000
    assert why["context_length"].source == "auto" and "100000" in why["context_length"].reason
    error = refusal(facts(100_000), machine(10 * GB), kv=100_000, context_length=50_000)
    assert "context_length: 50000" in error and f"use at most {found.context}" in error
    assert run(facts(100_000), machine(10 * GB), kv=100_000, context_length=found.context)[0].context == found.context


def test_float32_gives_way_to_bfloat16_where_memory_is_short() -> None:
    found, why = run(on=machine(10 * GB), parameters=2 * GB)
    assert found.dtype == "bfloat16" and "not within half" in why["dtype"].reason
    assert found.sizes.weight_bytes == 4 * GB
    asked, _ = run(on=machine(20 * GB), parameters=3 * GB, dtype="float32")
    assert asked.dtype == "float32"


def test_a_model_that_does_not_fit_names_what_would() -> None:
    error = refusal(on=machine(4 * GB), parameters=GB, dtype="float32", mem_fraction_static=0.5)
    assert "4.0 GB free x 0.5" in error and "or --dtype bfloat16" in error
    error = refusal(on=machine(4 * GB), parameters=GB, mem_fraction_static=0.4)
    named = float(error.rpartition(" ")[2])
    assert "--mem-fraction-static" in error and run(on=machine(4 * GB), mem_fraction_static=named)[0].pages >= 1
    assert refusal(on=machine(GB), parameters=GB, dtype="bfloat16").endswith("use a machine with more memory")


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"context_length": 9000}, ("context_length: 9000", "8192")),
        ({"max_total_tokens": 640, "context_length": 700}, ("context_length: 700", "at most 640")),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, ("kv_cache_dtype", "--dtype bfloat16")),
        ({"attention_backend": "flashmla"}, ("attention_backend", "flashmla", "reference")),
        ({"tp_size": 2}, ("tp_size", "--tp-size 1")),
        ({"dp_size": 2}, ("dp_size", "--dp-size 1")),
        ({"pp_size": 2}, ("pp_size", "--pp-size 1")),
        ({"ep_size": 2}, ("ep_size", "--ep-size 1")),
    ],
)
def test_refusals_name_the_setting_and_the_nearest(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refusal(**wishes)
    assert all(word in error for word in words), error


def test_more_cache_than_memory() -> None:
    error = refusal(on=machine(10 * GB), kv=100_000, max_total_tokens=10**7)
    most = int(error.rpartition(" ")[2])
    assert run(on=machine(10 * GB), kv=100_000, max_total_tokens=most)[0].pages * PAGE == most


def test_uncut_prompts() -> None:
    found, why = run(chunked_prefill_size=-1, max_running_requests=3)
    assert found.budget == 3 * 8192 and why["chunked_prefill_size"].source == "asked"


def test_seeds_differ_from_start_to_start() -> None:
    assert run()[0].seed != run()[0].seed


def test_one_core_is_enough() -> None:
    assert run(on=machine(cores=1))[0].threads == 1


H100 = machine(gpus=("NVIDIA H100 80GB HBM3",), gpu_free=80 * GB)


def test_a_gpu_is_used_where_there_is_one() -> None:
    found, why = run(on=H100)
    assert (found.device, found.kernels.decode, found.dtype) == ("cuda", "triton", "bfloat16")
    assert (found.depth, found.slots, found.budget) == (2, gpu(H100).slots, gpu(H100).budget)
    assert "NVIDIA H100" in why["device"].reason
    assert found.graphs == buckets(found.slots)
    room = int(gpu(H100).free * gpu(H100).fraction) - 2 * GB  # weights in bfloat16
    assert found.pages == room // (2 * 2 * 1000 * 2 // 2 * PAGE)


def test_a_gpu_that_is_not_there_or_not_wanted() -> None:
    assert "driver shows no NVIDIA GPU" in refusal(device="cuda")
    found, _ = run(on=H100, device="cpu")
    assert (found.device, found.kernels.decode, found.graphs) == ("cpu", "reference", ())


def test_the_reference_runs_on_a_gpu_without_graphs() -> None:
    found, why = run(on=H100, attention_backend="reference")
    assert found.kernels.decode == "reference" and found.graphs == () and why["cuda_graph"].value is False
    assert run(on=H100, cuda_graph=False)[0].graphs == ()


def test_graphs_are_for_the_rows_asked_for() -> None:
    assert run(on=H100, cuda_graph_bs=(8, 1, 8))[0].graphs == (1, 8)
    assert run(on=H100, cuda_graph_max_bs=20)[0].graphs == (1, 2, 4, 8, 16, 20)
    assert "cuda_graph_bs" in refusal(on=H100, cuda_graph_bs=(1000,))


def test_buckets_waste_little() -> None:
    made = buckets(256)
    waste = [next(b for b in made if b >= rows) - rows for rows in range(1, 257)]
    padding = [w / (w + rows) for w, rows in zip(waste, range(1, 257), strict=True)]
    assert made[-1] == 256 and sum(padding) / len(padding) < 0.08


def test_every_rule_has_a_way_out() -> None:
    assert all(rule.instead.startswith("use ") for rule in RULES)


@given(
    free=st.integers(GB, 1000 * GB),
    parameters=st.integers(10**6, 10**11),
    kv=st.integers(1, 10**6),
    context=st.integers(2, 10**6),
    slots=st.integers(1, 4096),
    tokens=st.none() | st.integers(64, 10**7),
    fraction=st.none() | st.floats(0.01, 0.99),
)
def test_what_is_decided_fits(
    free: int, parameters: int, kv: int, context: int, slots: int, tokens: int | None, fraction: float | None
) -> None:
    wishes = {"max_running_requests": slots, "max_total_tokens": tokens, "mem_fraction_static": fraction}
    try:
        found, _ = run(facts(context), machine(free), parameters, kv, **wishes)
    except CannotServe as error:
        assert "use " in str(error)
        assume(False)
        return
    used = found.sizes.weight_bytes + found.pages * PAGE * found.sizes.kv_bytes
    assert used <= free * (fraction or 0.8) and found.slots == slots
    assert 1 <= found.context <= min(context, found.pages * PAGE)
    assert tokens is None or found.pages == tokens // PAGE


def test_a_rule_that_holds_refuses_whatever_the_rest() -> None:
    for rule in RULES:
        name = rule.why.partition(":")[0]
        assert rule.when(config_of(**{name: 2})) and not rule.when(config_of(**{name: 1}))


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (30_948_680, "30.9 MB"), (10**12, "1000.0 GB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert size(count) == words


def test_decisions_are_frozen() -> None:
    found, why = run()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.pages = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        why["pages"].value = 1  # type: ignore[misc]
