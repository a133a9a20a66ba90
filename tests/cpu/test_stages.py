"""Where the layers of a model are cut into pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from msgspec import structs

from tests.cpu.plan_models import DEEPSEEK, QWEN
from tests.cpu.test_sharded_models import SHAPES, written
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.models import stages
from thalweg.models.catalog import read_config_facts, read_facts
from thalweg.models.stages import stage_borders


def sizes(facts: ModelFacts, count: int, partition: tuple[int, ...] = (), has_nextn: bool = False) -> list[int]:
    found = stage_borders(facts, count, partition, has_nextn)
    assert found[0].is_first and found[-1].is_last
    assert all(a.stop == b.first for a, b in pairwise(found))
    return [stage.stop - stage.first for stage in found]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["v3", "qwen"])
def test_the_largest_stage_is_as_small_as_it_can_be(name: str, count: int) -> None:
    facts = read_config_facts(DEEPSEEK if name == "v3" else QWEN, "config.json")
    facts = structs.replace(facts, layers=12)
    costs = stages._costs(facts, name == "v3")

    def largest(borders: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *borders, 12)))

    own, at = [], 0
    for size in sizes(facts, count, has_nextn=name == "v3")[:-1]:
        own.append(at := at + size)
    assert largest(tuple(own)) == min(map(largest, combinations(range(1, 12), count - 1)))


def test_experts_the_head_and_a_nextn_layer_count() -> None:
    """Of DeepSeek-V3: three dense layers in front, a NextN layer behind."""
    facts = read_config_facts(DEEPSEEK, "config.json")
    assert sizes(facts, 2) == [32, 29]
    assert sizes(facts, 8)[-1] > sizes(facts, 8, has_nextn=True)[-1]
    assert sizes(facts, 2, (40, 21)) == [40, 21]


def test_a_stage_begins_with_an_indexer(tmp_path: Path) -> None:
    facts = read_facts(written(tmp_path, SHAPES["v3.2"]))
    assert facts.indexer is not None
    facts = structs.replace(facts, indexer=structs.replace(facts.indexer, full=(True, False, False, True)))
    assert sizes(facts, 2) == [3, 1]
    with pytest.raises(UnsupportedConfig, match="2 layers with an indexer.*at most --pp-size 2"):
        stage_borders(facts, 3)
    with pytest.raises(UnsupportedConfig, match="begin with layer 2, which shares"):
        stage_borders(facts, 2, (2, 2))


@pytest.mark.parametrize("partition", [(30, 30), (61,), (61, 0), (20, 20, 21)])
def test_a_partition_that_does_not_divide_the_layers(partition: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedConfig, match="61 layers over 2 stages"):
        stage_borders(read_config_facts(DEEPSEEK, "config.json"), 2, partition)
