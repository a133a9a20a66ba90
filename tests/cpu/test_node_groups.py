"""Groups of ranks on one of several nodes use the kernels that write into other GPUs' memory, and no others do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thalweg.config.engine import EngineConfig
from thalweg.engine import collectives, group
from thalweg.parallel.mesh import are_on_one_node, axis_ranks
from thalweg.parallel.process_axis import ProcessAxis

GPU = torch.device("cuda")
MOE = SimpleNamespace(topk=4, shared=1)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(model_path="", dtype="bfloat16", **fields)


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({"tp_size": 4, "nnodes": 2}, (0, 0, 1, 1)),
        ({"tp_size": 2, "pp_size": 2, "nnodes": 2}, (0, 0, 1, 1)),
        ({"tp_size": 3, "dp_size": 2, "nnodes": 3}, (1, 2, 2)),  # the second copy begins in the middle of a node
    ],
)
def test_processes_know_the_nodes_of_their_copy(fields: dict[str, Any], nodes: tuple[int, ...]) -> None:
    last = group.members_of(config(**fields), Path(), nodes[0])[-1]
    assert last.nodes == nodes and are_on_one_node(range(len(nodes)), ())


@pytest.mark.parametrize(
    ("fields", "kernel", "of_one_node"),
    [
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "sum_and_norm", True),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "expert_exchange", False),
        ({"tp_size": 4}, "sum_and_norm", False),
        ({"tp_size": 2, "pp_size": 2}, "sum_and_norm", True),
    ],
)
def test_what_a_group_takes_follows_from_its_own_ranks(
    fields: dict[str, Any], kernel: str, of_one_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two processes each."""
    own = config(nnodes=2, **fields)
    (member, *_), made = group.members_of(own, Path()), list[tuple[int, ...]]()

    def axis(name: str) -> ProcessAxis:
        ranks = axis_ranks(group.mesh_of(own), 0)[name]
        is_on_one_node = are_on_one_node(ranks, member.nodes)
        return ProcessAxis(ranks, len(ranks), 0, False, is_on_one_node=is_on_one_node)  # type: ignore[arg-type]

    def tried(axis: ProcessAxis, *_: Any) -> tuple[None, str]:
        made.append(axis.group)  # type: ignore[arg-type]
        return None, "tried"

    monkeypatch.setattr(collectives, "_on_all_ranks", tried)
    layout = SimpleNamespace(tp=axis("tp"), dp=axis("dp"), ep=axis("ep"))
    model: Any = SimpleNamespace(facts=SimpleNamespace(moe=MOE, hidden=64), factory=SimpleNamespace(layout=layout))
    choose = collectives.with_sum_and_norm if kernel == "sum_and_norm" else collectives.with_exchange
    reason = choose(own, model, GPU).report.current()[kernel].reason
    assert bool(made) == of_one_node and reason == ("tried" if of_one_node else collectives.OF_ONE_NODE)
