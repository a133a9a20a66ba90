"""Models on several GPUs: eager and captured steps give one GPU's tokens, up to the first near tie. Each engine has a
process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_compose import SMALL

TIE = 0.1  # nats between the two best tokens, where rounding may choose
TOKENS = 96
EAGER, GRAPHS = 'cuda_graph_mode="none"', 'cuda_graph_mode="full_and_piecewise"'
DP2 = ("tp_size=2", "dp_size=2", "enable_dp_attention=true", "ep_size=2")
LAYOUTS = {
    "tp2 eager": ("tp_size=2", EAGER),
    "tp2 graphs": ("tp_size=2", GRAPHS),
    "tp2 ep2 graphs": ("tp_size=2", "ep_size=2", GRAPHS),
    "dp2 ep2 graphs": (*DP2, GRAPHS),
    "dp2 alltoall graphs": (*DP2, 'moe_a2a_backend="alltoall"', GRAPHS),
    "tp2 nextn graphs": ("tp_size=2", 'speculative_algorithm="NEXTN"', GRAPHS),
    "tp4 graphs": ("tp_size=4", GRAPHS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("small")
    (made / "config.json").write_text(json.dumps(SMALL))
    return str(made)


@cache
def tokens(folder: str, *wishes: str) -> list[Any]:
    """Of each prompt its tokens, and the log-probabilities of the best two at each."""
    command = [sys.executable, "-m", "tests.gpu.generate", folder, str(TOKENS), 'load_format="dummy"', *wishes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_gpus_give_one_gpus_tokens(layout: str, folder: str, cuda: torch.device) -> None:
    wishes = LAYOUTS[layout]
    if torch.cuda.device_count() < int(wishes[0].removeprefix("tp_size=")):
        pytest.skip("takes more GPUs")
    for (want, best), (got, _) in zip(tokens(folder, EAGER), tokens(folder, *wishes), strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
        assert parted is None or best[parted][0] - best[parted][1] < TIE, f"parted at {parted}"
