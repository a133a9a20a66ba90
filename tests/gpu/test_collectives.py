"""Collectives of several GPUs: numbers and equal bits, through `thalweg bench collectives`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thalweg.bench.collectives import main


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("width", [256, 2048, 7168])
def test_ranks_have_the_same_bits_and_the_right_sum(width: int, tmp_path: Path) -> None:
    """Each way, eagerly and in a graph; a rank that differs in a bit is an error."""
    path = tmp_path / "result.json"
    assert main(["--rows", "1", "5", "16", "130", "--width", str(width), "--output-file", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    sums = [row for row in rows if "combine" not in row["way"]]
    assert len(sums) == 4 * 5 - 2 and len(rows) > len(sums) and all(row["us"] > 0 for row in rows)
    assert all(row["error"] < 0.1 and not row["failed"] for row in rows), rows
