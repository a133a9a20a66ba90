"""Where a decode step's time goes, kernel by kernel: `python benchmarks/gpu/kernel_budget.py MODEL_FOLDER ROWS...`,
and `... table FILE...` for its results in Markdown.

Runs the real engine with random weights (recorded steps, depth 2) under torch.profiler at a context of about 1,024 tokens, and writes
$OUT/kernel_budget_<model>_<rows>.json (OUT: the current folder if unset) for each number of rows. Kernels of one step are told from those of
the next by the period of their names, a layer's likewise. Of each kernel: `us`, how long it was on the device, waiting for its predecessor
included; `adds`, how much later its end was than all ends before, so that the adds of a step are its time; and the floor: the bytes that it
must read or write over the read bandwidth of the same run. Medians over steps, and for a layer over the layers. Copies and memsets are kernels here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import triton
from moe import ceilings
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from thalweg.bench.in_process import random_batch, room_for, start, time_batch
from thalweg.config.options import Config
from thalweg.config.tree import replace
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.experts import triton as experts
from thalweg.kernels.router import triton as routing

CONTEXT, STEPS, PROFILED = 1024, 48, 24
# what multiplies by a weight of a layer, in the order in which a layer does
PRODUCT = re.compile(r"_thin|_linear|_stream|nvjet|gemm|cutlass|_matmul", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """One kernel on the device, in µs."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Line:
    """One place of a step, over steps. adds: see above."""

    name: str
    us: float
    adds: float


def short(name: str) -> str:
    """A name without templates and namespaces."""
    return re.sub(r"^void |<.*|\(.*", "", name).split("::")[-1][:60]


def record(engine: Any, prompts: list[list[int]]) -> list[Seen]:
    """Kernels of the last PROFILED decode steps."""
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True))
    made = 0
    while made < STEPS - PROFILED:
        made += bool(engine.step())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        while not engine.idle:
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    seen = [Seen(short(e.name), e.time_range.start, e.time_range.end) for e in events]
    return sorted(seen, key=lambda one: one.begin)


