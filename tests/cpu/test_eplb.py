"""The expert load balancer gives DeepSeek's maps, and its moves keep every expert somewhere.

data/eplb.json holds what github.com/deepseek-ai/EPLB returns. Packs have 16 slots at most there: it sorts larger ones
as torch likes, and which of equal loads comes first differs between processors.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import config
from tests.cpu.plan_models import DEEPSEEK
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.build import expert_sizes
from thalweg.models.catalog import read_config_facts
from thalweg.parallel.balancer import aligned, next_moves
from thalweg.parallel.eplb import balance, utilization
from thalweg.parallel.expert_file import ExpertSizes, read_expert_location

PUBLISHED = json.loads((Path(__file__).parent / "data" / "eplb.json").read_text())
SIZES = ExpertSizes(layers=2, experts=4, slots=6, ranks=2, groups=1)


def test_the_published_example() -> None:
    load_LE = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    assert balance(load_LE, 16, 4, 2, 8).expert_LS.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case['slots']}-{case['groups']}-{case['gpus']}")
def test_maps_are_deepseeks(case: dict[str, Any]) -> None:
    """With equal loads and with none."""
    got = balance(torch.tensor(case["load"]), case["slots"], case["groups"], case["nodes"], case["gpus"])
    assert got.expert_LS.tolist() == case["expert"] and got.count_LE.tolist() == case["count"]
    for layer, rows in enumerate(got.slots_LEC.tolist()):
        for expert, slots in enumerate(rows):
            assert all(case["expert"][layer][slot] == expert for slot in slots if slot >= 0)


def test_deepseeks_sizes_are_balanced() -> None:
    """256 experts and 32 more slots on 8 GPUs, with loads that differ by e from one another."""
    load_LE = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).exp()
    for groups, redundant, least in ((8, 32, 0.995), (1, 0, 0.95)):
        expert_LS = balance(load_LE, 256 + redundant, groups, 1, 8).expert_LS
        for load_E, expert_S in zip(load_LE.tolist(), expert_LS.tolist(), strict=True):
            assert set(expert_S) == set(range(256))
            assert utilization(load_E, expert_S, 8) > least > utilization(load_E, [*range(256)], 8)


def test_utilization_is_the_mean_over_the_largest() -> None:
    assert utilization([6, 2, 2, 2], [0, 1, 2, 3], 2) == 6 / 8
    assert utilization([6, 2, 2, 2], [0, 1, 0, 2, 3, 3], 2) == 6 / 8  # 3 + 2 + 3, and 2 + 1 + 1
    assert utilization([0, 0], [0, 1], 2) == 1


def test_moves_reach_the_target_and_lose_no_expert() -> None:
    chance = random.Random(0)
    for _ in range(400):
        ranks, experts, copies = chance.choice([1, 2, 4]), chance.choice([4, 8, 16]), chance.choice([0, 1, 4])
        slots = -(-(experts + copies) // ranks) * ranks

        def draw(experts: int = experts, slots: int = slots) -> list[int]:
            drawn = [*range(experts), *chance.choices(range(experts), k=slots - experts)]
            return chance.sample(drawn, slots)

        now, wanted, count = draw(), draw(), 0
        target, each = aligned(now, wanted, ranks), slots // ranks
        for first in range(0, slots, each):
            assert sorted(target[first : first + each]) == sorted(wanted[first : first + each])
        wrong = sum(a != b for a, b in zip(now, target, strict=True))
        while now != target:
            moves, after = next_moves(now, target, chance.choice([1, 3, 8]))
            held = list(now)
            for (_, slot), expert in zip(moves, [now[source] for source, _ in moves], strict=True):
                held[slot] = expert
            assert moves and held == after and set(after) == set(range(experts))
            now, count = after, count + len(moves)
        assert count <= 2 * wrong


def written(path: Path, tree: Any) -> str:
    if path.suffix == ".pt":
        torch.save(tree, path)
    else:
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(path)


def test_an_expert_map_is_read_from_json_and_torch(tmp_path: Path) -> None:
    rows = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]
    tree = {"physical_to_logical_map": rows}
    assert read_expert_location("trivial", SIZES) == ()
    assert read_expert_location(written(tmp_path / "a.json", tree), SIZES) == tuple(map(tuple, rows))
    tensors = {name: torch.tensor(value) for name, value in tree.items()}
    assert read_expert_location(written(tmp_path / "a.pt", tensors), SIZES) == tuple(map(tuple, rows))


def test_groups_of_experts_stay_on_a_node(tmp_path: Path) -> None:
    """Of two nodes with four processes of one model; on one node, groups may be on all ranks."""
    facts = read_config_facts(DEEPSEEK, "test")
    counts = torch.rand(facts.layers, 256, generator=torch.Generator().manual_seed(1))
    path = written(tmp_path / "counts.pt", {"logical_count": counts})
    for nodes, expected in ((1, 2), (2, 1)):
        on = config(model_path="", tp_size=4, ep_size=4, nnodes=nodes, eplb_algorithm="deepseek_hierarchical")
        sizes = expert_sizes(on, facts)
        assert sizes.nodes == nodes
        placed = torch.tensor(read_expert_location(path, sizes)).view(facts.layers, 2, -1) // 32
        most = max(sum(group in half for half in layer.tolist()) for layer in placed for group in range(8))
        assert most == expected


def test_counts_of_one_or_several_steps_make_a_map(tmp_path: Path) -> None:
    count = torch.tensor([[9, 1, 1, 1], [1, 1, 9, 1]])
    want = tuple(map(tuple, balance(2 * count, 6, 1, 1, 2).expert_LS.tolist()))
    for name, counts in (("a.pt", torch.stack([count, count])), ("b.json", count.tolist())):
        assert read_expert_location(written(tmp_path / name, {"logical_count": counts}), SIZES) == want


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ("{", "cannot be read"),
        ("[1]", "neither physical_to_logical_map nor logical_count"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]]}, r"shape \[1, 6\], and this model and layout \[2, 6\]"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 0, 4], [0, 1, 2, 3, 0, 1]]}, "layer 0 must have each of 4"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 2, 0, 1]]}, "layer 1 must have each of 4"),
        ({"physical_to_logical_map": "x"}, "no table of numbers"),
        ({"logical_count": [[1, 2, 3, -4], [1, 2, 3, 4]]}, "no number of tokens"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tree: Any, reason: str, tmp_path: Path) -> None:
    name = written(tmp_path / "a.json", tree)
    with pytest.raises(UnsupportedConfig, match=f"init_expert_location: .*a.json.*{reason}"):
        read_expert_location(name, SIZES)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    torch.save({"logical_count": Path("x")}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedConfig, match="cannot be read"):
        read_expert_location(str(tmp_path / "a.pt"), SIZES)
