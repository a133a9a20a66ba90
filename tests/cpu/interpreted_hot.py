"""The swap-in of latents from host memory in Triton's interpreter, beside plain torch: bit for bit the same state over
many steps of rows, verifications and trees; a model with hot sets beside one whose latents are on the device, which
after prefix hits computes the same bits.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_hot [few]
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cpu import zoo
from tests.cpu.interpreted_attention import exact_casts
from tests.cpu.interpreted_sparse import CONFIG, TOPK
from tests.cpu.interpreter import prepare
from tests.gpu import shapes
from thalweg.batch.padding import pad_batch
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend import triton as attend
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.swap_in import ref
from thalweg.kernels.swap_in import triton as kernels
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.memory.hot import hot_sets
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts

K, SLOTS, CONTEXT, PAGE = 6, 4, 192, 64
DEVICE = torch.device("cpu")


def chosen_by(draw: random.Random, position: int) -> list[int]:
    """As `dsa.choose`: as many as a token sees, K at most."""
    return sorted(draw.sample(range(position + 1), min(K, position + 1))) + [-1] * max(K - position - 1, 0)


def state_of_both(query: int, entries: int, seed: int, dtype: torch.dtype) -> None:
    """Rows of `query` tokens, of which some are padding, in a random order; a slot sometimes gets another request."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    both = [hot_sets([0], entries, SLOTS, CONTEXT, 12, dtype, DEVICE) for _ in range(2)]
    ours, theirs = (sets[0] for sets, _ in both)
    host = torch.randn(16 * PAGE, 12, generator=generator).to(dtype)
    table = torch.randperm(15, generator=generator)[: SLOTS * 3].view(SLOTS, 3).int() + 1
    lengths, evictions = [draw.randrange(40) for _ in range(SLOTS)], 0
    for step in range(24):
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        if step == 15:
            lengths[slots[0]] = 5
            for _, of_slots in both:
                for state in of_slots:
                    state[:, slots[0]] = 0
        real = [[True] * (n := draw.randint(0, query)) + [False] * (query - n) for _ in slots]
        positions = [
            [(lengths[s] + i) * is_real for i, is_real in enumerate(r)] for s, r in zip(slots, real, strict=True)
        ]
        chosen = torch.tensor([[chosen_by(draw, p) for p in row] for row in positions])
        slots_R, real_RQ, positions_RQ = torch.tensor(slots), torch.tensor(real), torch.tensor(positions)
        seen = chosen.clamp(min=0)
        places = table[slots].long()[:, None, None, :].expand(*seen.shape[:2], 1, 3).squeeze(2).gather(2, seen // PAGE)
        places = places * PAGE + seen % PAGE
        before = theirs.position_SH.clone()
        want = ref.swap_in(theirs, host, slots_R, positions_RQ, real_RQ, chosen, places)
        rows_T = torch.arange(len(slots), dtype=torch.int32).repeat_interleave(query)
        rows = QueryRows(rows_T, table[slots], positions_RQ.flatten())
        got = kernels.swap_in(
            ours, host, slots_R.repeat_interleave(query), real_RQ.flatten(), rows, chosen.flatten(0, 1).int(), K
        )
        wanted = (chosen >= 0) & real_RQ.unsqueeze(2)
        assert torch.equal(got.view_as(want)[wanted].long(), want[wanted]), f"seed {seed}, step {step}"
        assert torch.equal(ours.latents_ED[got.view_as(want)[wanted].long()], host[places[wanted]]), "the latents"
        for name, mine, its in zip(ours._fields, ours, theirs, strict=True):
            if name != "clock_S":  # of padding, which has no step
                assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), f"seed {seed}, step {step}: {name}"
        evictions += int(((before > 0) & (theirs.position_SH != before)).sum())
        for slot, row in zip(slots, real, strict=True):
            lengths[slot] = min(lengths[slot] + draw.randint(min(1, sum(row)), sum(row)), CONTEXT - query)
    assert evictions > 20, f"{evictions}: nothing was replaced"


