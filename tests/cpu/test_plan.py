"""`thalweg plan` as a command: other machines, layouts, loads, refusals, and its forecast against a real start."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

import thalweg.launch.resolve
from tests.cpu.plan_models import DEEPSEEK, INDEXER, LITE, QWEN
from thalweg.bench.plan_check import MemoryPart, near
from thalweg.cli import main
from thalweg.config.args import options_parser, parse_options
from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts, facts_of
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import Report
from thalweg.engine import build
from thalweg.launch.planning.layouts import ONE, ParallelLayout, command
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Sizes
from thalweg.launch.sizes import measure
from thalweg.models import catalog, traced

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "models" / "tiny")
WIDTH = 120


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(autouse=True, scope="module")
def sizes_are_counted_once() -> Iterator[None]:
    """For the same model and configuration: most of a plan is building a model's layers."""
    known: dict[tuple[str, str], Sizes] = {}

    def once(facts: ModelFacts, config: EngineConfig) -> Sizes:
        key = repr(facts), repr(structs.replace(config, report=Report()))
        if key not in known:
            known[key] = measure(facts, config)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thalweg.launch.resolve, "measure", once)
        yield


@pytest.fixture
def plan(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str) -> Done:
        capfd.readouterr()
        status = main(["plan", *argv])
        return Done(status, *capfd.readouterr())

    return run


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    return str(path)


@pytest.fixture
def v3(tmp_path: Path) -> str:
    return folder(tmp_path / "v3", DEEPSEEK)


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return folder(tmp_path / "lite", LITE)


# ---- what a machine that is not here would do ----


def test_backends_are_those_of_the_layout(plan: Run, tmp_path: Path) -> None:
    """FlashMLA's kernels for sparse attention have 64 or 128 heads, and fill up fewer where they are named."""
    v32 = folder(tmp_path / "v32", DEEPSEEK | INDEXER | {"num_hidden_layers": 5})
    for tp, prefill in ((4, "triton_sparse"), (2, "flashmla_sparse")):
        made = json.loads(plan(v32, "--machine", "h200x4", "--tp-size", str(tp), "--json").out)
        assert made["decisions"]["prefill_attention_backend"]["value"] == prefill
        assert made["decisions"]["max_total_tokens"]["value"] == made["kv_tokens"], "of the layout, as before"
    named = plan(v32, "--machine", "h200x4", "--tp-size", "4", "--dsa-prefill-backend", "flashmla_sparse", "--json")
    assert json.loads(named.out)["decisions"]["prefill_attention_backend"]["value"] == "flashmla_sparse"


def test_what_serve_refuses_is_not_planned_and_other_settings_stay(plan: Run, v3: str) -> None:
    machine = ("--machine", "h200x8", "--tp-size", "4", "--pp-size", "2")
    for flags, said in (
        (("--pp-layer-partition", "30,30"), "does not divide 61 layers"),
        (("--ep-size", "4", "--init-expert-location", "/nope.json"), "/nope.json cannot be read"),
        (("--dp-size", "3", "--enable-dp-attention"), "--dp-size 3 does not divide --tp-size 4"),
    ):
        done = plan(v3, *machine, *flags)
        assert done.status and said in done.err
    kept = ("--ep-size", "4", "--enable-eplb", "--moe-a2a-backend", "alltoall")
    best = json.loads(plan(v3, *machine, *kept, "--json").out)["best"]["command"]
    assert "--enable-eplb" in best and "--moe-a2a-backend alltoall" in best and best.count("--ep-size") == 1


def test_a_model_of_eight_gpus(plan: Run, v3: str) -> None:
    made = json.loads(plan(v3, "--machine", "h200x8", "--concurrency", "256", "--json").out)
    assert not made["fits_one_device"] and "leaves no page" in made["why_not_one_device"]
    assert made["pages"] == made["memory"]["pages"] > 0, "of the layout, since one device has no cache"
    assert "triton" in made["decisions"]["decode_attention_backend"]["value"], "backends are resolved all the same"
    assert made["flops_a_token"] == pytest.approx(73.25e9, rel=1e-3)
    found = {one["name"]: one for one in made["layouts"]}
    assert {"TP8", "TP8 DP8 EP8", "8 x 1 GPU"} <= found.keys()
    assert found["8 x 1 GPU"]["trouble"] == "weights do not fit"
    assert found["TP8"]["memory_of_a_gpu"]["weights"] == pytest.approx(85.3e9, rel=0.01)
    best = made["best"]
    assert best["layout"] == made["layouts"][0]["name"] and "--tp-size 8" in best["command"]


