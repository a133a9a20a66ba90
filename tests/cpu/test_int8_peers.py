"""`benchmarks/gpu/int8_peers.py` runs its arguments, shapes and checks without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_installed_library_computes_the_reference(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OUT": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks/gpu/int8_peers.py"), "--tiny", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "int8_peers.json").read_text())
    cases = {row["case"].rpartition(",")[0] for row in result["rows"]}
    assert cases >= {"check product own", "check product torch._int_mm", "check experts own"}
    assert not result["failed"] and all(row["error"] < 2e-2 for row in result["rows"])
