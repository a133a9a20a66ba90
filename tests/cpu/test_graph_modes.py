"""Graph and compile flags on a CPU: refused with the reason, or honoured with the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.resolve import resolve

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "full_and_piecewise", "piecewise"])
def test_a_cpu_has_no_graphs(mode: str) -> None:
    with pytest.raises(
        UnsupportedConfig, match=f"cuda_graph_mode: {mode}, but a CPU has none; use --cuda-graph-mode none"
    ):
        resolve(options_of(model=str(TINY), device="cpu", cuda_graph_mode=mode))
    found = resolve(options_of(model=str(TINY), device="cpu"))
    assert found.engine.cuda_graph_bs == found.engine.piecewise_cuda_graph_tokens == ()
    said = {one.name: one for one in found.decisions}["cuda_graph_mode"]
    assert (said.value, said.source, said.reason) == ("none", "auto", "a CPU has none")