def test_scales_that_ranks_would_cut_are_refused_before_a_process_starts(plan: Run, tmp_path: Path) -> None:
    """`serve` and `LLM` resolve their options as here."""
    config = DEEPSEEK | {"moe_intermediate_size": 512, "quantization_config": {"quant_method": "w4afp8"}}
    path = folder(tmp_path, config)
    said = "experts.0.down_proj.weight is w4afp8, and a rank's slice 448:512 cuts 128 columns"
    for flags in (("--machine", "h200x8", "--tp-size", "8"), ("--device", "cpu", "--tp-size", "8")):
        told = plan(path, *flags)
        assert told.status == 2 and said in told.err and "use --ep-size 8, which leaves experts whole" in told.err
    with pytest.raises(UnsupportedConfig, match=said):
        resolve(options_of(model=path, device="cpu", tp_size=8), weights=False)
    layouts = json.loads(plan(path, "--machine", "h200x8", "--json").out)["layouts"]
    assert layouts and not any(layout["name"] in ("TP8", "TP8 DP8") for layout in layouts)


def test_copies_are_as_many_as_the_flag_says(plan: Run, lite: str) -> None:
    for flags, name, caches in (("--dp-size 2", "2 x 1 GPU", 2), ("--tp-size 2 --dp-size 3", "3 x TP2", 3)):
        made = json.loads(plan(lite, "--machine", "h100x8", *flags.split(), "--json").out)
        assert [layout["name"] for layout in made["layouts"]] == [name] and made["caches"] == caches
    refused = plan(lite, "--machine", "h100x8", "--tp-size", "4", "--dp-size", "3")
    assert refused.status == 2 and "--dp-size 3: h100x8 has room for 2 copies of 4 GPUs" in refused.err