def beside_the_device(kv: str) -> None:
    """Prompts, chunks beside decode rows, decode rows, verifications and trees of a model, with hot sets of two choices
    and without.
    """
    facts, fp8 = read_config_facts(CONFIG, "hot"), {"kv": kv, "fp8_index": bool(kv)}
    models: list[Any] = []
    for hot in (2 * TOPK, 0):
        config = KernelConfig(decode="triton_sparse", prefill="triton_sparse", hot=hot, **fp8)
        models.append(catalog.assemble(facts, KernelLayers(torch.float32, DEVICE, config)))
        zoo.fill(models[-1])
    planes = [Planes(model.planes(), 16, slots=4, context=1024) for model in models]
    assert all(spec.hot == 2 * TOPK * (spec.name == "latent") for spec in planes[0].specs)
    generator = torch.Generator().manual_seed(1)
    steps: list[tuple[list[shapes.Part], int]] = [
        ([(1, 0, 40), (4, 0, 9)], 0),
        ([(6, 0, 84), (4, 9, 20)], 0),
        ([(4, 29, 1), (6, 84, 1), (1, 40, 30)], 0),
        ([(4, 30, 1), (6, 85, 1), (1, 70, 1)], 0),
        ([(4, 31, 2), (6, 86, 2)], 0),
        ([(4, 32, 2), (6, 88, 2)], 0),  # a draft of the first row was rejected
        ([(6, 90, 2)], 1),
        ([(6, 91, 1)], 0),
    ]
    for number, (rows, trees) in enumerate(steps):
        _, batch = shapes.batches(rows, DEVICE, generator, 64)
        if trees:
            batch, _ = shapes.branched(batch, rows, trees)
        batch = pad_batch(replace(batch, slot_R=torch.tensor([page // 2 for page, _, _ in rows])), len(batch.ids_T) + 3)
        got, want = (model.forward(batch, own) for model, own in zip(models, planes, strict=True))
        error = float(((got - want)[:-3].norm(dim=1) / want[:-3].norm(dim=1)).max())
        assert error < 1e-5, f"{kv} step {number}: {error}"
    held: Tensor = planes[0].hot(0).position_SH
    assert (held[3] > 0).sum() > TOPK, "what was chosen earlier is kept"


def prefix_hits(kv: str) -> None:
    """Tails of prompts behind contexts that earlier requests stored, without masks: the bits are those without hot
    sets, also where a tail by itself would be split in more parts than the step.
    """
    facts, fp8 = read_config_facts(CONFIG | {"index_topk": 256}, "hot"), {"kv": kv, "fp8_index": bool(kv)}
    models: list[Any] = []
    for hot in (512, 0):
        config = KernelConfig(decode="triton_sparse", prefill="triton_sparse", hot=hot, **fp8)
        models.append(catalog.assemble(facts, KernelLayers(torch.float32, DEVICE, config)))
        models[-1].metadata.masked = ()
        zoo.fill(models[-1])
    planes = [Planes(model.planes(), 16, slots=4, context=1024) for model in models]
    generator = torch.Generator().manual_seed(1)
    for spec in planes[1].specs:
        dim = {"latent": CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"], "index": CONFIG["index_head_dim"]}
        stored = torch.randn(15 * PAGE, dim[spec.name], generator=generator)
        for own in planes:
            own.write(spec.name, spec.layer, torch.arange(PAGE, 16 * PAGE), stored)
    rows: list[shapes.Part] = [(1, 320, 56), (8, 256, 12), (13, 0, 30)]
    assert attend.waves(12, 256) > attend.waves(98, 256) == 1, "a tail by itself is split"
    _, batch = shapes.batches(rows, DEVICE, generator, 64)
    batch = pad_batch(replace(batch, slot_R=torch.tensor([2, 0, 3])), len(batch.ids_T) + 2)
    got, want = (model.forward(batch, own)[:-2] for model, own in zip(models, planes, strict=True))
    assert torch.equal(got, want), f"{kv}: {float((got - want).abs().max())}"
    for layer in range(facts.layers):
        stored, plain = (own.paged("latent", layer)[1:] for own in planes)
        assert torch.equal(stored, plain), f"{kv}: latents of layer {layer}"


def main() -> int:
    prepare()
    exact_casts()
    for query, entries, dtype in ((1, 2 * K, torch.float32), (1, K, torch.bfloat16), (3, 4 * K, torch.float32)):
        state_of_both(query, entries, 0, dtype)
    if sys.argv[1:] != ["few"]:
        beside_the_device("")
        prefix_hits("")
    beside_the_device("fp8_ds_mla")
    prefix_hits("fp8_ds_mla")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
