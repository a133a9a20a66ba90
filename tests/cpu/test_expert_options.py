"""Flags of expert parallelism: what the resolver decides, and what it refuses and why. With the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compose.matrix import MODEL
from thalweg.bench.ablation_columns import SettingsProbe, columns
from thalweg.cli import main
from thalweg.config.args import options_parser, parse_options
from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.build import expert_sizes
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.models.catalog import read_facts

EP2 = {"tp_size": 2, "ep_size": 2}


def resolved(**wishes: Any) -> Resolved:
    return resolve(options_of(model=MODEL, device="cpu", max_total_tokens=2048, **wishes), weights=False)


def test_by_default_experts_stay_and_are_gathered() -> None:
    engine = resolved(**EP2).engine
    assert (engine.moe_a2a_backend, engine.enable_eplb, engine.ep_num_redundant_experts) == ("none", False, 0)


def test_copies_of_experts_take_memory() -> None:
    plain, copies = resolved(**EP2), resolved(**EP2, ep_num_redundant_experts=16)
    assert copies.sizes.weight_bytes > 1.2 * plain.sizes.weight_bytes, "twice the experts"


def test_the_algorithm_follows_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, facts = resolved(**EP2, enable_eplb=True).engine, read_facts(Path(MODEL))
    assert facts.moe is not None
    limits = facts.moe.method != "greedy" and facts.moe.topk_groups < facts.moe.groups
    assert engine.eplb_algorithm == ("deepseek_hierarchical" if limits else "deepseek")
    assert expert_sizes(engine, facts).groups == (facts.moe.groups if limits else 1)
    assert resolved(**EP2, enable_eplb=True, eplb_algorithm="deepseek").engine.eplb_algorithm == "deepseek"


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"enable_eplb": True}, ("enable_eplb: experts are not divided", "--ep-size 2")),
        ({"ep_num_redundant_experts": 2}, ("ep_num_redundant_experts: experts are not divided",)),
        ({"moe_a2a_backend": "alltoall"}, ("moe_a2a_backend: experts are not divided",)),
        (
            EP2 | {"ep_num_redundant_experts": 3},
            ("ep_size", "cannot be divided into 2 groups; use --ep-num-redundant-experts 4"),
        ),
        (EP2 | {"eplb_rebalance_num_iterations": 5}, ("eplb_rebalance_num_iterations", "--enable-eplb")),
        (EP2 | {"eplb_rebalance_layers_per_chunk": 1}, ("eplb_rebalance_layers_per_chunk", "--enable-eplb")),
        (EP2 | {"eplb_algorithm": "deepseek"}, ("eplb_algorithm", "--enable-eplb")),
        (EP2 | {"deepep_mode": "normal"}, ("deepep_mode", "--moe-a2a-backend deepep")),
        (EP2 | {"moe_a2a_backend": "deepep"}, ("moe_a2a_backend: deepep: it needs GPUs", "alltoall")),
        (EP2 | {"init_expert_location": "nowhere.json"}, ("init_expert_location: nowhere.json cannot be read",)),
        ({"shared_experts_fusion": True}, ("shared_experts_fusion", "--enforce-shared-experts-fusion")),
    ],
)
def test_refusals_name_the_setting(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as error:
        resolved(**wishes)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    facts = read_facts(Path(MODEL))
    assert facts.moe is not None
    rows = [[*range(facts.moe.experts)]] * facts.layers
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": rows}))
    wishes = EP2 | {"init_expert_location": str(tmp_path / "map.json")}
    assert resolved(**wishes).engine.init_expert_location == str(tmp_path / "map.json")
    with pytest.raises(UnsupportedConfig, match="physical_to_logical_map has shape"):
        resolved(**wishes, ep_num_redundant_experts=2)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--enable-two-batch-overlap", "half batches read the experts' weights twice"),
        ("--enable-single-batch-overlap", "too short on one host"),
        ("--ep-dispatch-algorithm", "a token chooses among the copies"),
    ],
)
def test_overlaps_are_refused_with_the_reason(flag: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, flag]) != 0
    assert reason in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("switch", "value"), [("disable", False), ("enforce", True)])
def test_the_switches_of_sglang_set_the_fusion_of_shared_experts(switch: str, value: bool) -> None:
    parsed = parse_options(options_parser("thalweg serve", ""), [f"--{switch}-shared-experts-fusion"])
    assert parsed.options.load.shared_experts_fusion is value


def test_ablations_have_columns_for_fusion_dispatch_and_moving_experts() -> None:
    probe = SettingsProbe({"model": MODEL, "device": "cpu", "max_total_tokens": 2048}, Machine.here())
    found = {column.name: column for column in columns(["eplb", "a2a", "shared-fusion"], probe)}
    assert found["eplb"].wishes(found["eplb"].levels[1]) == {"tp_size": 2, "ep_size": 2, "enable_eplb": True}
    assert found["a2a"].wishes(found["a2a"].levels[1]) == {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "alltoall"}
    assert found["shared-fusion"].setting == "shared_experts_fusion"