def test_pages_and_memory_are_those_of_the_layout(plan: Run, v3: str) -> None:
    """Latents are on every GPU of a tensor-parallel group: the memory of eight cards holds no eight times as many."""
    flags = (v3, "--machine", "h200x8", "--tp-size", "8")
    made = json.loads(plan(*flags, "--json").out)
    (layout,) = made["layouts"]
    assert made["memory"] == layout["memory_of_a_gpu"] and made["caches"] == 1
    assert made["pages"] * 64 == made["kv_tokens"] == layout["kv_tokens_per_cache"] == 821_888
    assert (
        made["decisions"]["max_total_tokens"]["value"] == made["kv_tokens"]
        and "of the cache" in made["decisions"]["max_total_tokens"]["reason"]
    )
    assert made["memory"]["slots"] > 170e6, "as long as the longest sequence that these pages hold"
    taken = sum(made["memory"][name] for name in ("beside", "weights", "step", "graphs", "slots", "reserve", "kv"))
    assert 0 <= made["memory"]["free"] - taken < 2 * made["memory"]["page"]
    assert made["holds"][1] == {"length": 4096, "sequences": made["pages"] // 64}
    text = plan(*flags).out
    told = (
        "each GPU of TP8: 150.3 GB free",
        "CUDA graphs",
        f"{made['pages']:,} pages x 64 tokens",
        "on each GPU",
        "200 sequences of 4,096",
    )
    assert all(words in text for words in told), text
    flags = (*flags, "--dp-size", "8", "--enable-dp-attention", "--ep-size", "8")
    parallel = json.loads(plan(*flags, "--json").out)
    assert parallel["caches"] == 8 and parallel["holds"][1]["sequences"] == 8 * (parallel["pages"] // 64)
    assert "8 caches" in plan(*flags).out


def test_what_fits_nowhere_has_no_pages(plan: Run, v3: str) -> None:
    made = json.loads(plan(v3, "--machine", "h200x8", "--tp-size", "4", "--json").out)
    assert (
        made["memory"] is made["pages"] is None and made["holds"] == [] and "max_total_tokens" not in made["decisions"]
    )
    assert "kv cache" not in plan(v3, "--machine", "h200x8", "--tp-size", "4").out


def test_contexts_that_the_model_has_not_are_told(plan: Run) -> None:
    done = plan(TINY, "--contexts", "1024", "999999", "--json")
    assert "--contexts 999,999: the model has 4,096 tokens" in done.err
    assert {one["context"] for one in json.loads(done.out)["decode_bounds"]} == {1024}
    assert "--contexts" not in plan(TINY).err, "of the usual ones a short model has fewer"


def test_an_unreachable_target_is_reported(plan: Run) -> None:
    text = plan(TINY, "--machine", "h20", "--tpot-target", "1e-7").out
    assert "a token takes 0.00142 ms" in text


def test_the_best_layout_has_a_command(plan: Run, lite: str) -> None:
    made = json.loads(plan(lite, "--machine", "h100x8", "--concurrency", "512", "--json").out)
    assert "--enable-dp-attention" in made["best"]["command"]
    text = plan(lite, "--machine", "h100x8", "--pp-size", "2", "--tp-size", "4").out
    assert "Best: TP4 PP2" in text and "--pp-size 2" in text


def test_the_command_of_one_gpu_is_one_that_serve_reads(plan: Run, lite: str) -> None:
    made = json.loads(
        plan(
            lite,
            "--machine",
            "h100",
            "--concurrency",
            "400",
            "--kv-cache-dtype",
            "fp8_e4m3",
            "--disable-radix-cache",
            "--json",
        ).out
    )
    words = shlex.split(made["best"]["command"])
    assert words[:2] == ["thalweg", "serve"]
    config = parse_options(options_parser("thalweg serve", ""), words[2:]).options
    assert config.model.model == lite and config.memory.kv_cache_dtype == "fp8_e4m3" and not config.memory.radix_cache
    assert config.schedule.max_running_requests is not None and config.schedule.max_running_requests >= 400
    assert made["kv_bytes_per_token"] == 31_104 // 2


def test_lower_bounds_of_one_h100(plan: Run, lite: str) -> None:
    made = json.loads(plan(lite, "--machine", "h100", "--json").out)
    bounds = {(one["batch"], one["context"]): one for one in made["decode_bounds"]}
    assert 1e3 * bounds[32, 4096]["seconds"] == pytest.approx(10.10, rel=0.005)
    assert bounds[32, 4096]["experts"] == pytest.approx(61.3, abs=0.05)
    assert sum(bounds[32, 4096]["phases"].values()) == pytest.approx(bounds[32, 4096]["seconds"])
    memory = made["memory"]
    assert made["pages"] == memory["pages"] and memory["weights"] == made["weight_bytes"] == 31_456_475_136
    taken = sum(memory[name] for name in ("beside", "weights", "step", "graphs", "slots", "reserve", "kv"))
    assert memory["free"] - taken < 2 * memory["page"]
    assert made["holds"][0]["sequences"] == made["pages"] * 64 // 1024
    assert made["machine"]["chip"]["read"] == made["machine"]["ceilings"]["read"] == 3.35e12


def test_tables_fit_a_page_and_explain(plan: Run, v3: str) -> None:
    targets = "--request-rate", "2", "--tpot-target", "30"
    for argv, where in (((v3, "--machine", "h200x8", *targets), "TP"), ((TINY,), "one process")):
        done = plan(*argv)
        assert done.status == 0
        commands = ("thalweg serve", "#", "for i in", "  CUDA")
        wide = [line for line in done.out.splitlines() if len(line) > WIDTH and not line.startswith(commands)]
        assert not wide, wide[0]
        assert f"Lower bounds of decode steps, {where}" in done.out and "decode_attention_backend" in done.out
    assert "sparse" not in done.err


def test_a_config_alone(plan: Run, v3: str, tmp_path: Path) -> None:
    named = tmp_path / "some-model.json"
    named.write_text(Path(v3, "config.json").read_text())
    text = plan(str(named), "--machine", "h200x8").out
    assert str(named) in text and "thalweg serve MODEL --tp-size" in text
    text = plan(str(Path(v3, "config.json")), "--machine", "h200x8").out
    assert f"thalweg serve {v3} --tp-size" in text


def test_drafts_of_a_nextn_layer(plan: Run, tmp_path: Path) -> None:
    path = folder(tmp_path / "mtp", DEEPSEEK | {"num_nextn_predict_layers": 1})
    made = json.loads(plan(path, "--machine", "h200x8", "--tp-size", "8", "--concurrency", "32", "--json").out)
    ratios = [one["ratio"] for one in made["drafts"]]
    assert [one["drafts"] for one in made["drafts"]] == [1, 2, 3] and 1 < ratios[0] < ratios[1] < ratios[2] < 2
    assert (made["drafts_by"], made["drafts_asked"]) == ("the checkpoint's next-token layer", False)
    said = plan(path, "--machine", "h200x8").out
    assert "pays off when a step gives a request more than" in said and "which was not asked for" in said


@pytest.mark.parametrize(
    ("flags", "by", "counts"),
    [
        ("--speculative-algorithm NEXTN --speculative-eagle-topk 4", "the checkpoint's next-token layer", [15]),
        (
            "--speculative-algorithm NGRAM",
            "the tokens that followed the last ones earlier in the sequence",
            [1, 2, 3, 4],
        ),
        ("--speculative-algorithm NONE", "", []),
    ],
)
def test_drafts_are_those_of_the_drafter(plan: Run, tmp_path: Path, flags: str, by: str, counts: list[int]) -> None:
    path = folder(tmp_path / "mtp", DEEPSEEK | {"num_nextn_predict_layers": 1})
    asked = (path, "--machine", "h200x8", "--tp-size", "8", "--concurrency", "32", *flags.split())
    made = json.loads(plan(*asked, "--json").out)
    assert [one["drafts"] for one in made["drafts"]] == counts
    assert (made["drafts_by"], made["drafts_asked"]) == (by, by != "")


def test_a_drafter_takes_its_memory(plan: Run, tmp_path: Path) -> None:
    path = folder(tmp_path / "mtp", DEEPSEEK | {"num_nextn_predict_layers": 1})
    flags = (path, "--machine", "h200x8", "--tp-size", "8", "--json")
    plain, drafting = (json.loads(plan(*flags, *more).out) for more in ((), ("--speculative-algorithm", "NEXTN")))
    hidden = 2 * 7168 // 64  # one of each page
    assert drafting["kv_bytes_per_token"] == plain["kv_bytes_per_token"] * 62 // 61 + hidden
    more = drafting["memory"]["weights"] - plain["memory"]["weights"]
    assert more == pytest.approx(11.6e9 / 8, rel=0.1), "a layer with all its experts"
    assert drafting["pages"] < plain["pages"]


def test_a_layout_that_is_asked_for(plan: Run, v3: str) -> None:
    flags = ("--machine", "h200x8", "--tp-size", "4", "--pp-size", "2")
    made = json.loads(plan(v3, *flags, "--json").out)
    assert [one["name"] for one in made["layouts"]] == ["TP4 PP2"] and made["bounds_layout"] == "TP4 PP2"


def test_gpus_that_share_contexts(plan: Run, v3: str) -> None:
    """Eight times the tokens in the same bytes, and two exchanges in each layer."""
    flags = (v3, "--machine", "h200x8", "--tp-size", "8", "--json")
    plain, shared = (json.loads(plan(*flags, *more).out) for more in ((), ("--dcp-size", "8")))
    assert shared["bounds_layout"] == "TP8 DCP8" and "--dcp-size 8" in shared["best"]["command"]
    assert shared["pages"] == pytest.approx(plain["pages"], rel=0.01) and shared["page_tokens"] == 512
    assert shared["kv_tokens"] == 512 * shared["pages"] and shared["kv_bytes"] == pytest.approx(plain["kv_bytes"], 0.01)
    longest = [made["holds"][-1]["sequences"] for made in (plain, shared)]
    assert longest[1] == pytest.approx(8 * longest[0], rel=0.1)
    phases = [made["decode_bounds"][-1]["phases"] for made in (plain, shared)]
    assert phases[1]["attention"] < phases[0]["attention"] / 4 and phases[1]["sending"] > phases[0]["sending"]
    capped = json.loads(plan(*flags, "--dcp-size", "8", "--max-total-tokens", "65536").out)
    assert (capped["pages"], capped["kv_tokens"]) == (128, 65536)


def test_shared_index_heads_trade_scoring_for_sums_of_scores(plan: Run, tmp_path: Path) -> None:
    flags = folder(tmp_path / "v32", DEEPSEEK | INDEXER), "--machine", "h200x8", "--tp-size", "8", "--json"
    plain, shared = (json.loads(plan(*flags, *more).out) for more in ((), ("--shard-indexer",)))
    assert "--shard-indexer" in shared["best"]["command"]
    longest = [made["decode_bounds"][-1] for made in (plain, shared)]
    rows, context = longest[1]["batch"], longest[1]["context"]
    sent = 7 * 4 * rows * context * 61 / 450e9  # float32 scores to seven others, in each layer
    assert longest[1]["phases"]["sending"] - longest[0]["phases"]["sending"] == pytest.approx(sent, rel=0.2)
    assert longest[1]["phases"]["index"] == longest[0]["phases"]["index"]  # index keys are read on every GPU
    prompts = [made["prefill_bounds"][-1]["phases"]["index"] for made in (plain, shared)]
    assert prompts[0] == pytest.approx(8 * prompts[1], rel=0.01)
    assert shared["best"]["layout"] == "TP8, shared indexer"


def test_layouts_that_serve_refuses_are_not_planned(plan: Run, v3: str, tmp_path: Path) -> None:
    sparse = folder(tmp_path / "v32", DEEPSEEK | INDEXER)
    for path, flags, told in (
        (sparse, ("--tp-size", "8", "--dcp-size", "8", "--dsa-decode-backend", "flashmla_sparse"), "flashmla_sparse"),
        (sparse, ("--tp-size", "8", "--dp-size", "8", "--enable-dp-attention", "--shard-indexer"), "has one rank"),
        (v3, ("--tp-size", "8", "--shard-indexer"), "has no indexer"),
        (v3, ("--tp-size", "8", "--dcp-size", "8", "--deterministic-inference"), "the deterministic kernels attend"),
    ):
        done = plan(path, "--machine", "h200x8", *flags)
        assert done.status and told in done.err, done.err
    one_indexer = json.loads(plan(sparse, "--machine", "h200x8", "--index-topk-pattern", "F" + 60 * "S", "--json").out)
    assert {layout["pp"] for layout in one_indexer["layouts"]} == {1, 2, 4, 8}, "its selection crosses stages"


def test_machines_with_fp4_say_its_rate(plan: Run, tmp_path: Path) -> None:
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "*gate", "lm_head"]}
    path = folder(tmp_path, DEEPSEEK | {"quantization_config": nvfp4})
    for name, words in (
        ("b200x8", "reads 8.00 TB/s, 2,250 TFLOP/s bf16, 4,500 FP8, 9,000 FP4, NVLink 900 GB/s"),
        ("mi355x8", "2,517 TFLOP/s bf16, 5,033 FP8, 10,066 FP4, Infinity Fabric 538 GB/s a way"),
    ):
        assert words in " ".join(plan(path, "--machine", name).out.split())
    assert "FP4," not in plan(path, "--machine", "h200x8").out