def period(names: Sequence[str], least: int, share: float) -> int:
    """The smallest distance at which names repeat, but for 1 - share of them. 0: there is none."""
    for distance in range(least, len(names) // 3):
        same = sum(a == b for a, b in zip(names, names[distance:], strict=False))
        if same >= share * (len(names) - distance):
            return distance
    return 0


def steps(seen: list[Seen]) -> list[list[Seen]]:
    """One list a step, all of the same names, each beginning behind the step's longest pause."""
    size = period([one.name for one in seen], 20, 0.99)
    if not size:
        raise ValueError(f"{len(seen)} kernels have no period: were the steps recorded?")
    pauses = [
        median(seen[i].begin - max(one.end for one in seen[max(0, i - 4) : i]) for i in range(first, len(seen), size))
        for first in range(size, 2 * size)
    ]
    first = size + pauses.index(max(pauses))
    cut = [seen[i : i + size] for i in range(first, len(seen) - size + 1, size)]
    names = [one.name for one in cut[len(cut) // 2]]
    return [each for each in cut if [one.name for one in each] == names]


def lines(cut: list[list[Seen]]) -> list[Line]:
    """Each place of a step, medians over steps."""
    adds: list[list[float]] = []
    for each in cut:
        latest, mine = each[0].begin, []
        for one in each:
            mine.append(max(0.0, one.end - latest))
            latest = max(latest, one.end)
        adds.append(mine)
    return [
        Line(one.name, median(each[i].end - each[i].begin for each in cut), median(mine[i] for mine in adds))
        for i, one in enumerate(cut[0])
    ]


def layers(names: Sequence[str], count: int) -> tuple[int, int, int]:
    """Where the equal layers begin, kernels of one, and how many there are."""
    found = (0, 0, 0)
    for size in range(3, len(names) // 2):
        begin = 0
        while begin < len(names) - size:
            end = begin
            while end < len(names) - size and names[end] == names[end + size]:
                end += 1
            times = (end - begin) // size + 1
            if times > 2 and times <= count and times * size > found[1] * found[2]:
                found = (begin, size, times)
            begin = max(end, begin + 1)
    return found


def weights(
    config: dict[str, Any], rows: int, covered: float
) -> tuple[list[tuple[str, float]], dict[str, tuple[str, float]]]:
    """(what, bytes) of a layer's products in their order, and of kernels by name. covered: experts that are read, with the shared ones."""
    wide = 1 if config.get("quantization_config") else 2
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        dim, kv = config.get("head_dim", hidden // heads), config["num_key_value_heads"]
        inner = config["intermediate_size"]
        return [
            ("query, key and value projection", (heads + 2 * kv) * dim * hidden * wide),
            ("output projection", heads * dim * hidden * wide),
            ("gate and up projection", 2 * inner * hidden * wide),
            ("down projection", inner * hidden * wide),
        ], {"_decode": ("attention", rows * CONTEXT * 2 * kv * dim * 2)}
    rank, nope, rope, v = (
        config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    lora, inner = config.get("q_lora_rank"), config["moe_intermediate_size"]
    query = heads * (nope + rope)
    down = ((lora or query) + rank + rope) * hidden * wide
    products = [("query and latent projection", down), ("output projection", heads * v * hidden * wide)]
    if lora:
        products.insert(1, ("query up projection", lora * query * wide))
    expert = hidden * inner * wide
    columns = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
    gate = config["n_routed_experts"] * hidden * 2
    return products, {
        "_mla_absorb": ("queries into latent space, latent stored", heads * nope * rank * 2),
        "_decode": ("attention on latents", rows * CONTEXT * (rank + rope) * 2),
        "_merge_up": ("parts merged, out of latent space", heads * v * rank * 2),
        "_logits": ("router logits", gate),
        "_choose": ("choice of experts", 0.0),
        "_up_pairs": ("gate and up of the experts", 2 * covered * expert),
        "_up": ("gate and up of the experts", 2 * covered * expert),
        "_down_tokens": ("down of the experts", covered * expert),
        "_down": ("down of the experts", covered * expert),
        "_combine": ("experts' rows added up", rows * columns * hidden * 2),
    }


def keep_choices() -> list[Tensor]:
    """Has every recorded router keep the experts that it chose, in memory that nothing else uses: what the last step chose can then be read."""
    kept: list[Tensor] = []
    route = routing.route

    def keeping(*given: Any, **more: Any) -> routing.Routed:
        routed = route(*given, **more)
        if torch.cuda.is_current_stream_capturing():
            kept.append(routed.ids_TK)
        return routed

    routing.route = keeping
    return kept


def coverage(config: dict[str, Any], rows: int, kept: list[Tensor]) -> float:
    """Experts that a layer read in the last step, the shared ones with them: the mean over layers; 0 without experts."""
    mine = [int(experts.coverage(ids, config["n_routed_experts"])) for ids in kept if len(ids) == rows]
    return sum(mine) / len(mine) + (config.get("n_shared_experts") or 0) if mine else 0.0


def named(layer: list[Line], config: dict[str, Any], rows: int, covered: float, read: float) -> list[dict[str, Any]]:
    """The layer's kernels with what they do and their floor."""
    products, others = weights(config, rows, covered)
    table, left = [], list(products)
    for one in layer:
        what, size = "", 0.0
        if one.name in others:
            what, size = others[one.name]
        elif PRODUCT.search(one.name) and left:
            what, size = left.pop(0)
        floor = size / read * 1e6
        table.append({"kernel": one.name, "what": what, "us": one.us, "adds": one.adds, "floor": floor})
    return table


def budget(
    engine: Any, prompts: list[list[int]], config: dict[str, Any], read: float, kept: list[Tensor]
) -> dict[str, Any]:
    rows = len(prompts)
    time_batch(engine, prompts, 4)
    alone = [time_batch(engine, [p[::-1] for p in prompts], STEPS).decode for _ in range(2)][1]
    cut = steps(record(engine, [p[1:] + p[:1] for p in prompts]))
    whole = lines(cut)
    begin, size, times = layers([one.name for one in whole], config["num_hidden_layers"])
    equal = [whole[begin + i * size : begin + (i + 1) * size] for i in range(times)]
    middle = [
        Line(equal[0][i].name, median(e[i].us for e in equal), median(e[i].adds for e in equal)) for i in range(size)
    ]
    outside = whole[:begin] + whole[begin + times * size :]
    covered = coverage(config, rows, kept)
    pauses = [b[0].begin - max(one.end for one in a) for a, b in zip(cut, cut[1:], strict=False)]
    return {
        "rows": rows, "context": CONTEXT, "step_ms": median(alone) * 1e3, "kernels_a_step": len(whole), "kernels_a_layer": size,
        "equal_layers": times, "steps_seen": len(cut), "pause_between_steps_us": median(pauses) if pauses else None,
        "experts_read": covered, "layer_us": sum(one.adds for one in middle), "layer": named(middle, config, rows, covered, read),
        "outside": [{"kernel": one.name, "us": one.us, "adds": one.adds} for one in outside],
    }  # fmt: skip


def show(name: str, told: dict[str, Any]) -> None:
    print(
        f"## {name} rows {told['rows']}: step {told['step_ms']:.3f} ms, {told['kernels_a_step']} kernels, {told['kernels_a_layer']} a layer "
        f"x {told['equal_layers']}, layer {told['layer_us']:.1f} us, pause {told['pause_between_steps_us']}, experts {told['experts_read']:.1f}",
        flush=True,
    )
    for one in told["layer"]:
        print(
            f"  {one['adds']:8.2f} adds {one['us']:8.2f} us {one['floor']:7.2f} floor  {one['kernel']:34s} {one['what']}"
        )
    for one in sorted(told["outside"], key=lambda one: -one["adds"])[:14]:
        print(f"  {one['adds']:8.2f} adds {one['us']:8.2f} us outside  {one['kernel']}")


def table(paths: Sequence[str]) -> None:
    """Prints results as docs/kernels.md has them."""
    for path in paths:
        told = json.loads(Path(path).read_text())
        name = Path(path).stem.removeprefix("kernel_budget_").rpartition("_")[0]
        covered = f", {told['experts_read']:.1f} experts read a layer" if told["experts_read"] else ""
        print(f"**{name}, batch {told['rows']}**: {told['step_ms']:.2f} ms a step{covered}\n")
        print("| kernel | does | adds µs | floor µs |\n| --- | --- | --- | --- |")
        for one in told["layer"]:
            floor = f"{one['floor']:.1f}" if one["floor"] else "–"
            print(f"| `{one['kernel']}` | {one['what']} | {one['adds']:.1f} | {floor} |")
        floors = sum(one["floor"] for one in told["layer"])
        print(f"| {told['kernels_a_layer']} kernels | a layer | {told['layer_us']:.1f} | {floors:.1f} |")
        rest = sum(one["adds"] for one in told["outside"])
        count = told["kernels_a_step"] - told["kernels_a_layer"] * told["equal_layers"]
        print(f"| {count} kernels | outside the {told['equal_layers']} equal layers | {rest:.0f} | |\n")


def main() -> None:
    if sys.argv[1] == "table":
        return table(sys.argv[2:])
    folder, rows = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]] or [1]
    config = json.loads((folder / "config.json").read_text())
    top = ceilings()
    kept = keep_choices()
    wish = replace(
        Config(), model=str(folder), load_format="dummy", context_length=4096, cuda_graph_bs=tuple(rows), warmup=False,
        cuda_graph_mode="full_decode_only", chunked_prefill_size=8192,
    )  # fmt: skip
    resolved, engine = start(room_for(wish, max(rows), CONTEXT, STEPS))
    for count in rows:
        try:
            told = budget(engine, random_batch(resolved, count, CONTEXT, Random(count)), config, top["read"], kept)
        except (RuntimeError, ValueError) as failure:
            print(f"{folder.name} rows {count}: FAILED {failure!r}", flush=True)
            continue
        show(folder.name, told)
        told |= {
            "command": f"python benchmarks/gpu/kernel_budget.py {folder.name} {count}", "device": torch.cuda.get_device_name(),
            "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda, "ceilings": top,
        }  # fmt: skip
        path = Path(os.environ.get("OUT", "."), f"kernel_budget_{folder.name}_{count}.json")
        path.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
