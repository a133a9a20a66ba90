"""`thalweg bench collectives`: the sum over ranks with residual addition and norm, and dispatch and combine, by
each way there is, on the GPUs of this host.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from thalweg.bench.command import OUTPUT, CommandParser, add_flags, command
from thalweg.bench.display import field_table, fields
from thalweg.bench.results import save
from thalweg.core.errors import UnsupportedConfig

CALLS = 60  # of a captured graph
REPLAYS = 7
EPS = 1e-6
EXPERTS = 9  # of a token of DeepSeek-V3, the shared one too: a slot and a weight each
FLAGS = f"""
--tp-size  count        ranks, one on each GPU; default: all GPUs
--rows     count...=1 4 16 64 128 256 512  rows of a call
--width    count=7168   numbers of a row, a multiple of 128
--seed     whole=1      of the numbers
{OUTPUT}
"""
COLUMNS = fields("""
rows        rows
way         way
us          us
largest error  error
""")
Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (partial, x) -> (x + sum over ranks, its norm)


def ways(rank: int, rows: int, width: int, weight_H: Tensor) -> Iterator[tuple[str, Way]]:
    """Each way for calls of so many rows, by name. All ranks take them in this order."""
    import torch.distributed._symmetric_memory as symmetric

    from thalweg.kernels.all_reduce import triton as all_reduce
    from thalweg.kernels.norm.triton import rms_norm
    from thalweg.kernels.peer_words import PROGRAMS
    from thalweg.parallel.symmetric import SymmetricMemory

    group, device = dist.group.WORLD, weight_H.device
    assert group is not None
    size = dist.get_world_size()
    memory = SymmetricMemory(group, all_reduce.bytes_for(size, rows, width), device)
    buffers = all_reduce.PeerBuffers.of(memory.addresses, rank, device, rows=rows, width=width)

    def fused(two_shot: bool, partial_TH: Tensor, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        x, normed, *_ = all_reduce.add_norm(partial_TH, x_TH, weight_H, EPS, buffers, two_shot=two_shot)
        return x, normed

    def apart(reduce: Callable[[Tensor], Tensor], partial_TH: Tensor, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        x = x_TH + reduce(partial_TH)
        return x, rms_norm(x, weight_H, EPS)

    if rows <= PROGRAMS:
        yield "one-shot, one launch", partial(fused, False)
    yield "two-shot, one launch", partial(fused, True)
    shared = symmetric.empty(rows, width, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, group)
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)

    def by_torch(two_shot: bool, partial_TH: Tensor) -> Tensor:
        shared.copy_(partial_TH)
        if two_shot:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)
            return shared
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group.group_name, out)
        return out

    if rows <= 64:
        yield "torch one-shot, norm", partial(apart, partial(by_torch, False))
    yield "torch two-shot, norm", partial(apart, partial(by_torch, True))

    def by_nccl(partial_TH: Tensor) -> Tensor:
        out.copy_(partial_TH)
        dist.all_reduce(out)
        return out

    yield "NCCL, norm", partial(apart, by_nccl)


def microseconds(way: Way, partial_TH: Tensor, x_TH: Tensor) -> float:
    """Of a call in a captured graph of many, the median of some replays; the slowest rank's."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            way(partial_TH, x_TH)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                way(partial_TH, x_TH)
        times = []
        for _ in range(REPLAYS):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
    slowest = torch.tensor(median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def largest_error(way: Way, partial_TH: Tensor, x_TH: Tensor, weight_H: Tensor) -> float:
    """Of the norm, against the sum in float32; RuntimeError where ranks differ in a bit."""
    from thalweg.kernels.all_reduce.ref import add_norm

    partials = torch.empty(dist.get_world_size(), *partial_TH.shape, dtype=partial_TH.dtype, device="cuda")
    dist.all_gather_into_tensor(partials, partial_TH)
    want, (x, normed) = add_norm(partials, x_TH, weight_H, EPS), way(partial_TH, x_TH)
    for mine in (x, normed):
        theirs = torch.empty(dist.get_world_size(), *mine.shape, dtype=mine.dtype, device="cuda")
        dist.all_gather_into_tensor(theirs, mine.contiguous())
        if not all(torch.equal(one, mine) for one in theirs):
            raise RuntimeError("ranks have different bits")
    return float((normed.float() - want.rows_TH.float()).abs().max())


def measure(rank: int, size: int, address: str, args: Any, path: str) -> None:
    """A rank's process. Rank 0 writes the rows of the table, one for each number of rows and way."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size, device_id=device)
    table = []
    with torch.inference_mode():
        for rows in args.rows:
            shared = torch.Generator(device).manual_seed(args.seed)
            x_TH, weight_H = (
                torch.randn(*shape, generator=shared, device=device) for shape in ((rows, args.width), (args.width,))
            )
            own = torch.Generator(device).manual_seed(args.seed + 1 + rank)
            partial_TH = torch.randn(rows, args.width, generator=own, device=device).bfloat16()
            x_TH = x_TH.bfloat16()
            for name, way in ways(rank, rows, args.width, weight_H):
                try:
                    error = largest_error(way, partial_TH, x_TH, weight_H)
                    us = round(microseconds(way, partial_TH, x_TH), 2)
                    table.append({"rows": rows, "way": name, "us": us, "error": round(error, 4), "failed": ""})
                except RuntimeError as failure:
                    first = str(failure).strip().partition("\n")[0]
                    table.append({"rows": rows, "way": name, "us": None, "error": None, "failed": first})
        try:
            table += exchanges(rank, size, args.width, device)
        except RuntimeError as failure:  # the sums stay
            row = {"rows": 0, "way": "dispatch and combine", "us": None, "error": None}
            table.append(row | {"failed": str(failure).strip().partition("\n")[0]})
    if rank == 0:
        Path(path).write_text(json.dumps(table), encoding="utf-8")
    dist.destroy_process_group()


def exchanges(rank: int, size: int, width: int, device: torch.device) -> list[dict[str, Any]]:
    """Dispatch of FP8 rows to all ranks and combine in bf16, without products between. error: of the sums, against
    NCCL's.
    """
    from thalweg.parallel.peer_exchange import PeerExchange
    from thalweg.parallel.process_axis import ProcessAxis

    group = dist.group.WORLD
    assert group is not None
    axis, row_bytes = ProcessAxis(group, size, rank, on_cpu=False), width + 4 * width // 128 + 8 * EXPERTS
    peers, table = PeerExchange(axis, group, row_bytes, width, device), list[dict[str, Any]]()
    for rows, by_way in peers.measure().items():
        bytes_NB = torch.randint(256, (rows, row_bytes), device=device).to(torch.uint8)
        results_RNH = torch.randn(size, rows, width, device=device).bfloat16()
        received_RNB, combine = peers.dispatch(bytes_NB, 0)
        sums_NH, want_NH = combine(results_RNH), axis.reduce_scatter(results_RNH)
        is_alike = torch.tensor(torch.equal(received_RNB, axis.all_gather(bytes_NB)), dtype=torch.int32, device=device)
        dist.all_reduce(is_alike, dist.ReduceOp.MIN)
        failed = "" if is_alike.item() else "other rows than by NCCL have come"
        error = round(float((sums_NH - want_NH).abs().max()), 4)
        ways = {f"dispatch and combine, {way}": us for way, us in by_way.items()}
        table += [
            {"rows": rows, "way": way, "us": round(us, 2), "error": error, "failed": failed} for way, us in ways.items()
        ]
    return table


@command("thalweg bench collectives")
def main(argv: list[str]) -> int:
    """Raises UnsupportedConfig."""
    parser = CommandParser(
        prog="thalweg bench collectives",
        description="Times the sum over ranks with residual addition and norm, and dispatch and combine, in CUDA"
        " graphs, by each way there is.",
    )
    add_flags(parser, "", FLAGS)
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    size = args.tp_size or gpus
    if gpus < 2:
        raise UnsupportedConfig(f"it times transfers between GPUs: this host has {gpus}, and at least 2 are needed")
    if not 2 <= size <= gpus:
        raise UnsupportedConfig(f"--tp-size {size}: use 2 to {gpus}, as this host has {gpus} GPUs")
    if args.width % 128:
        raise UnsupportedConfig(f"--width {args.width} must be a multiple of 128")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        address, path = f"tcp://127.0.0.1:{free.getsockname()[1]}", str(Path(folder) / "table.json")
        free.close()
        spawn(measure, (size, address, args, path), size)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    print("\n".join(field_table(rows, COLUMNS)))
    save(
        args.output_file,
        "bench collectives",
        argv,
        {},
        {"ranks": size, "width": args.width, "calls": CALLS, "rows": rows},
    )
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
