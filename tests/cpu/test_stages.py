"""Where the layers of a model are cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from msgspec import structs

from tests.cpu.plan_models import DEEPSEEK, QWEN
from tests.cpu.test_plan_floors import NEXTN
from tests.cpu.test_sharded_models import SHAPES, written
from thalweg.config.engine import EngineConfig
from thalweg.config.machines import hardware
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.planning.stages import layer_seconds
from thalweg.models.catalog import read_config_facts, read_facts
from thalweg.models.stages import shared_topk, stage_borders


def sizes(facts: ModelFacts, count: int, partition: tuple[int, ...] = (), costs: Sequence[float] = ()) -> list[int]:
    found = stage_borders(facts, count, partition, costs)
    assert found[0].is_first and found[-1].is_last
    assert all(a.stop == b.first for a, b in pairwise(found))
    return [stage.stop - stage.first for stage in found]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["v3", "qwen"])
def test_the_slowest_stage_is_as_fast_as_it_can_be(name: str, count: int) -> None:
    facts = read_config_facts(DEEPSEEK if name == "v3" else QWEN, "config.json")
    facts = structs.replace(facts, layers=12)
    costs = layer_seconds(facts, EngineConfig(model_path=""), None)

    def largest(borders: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *borders, 12)))

    own, at = [], 0
    for size in sizes(facts, count, costs=costs)[:-1]:
        own.append(at := at + size)
    assert largest(tuple(own)) == min(map(largest, combinations(range(1, 12), count - 1)))


@pytest.mark.parametrize("chip", ["h200", "h20"])
@pytest.mark.parametrize("layout", [{}, {"tp_size": 8, "ep_size": 8}, {"tp_size": 8, "attn_cp_size": 8}])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_stages_of_v3_differ_by_at_most_a_layer(count: int, drafts: int, layout: dict[str, int], chip: str) -> None:
    """Three dense layers in front, the head and drafts behind."""
    drafter = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts} if drafts else {}
    costs = layer_seconds(NEXTN.facts, EngineConfig(model_path="", **layout, **drafter), hardware(chip))
    of_stages = [sum(costs[stage.first : stage.stop]) for stage in stage_borders(NEXTN.facts, count, (), costs)]
    assert max(of_stages) - min(of_stages) < 1.001 * costs[30]


def test_what_a_layer_reads_counts_and_not_what_it_has() -> None:
    """A step of DeepSeek-V3 on eight H200 reads 222 of 256 experts. Drafts of a NextN layer take the last stage's time,
    and over data-parallel attention a dense layer is not divided.
    """
    plain = EngineConfig(model_path="", tp_size=8, ep_size=8)
    drafting = structs.replace(plain, speculative_algorithm="NEXTN", speculative_num_steps=3)
    parallel = structs.replace(plain, dp_size=8, enable_dp_attention=True)
    dense, moe, last = (layer_seconds(NEXTN.facts, plain, None)[layer] for layer in (0, 30, 60))
    assert 0.2 < dense / moe < 0.3, "of the parameters it has a twentieth"
    assert 1.1 < last / moe < 1.2, "the head"
    found = [sizes(NEXTN.facts, 2, costs=layer_seconds(NEXTN.facts, one, None)) for one in (plain, drafting, parallel)]
    assert found == [[32, 29], [33, 28], [31, 30]]
    assert sizes(NEXTN.facts, 2, (40, 21)) == [40, 21]


def test_a_stage_begins_with_an_indexer(tmp_path: Path) -> None:
    facts = read_facts(written(tmp_path, SHAPES["v3.2"]))
    assert facts.indexer is not None
    facts = structs.replace(facts, indexer=structs.replace(facts.indexer, full=(True, False, False, True)))
    assert sizes(facts, 2) == [3, 1], "where there are enough"
    assert sizes(facts, 4) == [1, 1, 1, 1]
    assert sizes(facts, 2, (2, 2)) == [2, 2]
    assert [shared_topk(facts, layer) for layer in range(5)] == [0, facts.indexer.topk, facts.indexer.topk, 0, 0]
    with pytest.raises(UnsupportedConfig, match="4 layers.*at most --pp-size 4"):
        stage_borders(facts, 5)


@pytest.mark.parametrize("partition", [(30, 30), (61,), (61, 0), (20, 20, 21)])
def test_a_partition_that_does_not_divide_the_layers(partition: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedConfig, match="61 layers over 2 stages"):
        stage_borders(read_config_facts(DEEPSEEK, "config.json"), 2, partition)
