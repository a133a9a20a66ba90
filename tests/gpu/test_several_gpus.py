"""Models on several GPUs: each token of eager and captured steps is one GPU's best, or nearly as good, after the same
tokens. Each engine has a process of its own.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_compose import SMALL
from thalweg.config.options import ParallelOptions
from thalweg.launch.parallelism import unsupported_parallelism

ROOT = Path(__file__).parents[2]
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
    "pp2 eager": ("pp_size=2", EAGER),
    "pp2 graphs": ("pp_size=2", "chunked_prefill_size=64", GRAPHS),
    "pp2 nextn graphs": ("pp_size=2", 'speculative_algorithm="NEXTN"', GRAPHS),
    "tp4 graphs": ("tp_size=4", GRAPHS),
    "pp2 tp2 graphs": ("pp_size=2", "tp_size=2", GRAPHS),
}


def small_model(folder: Path) -> Path:
    """Its configuration and a tokenizer: the weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 2048}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models/tiny" / name, folder)
    return folder


def engine(folder: Path, what: str, *wishes: str) -> list[Any]:
    """What tests.gpu.generate prints."""
    command = [sys.executable, "-m", "tests.gpu.generate", str(folder), what, 'load_format="dummy"', *wishes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_gpus_give_one_gpus_tokens(layout: str, tmp_path: Path, cuda: torch.device) -> None:
    wishes = LAYOUTS[layout]
    sizes = (wish.partition("=") for wish in wishes)
    if torch.cuda.device_count() < math.prod(int(size) for name, _, size in sizes if name in ("tp_size", "pp_size")):
        pytest.skip("takes more GPUs")
    if "pp_size=2" in wishes and (reason := unsupported_parallelism(ParallelOptions(pp_size=2), "cuda")):
        pytest.skip(reason)
    folder, file = small_model(tmp_path / "small"), tmp_path / "generated.json"
    file.write_text(json.dumps(engine(folder, str(TOKENS), *wishes)))
    for gaps in engine(folder, str(file), EAGER):
        assert len(gaps) == TOKENS and max(gaps) < 2 and sum(gap < 0.1 for gap in gaps) > 0.9 * TOKENS, gaps
