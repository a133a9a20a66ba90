"""Attention of prompts to a choice of 2,048 tokens (DSA) on one GPU, alone, each way in a CUDA graph.

    python benchmarks/gpu/sparse_prompts.py [--only mask,dense] [--heads 128] [--backends triton_sparse,flashmla_kv,…]

mask: the context expanded, of which a mask leaves what is chosen, beside each kernel that reads chosen latents, with
all that a layer does for either but the choice. Both ways must agree within 2 %. Then for each backend the pairs of
`kernels.dsa.backends.SparseKernel.masked`: for each context the share of its tokens from which the mask takes less
time.

dense: prompts of 32,768 and 131,072 tokens in steps of 8,192. Attention to all of the context, expanded in each step
and read by FlashAttention 3, or by our kernel where that is not installed; beside index scores of 64 heads, the choice,
and attention to it.

Prints microseconds, and writes $OUT/sparse_prompts.json (or ./sparse_prompts.json).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from attention import DEVICE, microseconds, random
from index_scores import plane, queries
from torch import Tensor

from thalweg.config.backends import DEEP_GEMM, FA3, PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import ContextChunk, LatentPlane, QueryRows, RaggedRows
from thalweg.kernels.dsa import deep_gemm
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.dsa.backends import SparseShape
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import triton_prefill
from thalweg.layers.paged_sparse import SCORES_AT_ONCE, gather_records
from thalweg.memory.planes import Planes, record_plane, vector_plane

RANK, ROPE, NOPE, VALUE, TOPK, SCALE = 512, 64, 128, 128, 2048, 192**-0.5
CONTEXTS, TOKENS = (2560, 3072, 4096, 6144, 8192, 12288), (128, 512, 1024, 2048, 3072, 4096, 6144, 8192)
LONG, STEP = (32768, 131072), 8192


class Case:
    """The last tokens of one context: random latents, queries, weights and a random choice."""

    def __init__(self, backend: str, heads: int, tokens: int, context: int) -> None:
        self.tokens, self.context, kinds = tokens, context, PREFILL[backend].supports.kv
        pages, self.is_record = -(-context // PAGE), "bfloat16" not in kinds
        record = record_plane(0, RANK, ROPE)
        planes = Planes(
            (record if self.is_record else vector_plane("latent", 0, RANK + ROPE, torch.bfloat16),), pages, DEVICE
        )
        places = torch.arange(context, device=DEVICE)
        for some in places.split(1 << 14):
            planes.write("latent", 0, some, random(len(some), RANK + ROPE))
        self.latents, self.rows_SD = LatentPlane(planes.paged("latent", 0)), planes.tokens("latent", 0)
        self.table = torch.arange(pages, device=DEVICE).int().unsqueeze(0)
        self.query = random(tokens, heads, NOPE + ROPE)
        self.uk = random(heads, NOPE, RANK) * RANK**-0.5
        self.uv = (random(heads, VALUE, RANK) * RANK**-0.5).transpose(1, 2)
        self.rows = QueryRows(torch.zeros(tokens, device=DEVICE).int(), self.table, places[context - tokens :])
        starts, ends = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (tokens, context))
        self.chunk = ContextChunk(torch.zeros(1, dtype=torch.int32, device=DEVICE), ends, context, context)
        self.ragged = RaggedRows(starts, ends, tokens, context)
        self.kernel = load_entry(PREFILL[backend].sparse)(SparseShape(RANK, TOPK, SCALE))

    def chosen(self) -> Tensor:
        """2,048 of the positions that each token sees, rising; all of fewer."""
        positions = self.rows.positions_T.split(256)
        parts = [dsa.choose(torch.rand(len(some), self.context, device=DEVICE), some, TOPK) for some in positions]
        return torch.cat(parts)

    def gathered(self) -> Tensor:
        if self.is_record:
            return gather_records(self.rows_SD, self.table, self.chunk, RANK, torch.bfloat16)
        return mla.gather(self.latents, self.table, self.chunk, RANK)

    def by_mask(self, chosen: Tensor) -> Tensor:
        mask, of = dsa.mask_of(chosen, self.context), (self.query, self.gathered(), self.uk, self.uv, self.ragged)
        return triton_prefill(*of, scale=SCALE, chosen_TS=mask)[0].flatten(1)

    def by_choice(self, chosen: Tensor) -> Tensor:
        absorbed = self.query.new_empty(*self.query.shape[:2], RANK + ROPE)
        absorbed[..., RANK:] = self.query[..., NOPE:]
        torch.bmm(self.query[..., :NOPE].transpose(0, 1), self.uk, out=absorbed[..., :RANK].transpose(0, 1))
        out: Tensor = self.kernel.attend(absorbed, self.latents, chosen, self.rows, self.uv, {})
        return out

    def dense(self) -> Tensor:
        prefill = load_entry(PREFILL["fa3" if FA3.is_installed() else "triton"].mla)
        out: Tensor = prefill(self.query, self.gathered(), self.uk, self.uv, self.ragged, scale=SCALE)[0]
        return out


class Indexer:
    """Scores of a case's tokens, and their choice."""

    def __init__(self, case: Case) -> None:
        self.case, self.keys, (self.query, self.weights) = case, plane(case.table.shape[1]), queries(case.tokens)
        most = max(SCORES_AT_ONCE // (4 * case.context), 1)
        self.launches = [slice(first, min(first + most, case.tokens)) for first in range(0, case.tokens, most)]
        self.bounds = [deep_gemm.prompt_bounds(case.rows.positions_T[some]) for some in self.launches]

    def choose(self) -> Tensor:
        context, rows, parts = self.case.context, self.case.rows, []
        gathered = deep_gemm.gather_keys(self.keys, self.case.table[0]) if DEEP_GEMM.is_installed() else None
        for some, bounds in zip(self.launches, self.bounds, strict=True):
            of = self.query[some], self.weights[some]
            scores = (
                dsa.scores(*of, self.keys, rows.some(some), context)
                if gathered is None
                else deep_gemm.prompt_scores(*of, gathered, bounds, context)
            )
            parts.append(dsa.choose(scores, rows.positions_T[some], TOPK))
        return torch.cat(parts)


def timed(name: str, **calls: Callable[[], object]) -> dict[str, object]:
    found = {key: microseconds([call], 0.1) for key, call in calls.items()}
    print(f"{name}: " + ", ".join(f"{key} {us:,.1f} us" for key, us in found.items()), flush=True)
    return {"case": name, **found}


def mask(backend: str, heads: int) -> list[dict[str, object]]:
    table, found = list[tuple[int, float]](), list[dict[str, object]]()
    for context in CONTEXTS:
        sooner = dict[int, bool]()
        for tokens in sorted(n for n in {*TOKENS, context} if n <= context):
            case = Case(backend, heads, tokens, context)
            chosen = case.chosen()
            got, want = case.by_mask(chosen).float(), case.by_choice(chosen).float()
            assert float((got - want).norm() / want.norm()) < 0.02, (backend, tokens, context)
            ways = {"mask": case.by_mask, "choice": case.by_choice}
            calls = {key: functools.partial(way, chosen) for key, way in ways.items()}
            row = timed(f"{backend}, {tokens} of {context}", **calls)
            sooner[tokens] = row["mask"] < row["choice"]  # type: ignore[operator]
            found.append(row)
        least = [n for n in sooner if all(is_sooner for m, is_sooner in sooner.items() if m >= n)]
        table += [(context, round(min(least) / context, 3))] if least else []
    print(f"{backend}: masked = {tuple(table)}", flush=True)
    return found


def dense(backend: str, heads: int) -> list[dict[str, object]]:
    found = list[dict[str, object]]()
    for context in LONG:
        sums: dict[str, float] = {"dense": 0.0, "scores and choice": 0.0, "attention": 0.0}
        for end in range(STEP, context + 1, STEP):
            case = Case(backend, heads, STEP, end)
            indexer = Indexer(case)
            chosen = indexer.choose()
            calls = (case.dense, indexer.choose, functools.partial(case.by_choice, chosen))
            for key, call in zip(sums, calls, strict=True):
                sums[key] += microseconds([call], 0.02)
        gain = sums["dense"] / (sums["scores and choice"] + sums["attention"])
        name = f"{backend}, a prompt of {context}"
        print(f"{name}: {', '.join(f'{key} {us:,.0f} us' for key, us in sums.items())}, {gain:.2f} x", flush=True)
        found.append({"case": name, **sums, "gain": gain})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--only", default="mask,dense")
    parser.add_argument("--backends", default="triton_sparse,flashmla_sparse,flashmla_kv")
    flags = parser.parse_args()
    torch.manual_seed(1)
    parts, found = {"mask": mask, "dense": dense}, list[dict[str, object]]()
    for part in flags.only.split(","):
        for backend in flags.backends.split(","):
            found += parts[part](backend, flags.heads)
    file = Path(os.environ.get("OUT", ".")) / "sparse_prompts.json"
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": flags.heads}
    file.write_text(json.dumps(about | {"microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
