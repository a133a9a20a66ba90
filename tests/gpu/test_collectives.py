"""Collectives of several GPUs: numbers and equal bits, through `thalweg bench collectives`, and over many calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thalweg.bench.collectives import main
from thalweg.kernels.all_reduce import ref

CALLS, MOST_ROWS = 4000, 400
SLEEPS = 20_000  # clocks that one rank comes later than the other, at most
EPS = 1e-6

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.mark.parametrize("width", [256, 2048, 7168])
def test_ranks_have_the_same_bits_and_the_right_sum(width: int, tmp_path: Path) -> None:
    """Each way, eagerly and in a graph; a rank that differs in a bit is an error."""
    path = tmp_path / "result.json"
    assert main(["--rows", "1", "5", "16", "130", "--width", str(width), "--output-file", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    sums = [row for row in rows if "combine" not in row["way"]]
    assert len(sums) == 4 * 5 - 2 and len(rows) > len(sums) and all(row["us"] > 0 for row in rows)
    assert all(row["error"] < 0.1 and not row["failed"] for row in rows), rows


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("width", [256, 2048])
def test_many_sums_are_right(width: int, two_shot: bool, tmp_path: Path) -> None:
    """Narrow rows of ranks that come early or late: each of thousands of sums, not only most."""
    args = 2, f"file://{tmp_path}/store", width, two_shot, str(tmp_path)
    mp.spawn(many_sums, args, nprocs=2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [0, 0]


def many_sums(rank: int, size: int, address: str, width: int, two_shot: bool, folder: str) -> None:
    """A rank's process: writes how many sums were wrong."""
    from thalweg.kernels.all_reduce import triton as kernel
    from thalweg.parallel.symmetric import SymmetricMemory

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size, device_id=device)
    group: Any = dist.group.WORLD
    memory = SymmetricMemory(group, kernel.bytes_for(size, MOST_ROWS, width), device)
    buffers = kernel.PeerBuffers.of(memory.addresses, rank, device, rows=MOST_ROWS, width=width)
    shared, own = (torch.Generator().manual_seed(seed) for seed in (1, 2 + rank))
    weight_H, wrong = torch.ones(width, device=device), torch.zeros((), dtype=torch.int64, device=device)
    table = torch.randn(size + 1, 4096, width, generator=shared).bfloat16().to(device)  # of all ranks, and the stream
    most = MOST_ROWS if two_shot else kernel.PROGRAMS
    with torch.inference_mode():
        for _ in range(CALLS):
            rows, first = (int(torch.randint(*bounds, (), generator=shared)) for bounds in ((1, most), (0, 3000)))
            some = table[:, first : first + rows]
            torch.cuda._sleep(int(torch.randint(SLEEPS, (), generator=own)))  # type: ignore[no-untyped-call]
            x_TH, normed_TH, *_ = kernel.add_norm(some[rank], some[size], weight_H, EPS, buffers, two_shot=two_shot)
            want = ref.add_norm(some[:size], some[size], weight_H, EPS)
            wrong += (x_TH != want.x_TH).any() | ((normed_TH - want.rows_TH).abs() > 0.1).any()
    Path(folder, f"{rank}.json").write_text(json.dumps(int(wrong)))
    dist.destroy_process_group()
