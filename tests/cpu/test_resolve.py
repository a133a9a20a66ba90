"""The resolver's decisions with synthetic models and machines: arithmetic, reasons, and refusals that name an
alternative.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine, visible
from thalweg.config.model import ModelFacts
from thalweg.config.options import GRAPH_MODES
from thalweg.config.tree import options_of, settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.kernels import DECISION_NAMES
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, USER, Decision
from thalweg.launch.decisions import Decisions
from thalweg.launch.graphs import buckets, token_buckets
from thalweg.launch.resolve import UNCHANGED, resolve
from thalweg.launch.resolved import Plane, Sizes
from thalweg.launch.resources import DEFAULTS, TYPICAL_TOKENS, Resources, resolve_resources
from thalweg.models.catalog import read_config_facts

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
    return read_config_facts(config | more, "test")


NO_GRAPHS: tuple[str, tuple[int, ...], tuple[int, ...]] = ("none", (), ())


def graphs(found: Resources) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    made = found.config
    return made.cuda_graph_mode, made.cuda_graph_bs, made.piecewise_cuda_graph_tokens


def machine(free: int = 100 * GB, cores: int = 8, gpus: tuple[str, ...] = (), gpu_free: int = 0) -> Machine:
    return Machine("Test CPU", cores, 2 * free, free, gpus, gpu_free, "9.0" if gpus else "", frozenset({"triton"}))


def sizes(parameters: int = GB, kv: int = 1000) -> Any:
    """kv: numbers a token in each of two layers."""
    return lambda config: Sizes(
        parameters, parameters * BYTES[config.dtype], (Plane("kv", 2, 2 * kv * BYTES[config.dtype]),)
    )


def run(
    of: Any = None,
    on: Machine | None = None,
    parameters: int = GB,
    kv: int = 1000,
    width: int = 0,
    trees: bool = False,
    **wishes: Any,
) -> tuple[Resources, dict[str, Decision]]:
    decisions, here = Decisions(), on or machine()
    if width:
        decisions.fields |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": width}
    if trees:
        decisions.fields |= {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    found = resolve_resources(options_of(model="m", **wishes), of or facts(), here, sizes(parameters, kv), decisions)
    names = [one.name for one in decisions.entries]
    assert len(names) == len(set(names)), "each choice is noted once"
    return found, {one.name: one for one in decisions.entries}


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UnsupportedConfig) as caught:
        run(*args, **kwargs)
    return str(caught.value)


def test_everything_left_to_the_resolver() -> None:
    found, why = run()
    made, defaults = found.config, DEFAULTS["cpu"]
    assert (made.device, made.dtype, made.threads, made.overlap_schedule) == ("cpu", "float32", 7, False)
    assert (made.max_running_requests, made.chunked_prefill_size) == (defaults.requests[0], defaults.tokens[0])
    assert found.context == made.context_length == 8192
    assert found.pages == made.num_pages == defaults.requests[0] * TYPICAL_TOKENS // PAGE
    assert all(one.reason for one in why.values()), "what was chosen has a reason"
    assert {one.source for one in why.values()} == {"auto", "model"}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_the_engine_takes_unchanged_has_its_default(name: str) -> None:
    default = settings()[name].default
    assert getattr(EngineConfig(model_path=""), name) == ("" if default is None else default)


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
    assert (
        found.config.dtype,
        found.config.threads,
        found.config.overlap_schedule,
        found.config.max_running_requests,
        found.config.chunked_prefill_size,
    ) == ("bfloat16", 3, True, 5, 77)
    assert (found.context, found.pages, found.config.random_seed) == (1000, 100, 11)
    assert {name for name, one in why.items() if one.source == "user"} == set(wishes) | {
        "decode_attention_backend",
        "prefill_attention_backend",
    }


def test_pages_from_memory_with_the_arithmetic() -> None:
    found, why = run(on=machine(10 * GB), kv=100_000)
    page = 2 * 100_000 * 4 * PAGE
    assert found.config.dtype == "float32"
    assert found.pages == (8 * GB - 4 * GB) // page
    assert why["max_total_tokens"].reason == f"(10.0 GB free x 0.8 - 4.0 GB weights) / 51.2 MB a page = {found.pages}"


def test_context_shrinks_to_memory_only_when_it_was_not_asked_for() -> None:
    found, why = run(facts(100_000), machine(10 * GB), kv=100_000)
    assert found.context == found.pages * PAGE < 100_000
    assert why["context_length"].source == "auto" and "100000" in why["context_length"].reason
    error = refusal(facts(100_000), machine(10 * GB), kv=100_000, context_length=50_000)
    assert "context_length: 50000" in error and f"use at most {found.context}" in error
    assert run(facts(100_000), machine(10 * GB), kv=100_000, context_length=found.context)[0].context == found.context


def test_float32_gives_way_to_bfloat16_where_memory_is_short() -> None:
    found, why = run(on=machine(10 * GB), parameters=2 * GB)
    assert found.config.dtype == "bfloat16" and "not within half" in why["dtype"].reason
    assert found.sizes.weight_bytes == 4 * GB
    asked, _ = run(on=machine(20 * GB), parameters=3 * GB, dtype="float32")
    assert asked.config.dtype == "float32"


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
        ({"attention_backend": "flashmla"}, ("attention_backend", "flashmla", "reference")),
        ({"attention_backend": "flash"}, ("attention_backend", "'flash'", "flashmla", "fa3", "reference")),
        ({"tp_size": 3}, ("tp_size: 4 attention heads", "--tp-size 1, 2 or 4")),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, ("dp_size: 3", "--dp-size 1, 2 or 4")),
        ({"tp_size": 4, "attn_cp_size": 3}, ("attn_cp_size: 3", "--attn-cp-size 1, 2 or 4")),
        ({"attn_cp_size": 2}, ("attn_cp_size: 2", "the 1 processes", "another --tp-size")),
        ({"cp_strategy": "zigzag"}, ("cp_strategy: zigzag", "--attn-cp-size 2")),
        ({"pp_size": 5}, ("pp_size: the model has 2 layers", "at most --pp-size 2")),
        ({"ep_size": 2}, ("ep_size: no experts", "--ep-size 1")),
        ({"tp_size": 4, "moe_dense_tp_size": 2}, ("moe_dense_tp_size", "--moe-dense-tp-size 1 or 4")),
        ({"enable_dp_lm_head": False}, ("enable_dp_lm_head", "leave the flag out")),
        ({"tp_size": 4, "dcp_size": 3}, ("dcp_size: 3 does not divide", "--dcp-size 1, 2 or 4")),
        ({"tp_size": 2, "dcp_size": 2}, ("dcp_size: each", "4 key heads is on 1 of 2 ranks", "--dcp-size 1")),
    ],
)
def test_refusals_name_the_setting_and_the_nearest(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refusal(**wishes)
    assert all(word in error for word in words), error


LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip


def test_pages_of_ranks_that_share_contexts() -> None:
    """As many pages in as many bytes, each of twice the tokens."""
    of, limits = facts(**LATENT), {"tp_size": 2, "mem_fraction_static": 0.5}
    plain, shared = (
        run(of, machine(10 * GB), kv=100_000, max_running_requests=4096, dcp_size=dcp, **limits)[0] for dcp in (1, 2)
    )
    assert shared.pages == plain.pages == shared.config.num_pages
    assert shared.config.max_total_tokens == 2 * plain.config.max_total_tokens
    asked = run(of, dcp_size=2, tp_size=2, max_total_tokens=1000)[0]
    assert (asked.config.max_total_tokens, asked.config.num_pages, asked.context) == (896, 7, 896)
    assert "use at least 128" in refusal(of, dcp_size=2, tp_size=2, max_total_tokens=100)


def test_contexts_that_cannot_be_shared() -> None:
    error = refusal(facts(**LATENT), machine(), tp_size=2, dcp_size=2, mla=False)
    assert error.startswith("dcp_size: ") and "--disable-mla" in error


def test_contexts_that_kernels_cannot_share() -> None:
    of, on = facts(**LATENT | {"kv_lora_rank": 512}), machine(gpus=("NVIDIA H200",) * 2, gpu_free=100 * GB)
    wishes: dict[str, Any] = {"tp_size": 2, "dcp_size": 2, "device": "cuda"}
    assert run(of, on, **wishes)[0].config.kernels.decode == "triton"
    assert "deterministic kernels attend" in refusal(of, on, deterministic_inference=True, **wishes)
    of = facts(num_key_value_heads=1, head_dim=128)
    assert "kernels of keys and values attend" in refusal(of, on, **wishes)
    assert run(of, on, attention_backend="reference", **wishes)[0].config.dcp_size == 2


INDEXED = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "q_lora_rank": 32, "index_topk": 64, "index_n_heads": 6,
    "index_head_dim": 32,
}  # fmt: skip


def test_index_heads_that_ranks_share() -> None:
    made = run(facts(**INDEXED), tp_size=2, shard_indexer=True)[0]
    assert made.config.shard_indexer
    assert "3 of 6 index heads on each rank" in str(made.config.report.as_tree()["shard_indexer"])


@pytest.mark.parametrize(
    ("config", "wishes", "words"),
    [
        (LATENT, {"tp_size": 2}, ("DeepseekV3ForCausalLM has no indexer",)),
        (INDEXED, {}, ("is for several ranks", "use --tp-size 2")),
        (INDEXED, {"tp_size": 4}, ("6 index heads cannot be shared by 4 ranks", "use --tp-size 2,")),
        (INDEXED, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, ("one rank", "a smaller --dp-size")),
        (INDEXED, {"tp_size": 2, "dcp_size": 2}, ("--dcp-size 2", "leave one of them out")),
    ],
)
def test_index_heads_that_cannot_be_shared(
    config: dict[str, Any], wishes: dict[str, Any], words: tuple[str, ...]
) -> None:
    error = refusal(facts(**config), machine(), shard_indexer=True, **wishes)
    assert error.startswith("shard_indexer") and all(word in error for word in words), error


def test_tensor_parallel_ranks_are_those_that_divide_no_tokens() -> None:
    found, why = run(tp_size=4, attn_cp_size=2)
    config = found.config
    assert (config.attention_tp, config.attention_dp, config.cp_strategy) == (2, 1, "interleave")
    assert "captured in pieces" in why["attn_cp_size"].reason and why["cp_strategy"].source == AUTO
    both = run(tp_size=4, attn_cp_size=2, dp_size=2, enable_dp_attention=True, cp_strategy="zigzag")[0].config
    assert (both.attention_tp, both.attention_dp, both.cp_strategy) == (1, 2, "zigzag")
    named = run(tp_size=2, attn_cp_size=2, cp_strategy="in-seq-split")[0].config
    assert named.cp_strategy == "zigzag", "SGLang's name"
    assert "cp_strategy" not in run()[1] and run()[0].config.attn_cp_size == 1


def test_the_layers_of_stages_are_a_decision() -> None:
    for wishes, layers, source in (({}, (1, 1), AUTO), ({"pp_layer_partition": (1, 1)}, (1, 1), USER)):
        found, why = run(pp_size=2, **wishes)
        made = why["pp_layer_partition"]
        assert found.config.pp_layer_partition == layers and (made.value, made.source) == ("1,1", source)
    assert "pp_layer_partition" not in run()[1]


def test_more_cache_than_memory() -> None:
    error = refusal(on=machine(10 * GB), kv=100_000, max_total_tokens=10**7)
    most = int(error.rpartition(" ")[2])
    assert run(on=machine(10 * GB), kv=100_000, max_total_tokens=most)[0].pages * PAGE == most


def test_uncut_prompts() -> None:
    found, why = run(chunked_prefill_size=-1, max_running_requests=3)
    assert found.config.chunked_prefill_size == 3 * 8192 and why["chunked_prefill_size"].source == "user"


def test_many_running_requests_leave_prompts_their_budget() -> None:
    usual = DEFAULTS["cpu"].tokens[0]
    assert run(max_running_requests=usual // 2)[0].config.chunked_prefill_size == usual
    found, why = run(max_running_requests=1000)
    assert (
        found.config.chunked_prefill_size == 1000 + usual
        and "1000 running requests" in why["chunked_prefill_size"].reason
    )
    assert run(max_running_requests=1000, chunked_prefill_size=300)[0].config.chunked_prefill_size == 300


def test_seeds_differ_from_start_to_start() -> None:
    assert run()[0].config.random_seed != run()[0].config.random_seed


def test_one_core_is_enough() -> None:
    assert run(on=machine(cores=1))[0].config.threads == 1


H100 = machine(gpus=("NVIDIA H100 80GB HBM3",), gpu_free=80 * GB)


def test_a_gpu_is_used_where_there_is_one() -> None:
    found, why = run(on=H100)
    assert (found.config.device, found.config.kernels.decode, found.config.dtype) == ("cuda", "triton", "bfloat16")
    assert (found.config.overlap_schedule, found.config.max_running_requests, found.config.chunked_prefill_size) == (
        True,
        DEFAULTS["cuda"].requests[0],
        DEFAULTS["cuda"].tokens[0],
    )
    assert "NVIDIA H100" in why["device"].reason
    assert graphs(found) == ("full_and_piecewise", buckets(found.config.max_running_requests), token_buckets(2304))
    room = int(H100.gpu_free * DEFAULTS["cuda"].fraction[0]) - 2 * GB  # weights in bfloat16
    assert found.pages == room // (2 * 2 * 1000 * 2 // 2 * PAGE)


def test_gpus_that_share_a_model_capture_graphs() -> None:
    two = machine(gpus=("NVIDIA H100 80GB HBM3",) * 2, gpu_free=80 * GB)
    found, why = run(on=two, tp_size=2)
    assert graphs(found)[0] == "full_and_piecewise" and "decode steps whole" in why["cuda_graph_mode"].reason
    assert graphs(run(on=two, tp_size=2, cuda_graph_mode="full")[0])[0] == "full"
    assert graphs(run(on=two, dp_size=2)[0])[0] == "full_and_piecewise", "copies share nothing"


def test_on_a_gpu_the_pages_are_left_to_the_engine_unless_something_was_asked_for() -> None:
    found, why = run(facts(100_000), on=H100)
    assert (
        found.config.num_pages == 0 and found.config.context_length == 100_000 and not found.config.min_context_length
    )
    assert why["mem_fraction_static"].value == "auto" and "measures" in why["mem_fraction_static"].reason
    assert why["max_total_tokens"].reason.startswith("an estimate")
    assert run(facts(100_000), on=H100, context_length=5000)[0].config.min_context_length == 5000
    asked, why = run(on=H100, mem_fraction_static=0.5)
    page = 2 * 2 * 1000 * 2 // 2 * PAGE
    assert (
        asked.config.num_pages == asked.pages
        and asked.pages == (40 * GB - 2 * GB) // page
        and why["mem_fraction_static"].value == 0.5
    )
    tokens, why = run(on=H100, max_total_tokens=78 * GB // page * PAGE)  # more than the estimate: the engine will see
    assert tokens.config.num_pages and tokens.pages == 78 * GB // page > run(on=H100)[0].pages
    assert "at most" in refusal(on=H100, max_total_tokens=79 * GB // page * PAGE)
    assert run()[0].config.num_pages


def test_a_gpu_that_is_not_there_or_not_wanted() -> None:
    assert "driver shows no NVIDIA GPU" in refusal(device="cuda")
    found, _ = run(on=H100, device="cpu")
    assert (found.config.device, found.config.kernels.decode, graphs(found)) == ("cpu", "reference", NO_GRAPHS)


LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "n_routed_experts": None,
}
EVERYTHING = dataclasses.replace(H100, libraries=frozenset({"triton", "flashmla", "fa3"}))


def test_attention_is_chosen_for_decode_and_prefill_each() -> None:
    few, many = facts(**LATENT), facts(**LATENT, num_attention_heads=128)
    assert attention_of(few, H100) == ("triton", "triton", ())
    assert attention_of(few, EVERYTHING) == ("triton", "fa3", ())
    assert attention_of(many, EVERYTHING) == ("triton+flashmla", "fa3", ())
    assert attention_of(many, H100)[0] == "triton"
    assert attention_of(many, EVERYTHING, attention_backend="triton+flashmla") == (
        "triton+flashmla",
        "fa3",
        ("decode",),
    )
    assert attention_of(few, EVERYTHING, attention_backend="flashmla") == ("flashmla", "fa3", ("decode",))
    assert attention_of(few, EVERYTHING, attention_backend="fa3") == ("triton", "fa3", ("prefill",))
    assert attention_of(few, EVERYTHING, attention_backend="triton") == ("triton", "triton", ("decode", "prefill"))
    assert attention_of(many, EVERYTHING, attention_backend="reference") == ("reference",) * 2 + (
        ("decode", "prefill"),
    )
    assert attention_of(many, EVERYTHING, deterministic_inference=True) == ("triton", "triton", ())
    assert attention_of(many, EVERYTHING, trees=True) == ("triton+flashmla", "fa3", ())
    assert attention_of(few, EVERYTHING, trees=True, attention_backend="triton+flashmla")[0] == "triton+flashmla"
    assert attention_of(many, EVERYTHING, mla=False) == ("triton", "triton", ())
    assert attention_of(many, EVERYTHING, kv_cache_dtype="fp8")[:2] == ("triton+flashmla", "fa3")
    assert attention_of(many, dataclasses.replace(EVERYTHING, capability="8.0"))[:2] == ("triton", "triton")
    assert attention_of(few, EVERYTHING, dtype="float32")[:2] == ("reference", "reference")


V32 = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "q_lora_rank": 1536, "index_topk": 2048, "index_n_heads": 64,
    "index_head_dim": 128,
}  # fmt: skip


TINY_DIMS = {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "index_head_dim": 64}


def test_sparse_attention_has_kernels_of_its_own() -> None:
    sparse = facts(**V32)
    assert attention_of(sparse, EVERYTHING) == ("triton_sparse", "triton_sparse", ()), "FlashMLA takes other heads"
    own = ("triton_sparse", "triton_sparse")
    assert attention_of(sparse, EVERYTHING, deterministic_inference=True)[:2] == own
    assert attention_of(facts(**V32 | TINY_DIMS), EVERYTHING)[:2] == own, "the bundled model's"
    two = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 2)
    divided = {"device": "cuda", "tp_size": 2, "dcp_size": 2}
    assert run(sparse, two, **divided)[0].config.kernels.decode == "triton_sparse"
    assert run(sparse, two, **divided, deterministic_inference=True)[0].config.kernels.decode == "torch"
    assert attention_of(sparse, EVERYTHING, kv_cache_dtype="fp8")[:2] == ("triton_sparse", "triton_sparse")
    for other in ({"capability": "7.5"}, {"capability": "8.0"}):  # without e4m3
        on = dataclasses.replace(EVERYTHING, **other)
        assert attention_of(sparse, on)[:2] == ("torch", "torch")
        assert run(sparse, on, kv_cache_dtype="fp8")[0].config.kernels.kv == "fp8_e4m3"
    assert run(sparse, EVERYTHING, kv_cache_dtype="fp8", dtype="float32")[0].config.kernels.kv == "fp8_e4m3"
    small = facts(**V32 | {"index_head_dim": 64})
    assert attention_of(small, EVERYTHING)[:2] == ("torch", "torch"), (
        "kernels have not been compared on a GPU with these dims"
    )
    assert attention_of(sparse, EVERYTHING, attention_backend="reference")[:2] == ("reference", "reference")
    assert attention_of(sparse, EVERYTHING, mla=False)[:2] == ("reference", "reference")
    by_torch = run(sparse, EVERYTHING, attention_backend="torch")[0]
    assert by_torch.config.kernels.moe != "reference" and graphs(by_torch) == NO_GRAPHS
    assert graphs(run(sparse, EVERYTHING)[0]) != NO_GRAPHS
    assert attention_of(sparse, dataclasses.replace(EVERYTHING, libraries=frozenset()))[:2] == (
        "reference",
        "reference",
    )
    assert "Use triton_sparse." in refusal(sparse, EVERYTHING, attention_backend="triton")
    for wishes in ({}, {"deterministic_inference": True}, {"trees": True}):
        assert (
            attention_of(sparse, EVERYTHING, attention_backend="triton_sparse", **wishes)[:2] == ("triton_sparse",) * 2
        )


def test_steps_that_share_an_indexer_are_captured_in_pieces() -> None:
    on = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 2)
    shared = {"device": "cuda", "tp_size": 2, "shard_indexer": True}
    made = run(facts(**V32), on, **shared)[0].config
    assert made.cuda_graph_bs == () and made.piecewise_cuda_graph_tokens
    assert "use piecewise" in refusal(facts(**V32), on, cuda_graph_mode="full", **shared)


def test_stages_between_which_a_selection_crosses_are_captured_as_others() -> None:
    of, on = facts(**V32, index_topk_pattern="FS"), dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 4)
    for made in (of, facts(**V32)):
        assert graphs(run(made, on, pp_size=2, device="cuda")[0])[0] == "full_and_piecewise"
        assert graphs(run(made, on, pp_size=2, device="cuda", tp_size=2, shard_indexer=True)[0])[0] == "piecewise"


def test_index_keys_and_latents_of_sparse_kernels_are_fp8_together() -> None:
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    plain, coded = facts(**V32), facts(**V32, quantization_config=blocks)
    for of, backend, asked, kept in (
        (plain, "triton_sparse", None, ("", False)),
        (plain, "triton_sparse", "fp8_e4m3", ("fp8_ds_mla", True)),
        (plain, "torch", "fp8_e4m3", ("fp8_e4m3", False)),
        (plain, "torch", "fp8_ds_mla", ("fp8_ds_mla", True)),
        (plain, "reference", "fp8_ds_mla", ("fp8_ds_mla", True)),
        (coded, "triton_sparse", None, ("", True)),
        (coded, "triton_sparse", "bfloat16", ("bfloat16", False)),
        (coded, "torch", None, ("", False)),
    ):
        kernels = run(of, EVERYTHING, attention_backend=backend, kv_cache_dtype=asked)[0].config.kernels
        assert (kernels.kv.replace("bfloat16", ""), kernels.fp8_index) == (kept[0].replace("bfloat16", ""), kept[1])
    for of in (facts(**LATENT), facts()):
        assert "use fp8_e4m3" in refusal(of, EVERYTHING, kv_cache_dtype="fp8_ds_mla")
    assert "use fp8_e4m3" in refusal(plain, EVERYTHING, kv_cache_dtype="fp8_ds_mla", mla=False)
    assert "fp8_ds_mla" in refusal(plain, EVERYTHING, attention_backend="flashmla", kv_cache_dtype="fp8_ds_mla")


def test_backends_of_sparse_attention_have_names_of_their_own() -> None:
    sparse = facts(**V32)
    for flag in ("dsa_prefill_backend", "dsa_decode_backend"):
        for value, kept in (("triton", "triton_sparse"), ("torch", "torch"), ("auto", "triton_sparse")):
            assert attention_of(sparse, EVERYTHING, **{flag: value})[:2] == (kept, kept)
        assert f"{flag}: fa3 is no backend of sparse attention here; there is auto, triton, torch, flashmla" in refusal(
            sparse, EVERYTHING, **{flag: "fa3"}
        )
        assert "has no sparse attention" in refusal(facts(**LATENT), EVERYTHING, **{flag: "triton"})
        told = refusal(sparse, EVERYTHING, **{flag: "triton"}, attention_backend="torch")
        assert f"not --{flag.replace('_', '-')} triton and --attention-backend torch" in told
    both = {"dsa_prefill_backend": "triton", "dsa_decode_backend": "torch"}
    assert "torch must compute both" in refusal(sparse, EVERYTHING, **both)
    for wishes, kept in (
        ({}, "triton"), ({"dsa_decode_backend": "torch"}, "torch"), ({"dsa_topk_backend": "sgl-kernel"}, "triton")
    ):  # fmt: skip
        assert run(sparse, EVERYTHING, **wishes)[0].config.kernels.topk == kept
    chosen = run(sparse, EVERYTHING, dsa_decode_backend="triton", dsa_topk_backend="torch")[0].config.kernels
    assert (chosen.decode, chosen.topk) == ("triton_sparse", "torch")
    assert "use torch" in refusal(sparse, EVERYTHING, dsa_topk_backend="triton", dsa_decode_backend="torch")
    told = refusal(sparse, EVERYTHING, dsa_topk_backend="flashmla_kv")
    assert told.startswith(
        "dsa_topk_backend: flashmla_kv is no backend of sparse attention here; there is auto, triton"
    )
    assert "only sparse. Use triton." in refusal(facts(**LATENT), EVERYTHING, attention_backend="torch")


def test_a_dense_model_has_its_own_libraries() -> None:
    dense, every = facts(), dataclasses.replace(EVERYTHING, libraries=EVERYTHING.libraries | {"flashinfer"})
    assert attention_of(dense, every) == ("triton", "fa3", ())
    assert attention_of(dense, every, attention_backend="fa3") == ("triton", "fa3", ("prefill",))
    assert attention_of(dense, every, deterministic_inference=True)[:2] == ("triton", "triton")
    assert attention_of(dense, every, attention_backend="flashinfer") == ("flashinfer",) * 2 + (("decode", "prefill"),)
    assert graphs(run(dense, every, attention_backend="flashinfer")[0]) == NO_GRAPHS
    assert attention_of(facts(**LATENT), every, attention_backend="flashinfer") == ("flashinfer", "fa3", ("decode",))
    assert "kv fp8_e4m3, not bfloat16" in refusal(dense, every, attention_backend="flashinfer", kv_cache_dtype="fp8")
    assert "heads gqa, not mla" in refusal(dense, every, attention_backend="flashmla")


def attention_of(of: ModelFacts, on: Machine, **wishes: Any) -> tuple[str, str, tuple[str, ...]]:
    found, why = run(of, on, **wishes)
    assert (
        why["decode_attention_backend"].value == found.config.kernels.decode
        and why["prefill_attention_backend"].value == found.config.kernels.prefill
    )
    users = tuple(role for role in ("decode", "prefill") if why[DECISION_NAMES[role]].source == "user")
    return found.config.kernels.decode, found.config.kernels.prefill, users


def test_rejected_backends_are_reported() -> None:
    reason = run(facts(**LATENT, num_attention_heads=128), H100)[1]["prefill_attention_backend"].reason
    assert reason == "not fa3: the library is not installed"


@pytest.mark.parametrize(
    ("on", "wishes", "words"),
    [
        (
            H100,
            {"attention_backend": "flashmla"},
            ("attention_backend flashmla: the library is not installed. Use triton.",),
        ),
        (machine(), {"attention_backend": "fa3"}, ("attention_backend fa3: needs a GPU. Use reference.",)),
        (
            EVERYTHING,
            {"attention_backend": "flashmla", "mla": False},
            ("flashmla", "heads mha, not mla", "Use triton."),
        ),
        (
            EVERYTHING,
            {"attention_backend": "fa3", "deterministic_inference": True},
            ("fa3", "no batch-invariant kernel", "Use triton."),
        ),
        (
            EVERYTHING,
            {"attention_backend": "triton", "kv_cache_dtype": "float32"},
            ("triton", "kv float32, not bfloat16 or fp8_e4m3", "reference"),
        ),
        (
            dataclasses.replace(EVERYTHING, capability="10.0"),
            {"attention_backend": "fa3"},
            ("chip blackwell, not hopper", "triton"),
        ),
    ],
)
def test_an_attention_that_does_not_fit_is_refused(on: Machine, wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refusal(facts(**LATENT), on, **wishes)
    assert all(word in error for word in words), error


def test_backends_with_the_same_reason_are_named_together() -> None:
    why = run(facts(**LATENT))[1]
    assert why["decode_attention_backend"].reason == (
        "not triton, triton+flashmla, flashmla, torch, triton_sparse: needs a GPU"
    )


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, ""), ("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("bfloat16", "bfloat16")]
)
def test_the_kv_cache_dtype_is_independent(asked: str | None, kept: str) -> None:
    found, why = run(kv_cache_dtype=asked)
    assert found.config.kernels.kv == kept and found.config.dtype == "float32"
    assert why["kv_cache_dtype"].value == (kept or "float32")


def test_the_reference_runs_on_a_gpu_without_graphs() -> None:
    found, why = run(on=H100, attention_backend="reference")
    assert found.config.kernels.decode == "reference" and graphs(found) == NO_GRAPHS
    assert "reads lengths on the host" in why["cuda_graph_mode"].reason
    assert graphs(run(on=H100, cuda_graph_mode="none")[0]) == NO_GRAPHS


def test_graphs_are_for_the_rows_asked_for() -> None:
    assert run(on=H100, cuda_graph_bs=(8, 1, 8))[0].config.cuda_graph_bs == (1, 8)
    assert run(on=H100, cuda_graph_max_bs=20)[0].config.cuda_graph_bs == (1, 2, 4, 8, 16, 20)
    assert "cuda_graph_bs" in refusal(on=H100, cuda_graph_bs=(1000,))


def test_graph_modes_choose_what_is_recorded() -> None:
    plans = {mode: graphs(run(on=H100, cuda_graph_mode=mode, max_running_requests=8)[0]) for mode in GRAPH_MODES}
    rows, tokens = buckets(8), token_buckets(2304)
    assert plans == {
        "full": ("full", rows, ()),
        "full_decode_only": ("full_decode_only", rows, ()),
        "full_and_piecewise": ("full_and_piecewise", rows, tokens),
        "piecewise": ("piecewise", (), tokens),
        "none": NO_GRAPHS,
    }
    assert graphs(run(on=H100, max_running_requests=8)[0]) == plans["full_and_piecewise"]
    assert "a CPU has none; use --cuda-graph-mode none" in refusal(cuda_graph_mode="piecewise")
    assert graphs(run(cuda_graph_mode="none")[0]) == NO_GRAPHS


def test_no_flag_is_reset_in_silence() -> None:
    """A flag that has no effect is an error, or a line of the report."""
    few = {"on": H100, "max_running_requests": 4}
    found, why = run(**few, cuda_graph_max_bs=300)
    assert found.config.cuda_graph_bs[-1] == 4 and "300" in why["cuda_graph_max_bs"].reason
    assert "cuda_graph_max_bs" not in run(**few, cuda_graph_max_bs=3)[1]
    assert "cuda_graph_max_bs, 2" in refusal(**few, cuda_graph_bs=(4,), cuda_graph_max_bs=2)
    for wish in ({"cuda_graph_bs": (2,)}, {"cuda_graph_max_bs": 2}, {"piecewise_cuda_graph_tokens": (64,)}):
        (flag,) = wish
        assert "captures no such" in run(**few, cuda_graph_mode="none", **wish)[1][flag].reason
        assert "a CPU has none" in run(**wish)[1][flag].reason
    pieces = run(**few, cuda_graph_mode="full", piecewise_cuda_graph_tokens=(64,))[1]
    assert "captures no such" in pieces["piecewise_cuda_graph_tokens"].reason
    assert "no such" in run(**few, cuda_graph_mode="piecewise", cuda_graph_bs=(2,))[1]["cuda_graph_bs"].reason
    for wish in ({"cuda_graph_bs": (-1,)}, {"cuda_graph_max_bs": 0}, {"piecewise_cuda_graph_tokens": (0, 64)}):
        assert "must be at least 1" in refusal(**wish), wish
    policy = run(radix_cache=False, schedule_policy="lpm")[1]["schedule_policy"]
    assert policy.value == "lpm" and "no prefix cache" in policy.reason
    wishes = options_of(model="models/tiny", strip_thinking_cache=True, radix_cache=False)
    strip = resolve(wishes, weights=False).engine.report.current()["strip_thinking_cache"]
    assert strip.value is True and "no prefix cache" in strip.reason
    assert "no latent attention" in refusal(mla=False)


def test_pieces_are_for_the_tokens_asked_for() -> None:
    assert run(on=H100, piecewise_cuda_graph_tokens=(512, 64))[0].config.piecewise_cuda_graph_tokens == (64, 512)
    assert "piecewise_cuda_graph_tokens" in refusal(on=H100, piecewise_cuda_graph_tokens=(9000,))
    assert token_buckets(300) == (16, 32, 48, 64, 96, 128, 192, 256, 300)
    assert token_buckets(2048)[-6:] == (896, 1024, 1280, 1536, 1792, 2048)
    assert run(on=H100, chunked_prefill_size=100)[0].config.piecewise_cuda_graph_tokens[-1] == 100


def test_buckets_waste_little() -> None:
    made = buckets(256)
    waste = [next(b for b in made if b >= rows) - rows for rows in range(1, 257)]
    padding = [w / (w + rows) for w, rows in zip(waste, range(1, 257), strict=True)]
    assert made[-1] == 256 and sum(padding) / len(padding) < 0.08


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
    except UnsupportedConfig as error:
        assert "use " in str(error)
        assume(False)
        return
    used = found.sizes.weight_bytes + found.pages * PAGE * found.sizes.kv_bytes
    assert used <= free * (fraction or 0.8) and found.config.max_running_requests == slots
    assert 1 <= found.context <= min(context, found.pages * PAGE)
    assert tokens is None or found.pages == tokens // PAGE


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (30_948_680, "30.9 MB"), (10**12, "1000.0 GB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert format_bytes(count) == words


def test_decisions_are_frozen() -> None:
    found, why = run()
    with pytest.raises(AttributeError):
        found.config.dtype = "x"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        why["max_total_tokens"].value = 1  # type: ignore[misc]


def test_drafts_are_rows_of_recorded_steps_and_tokens_of_a_step() -> None:
    assert run(on=H100, max_running_requests=8, width=3)[0].config.cuda_graph_bs[-1] == 32
    assert run(chunked_prefill_size=4, width=3)[0].config.chunked_prefill_size == 4
    assert "--chunked-prefill-size 4" in refusal(chunked_prefill_size=3, width=3)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"tp_size": 4}, "4 GPUs are needed, and this process may use 2; use --tp-size 1 or 2, or a machine with more"),
        ({"dp_size": 4}, "4 GPUs are needed (4 copies of 1), and this process may use 2; use --dp-size 2"),
        ({"tp_size": 2, "dp_size": 2},
         "4 GPUs are needed (2 copies of 2), and this process may use 2; use --dp-size 1"),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "may use 2; use --tp-size 2, or"),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True},
         "may use 2; use --tp-size 1 or 2 without --dp-size"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused_with_what_fits(wishes: dict[str, Any], said: str) -> None:
    assert said in refusal(on=machine(gpus=("NVIDIA H100 80GB HBM3",) * 2, gpu_free=80 * GB), **wishes)


def test_no_gpu_is_refused_first() -> None:
    assert "--device cpu" in refusal(on=machine(), device="cuda", tp_size=2)


@pytest.mark.parametrize(
    ("variable", "names"),
    [(None, "abc"), ("", ""), ("1", "b"), ("2,0", "ca"), ("0,7,1", "a"), ("GPU-2,GPU-1", "cb"), ("-1", "")],
)
def test_hidden_gpus_are_not_counted(variable: str | None, names: str) -> None:
    rows = [["80000", "9.0", f"GPU-{i}f", name] for i, name in enumerate("abc")]
    assert "".join(row[3] for row in visible(rows, variable)) == names