def test_a_sparse_model_and_a_dense_one(plan: Run, tmp_path: Path) -> None:
    sparse = json.loads(plan(folder(tmp_path / "s", DEEPSEEK | INDEXER), "--machine", "b200x8", "--json").out)
    assert {plane["name"] for plane in sparse["planes"]} == {"latent", "index"}
    assert "index" in sparse["decode_bounds"][-1]["phases"]
    dense = json.loads(plan(folder(tmp_path / "d", QWEN), "--machine", "h100x8", "--tpot-target", "20", "--json").out)
    assert dense["best"]["layout"] == "TP8" and dense["layouts"][0]["tpot"] <= 0.02
    assert not any(one["dp"] > 1 or one["ep"] > 1 for one in dense["layouts"])


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--machine", "h300x8"), ("h300x8: unknown", "a100, h100, h200")),
        (
            ("--machine", "z80"),
            ("z80: unknown. There is a100", "such as h200x8. Without --machine the plan is for this machine"),
        ),
        (("--machine", "h100x12"), ("12 GPUs", "whole nodes")),
        (("--machine", "h100x8", "--tp-size", "3"), ("3 GPUs a copy", "divisor of 8")),
        (("--machine", "h200x8", "--tp-size", "8", "--ep-size", "3"), ("TP8 EP3", "evenly")),
        (("--machine", "h200x8", "--concurrency", "2", "--request-rate", "1"), ("leave the other out",)),
        (("--machine", "h200x8", "--check"), ("leave --machine out",)),
        (("--machine", "h100x8"), ("680.1 GB free", "leaves no page", "would fit into", "h200x8")),
        (("--machine", "h200x8", "--tpot-target", "-3"), ("at least 0",)),
        (("--machine", "h200x8", "--input-len", "163840"), ("164096 tokens", "has 163840")),
        (("--machine", "h200x8", "--device", "cpu"), ("only the GPUs are known",)),
        (("--machine", "h200x8", "--concurrency", "0"), ("at least 1",)),
        (("--machine", "h200x8", "--attention-backend", "nonsense"), ("unknown backend", "triton")),
    ],
)
def test_refusals_of_a_plan(plan: Run, v3: str, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = plan(v3, *argv)
    assert done.status == 2 and not done.out and done.err.startswith("thalweg: ")
    assert all(word in done.err for word in words), done.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, ("hidden_size is missing",)),
        ({"num_hidden_layers": "61"}, ("num_hidden_layers", "'61'")),
        ({"architectures": ["MambaForCausalLM"]}, ("MambaForCausalLM", "unknown", "DeepseekV3ForCausalLM")),
        ({"quantization_config": {"quant_method": "aqlm"}}, ("quantization_config", "aqlm")),
    ],
)
def test_configs_that_are_wrong(plan: Run, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(DEEPSEEK | change))
    done = plan(str(path), "--machine", "h200x8")
    assert done.status == 1 and not done.out
    assert all(word in done.err for word in words), done.err


def test_a_config_that_is_no_json(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"hidden_size": 7168,')
    done = plan(str(path), "--machine", "h200x8")
    assert done.status == 1 and str(path) in done.err and "not JSON" in done.err


# ---- the forecast against what is there ----


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-algorithm NEXTN --speculative-eagle-topk 3",
        "--speculative-algorithm NEXTN --speculative-acceptance rejection-sampling --no-speculative-adaptive",
        f"--speculative-draft-model-path {TINY} --speculative-num-steps 1 --no-speculative-adaptive",
    ],
)
def test_check_with_a_drafter(plan: Run, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps of each running request, too: hidden states, what drafts were drawn from, nodes of a tree."""
    monkeypatch.setattr(traced, "ROWS", 0)
    # there are no times to see
    monkeypatch.setattr(build, "calibrate", lambda settings, runner: settings)
    told = json.loads(
        plan(TINY, "--check", "--json", "--max-total-tokens", "2048", "--threads", "1", *flags.split()).out
    )
    assert {part["name"]: part["off"] for part in told["parts"]} == dict.fromkeys(
        ("weights", "kv", "slots", "total"), 0
    )


def test_check_starts_an_engine(plan: Run) -> None:
    done = plan(TINY, "--check", "--json", "--max-total-tokens", "8192", "--threads", "1")
    told = json.loads(done.out)
    assert done.status == 0 and told["near"]
    parts = {part["name"]: part for part in told["parts"]}
    assert parts.keys() == {"weights", "kv", "slots", "total"}
    assert all(part["off"] == 0 for part in parts.values()), "on a CPU each of them is arithmetic"
    assert parts["kv"]["measured"] == (8192 + 64) * 3328 and told["pages"] == {"forecast": 128, "measured": 128}
    assert {"command", "date", "device", "versions", "commit", "configuration"} <= told.keys()


def test_forecast_tolerances() -> None:
    def parts(weights: float, graphs: float) -> list[MemoryPart]:
        made = [MemoryPart("weights", weights, 100.0), MemoryPart("graphs", graphs, 10.0)]
        return [*made, MemoryPart("total", weights + graphs, 110.0)]

    assert near(parts(101.0, 11.0)) and not near(parts(104.0, 7.0)), "weights by themselves"
    assert near(parts(100.0, 13.0)) and not near(parts(99.0, 14.0)), "small parts by what all take"


# ---- sizes ----


PLAIN = {"quantization_config": None}


@pytest.mark.skipif(find_spec("triton") is None, reason="compares with the layers of the kernels")
@pytest.mark.parametrize("config", [LITE, QWEN, DEEPSEEK | PLAIN, DEEPSEEK])
def test_sizes_are_those_of_the_kernels_layers(config: dict[str, Any]) -> None:
    more = {"num_hidden_layers": 4, "eos_token_id": 1, "max_position_embeddings": 4096}
    facts = facts_of(config | more, "test")
    engine = EngineConfig(
        model_path="", dtype="bfloat16", decode_attention_backend="triton", prefill_attention_backend="triton"
    )
    model = catalog.assemble(facts, build.layer_factory(facts, "meta", engine.kernels, engine.dtype))
    tensors, sizes = (*model.parameters(), *model.buffers()), measure(facts, engine)
    assert sizes.weight_bytes == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=1e-4)
    assert sizes.kv_bytes == sum(plane.page_bytes for plane in model.planes()) // 64
    assert sizes.parameters == sum(group.parameters for group in PlannedModel(facts).on(ONE).groups)


def test_copies_get_gpus_of_their_own() -> None:
    config = parse_options(options_parser("x", ""), ["m"]).options
    attention = command(config, ParallelLayout(tp=2, dp=2, copies=2), 16).splitlines()
    assert attention[0] == "for i in $(seq 0 1); do"
    assert attention[1].strip().startswith("CUDA_VISIBLE_DEVICES=$(seq -s, $((2*i)) $((2*i+1)))")
    assert command(config, ParallelLayout(tp=2, copies=2), 16) == "thalweg serve m --tp-size 2 --dp-size 2"
    assert command(config, ParallelLayout(), 16) == "thalweg serve m"
    on_nodes = command(config, ParallelLayout(tp=16, copies=2), 16)
    assert "--tp-size 16 --nnodes 2 --node-rank RANK --dist-init-addr HOST:29500  # on each node of a copy" in on_nodes
    assert command(config, ParallelLayout(tp=8, copies=2), 16) == "thalweg serve m --tp-size 8  # on each node"
    some = command(config, ParallelLayout(tp=4, copies=4), 16)
    assert some == "thalweg serve m --tp-size 4 --dp-size 2  # on each node"


def test_several_nodes_of_a_named_machine(plan: Run, v3: str) -> None:
    flags = ("--tp-size", "16", "--dp-size", "16", "--enable-dp-attention", "--ep-size", "16", "--concurrency", "1024")
    made = json.loads(plan(v3, "--machine", "h200x8", "--nnodes", "2", *flags, "--json").out)
    same = json.loads(plan(v3, "--machine", "h200x16", *flags, "--json").out)
    assert made["layouts"] == same["layouts"] and made["machine"]["gpus"] == 16 and made["caches"] == 16
    assert "--nnodes 2 --node-rank RANK" in made["best"]["command"]
    text = plan(v3, "--machine", "h200x8", "--nnodes", "2", *flags).out
    assert "nodes of 8, 50 GB/s a GPU between them" in " ".join(text.split())
    for machine, nodes, words in (("h200x16", "2", "a node has up to 8"), ("h200x8", "999", "up to 1024")):
        refused = plan(v3, "--machine", machine, "--nnodes", nodes)
        assert refused.status == 2 and words in refused.err
    refused = plan(v3, "--machine", "h200x8", "--nnodes", "3", "--tp-size", "12")
    assert refused.status == 2 and "12 GPUs a copy are neither whole nodes of 8" in refused.err
