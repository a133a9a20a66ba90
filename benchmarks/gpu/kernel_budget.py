"""Where a decode step's time goes, kernel by kernel: `python benchmarks/gpu/kernel_budget.py MODEL_FOLDER ROWS...`;
`... again TRACE...` computes the same from what a run has kept, and `... table FILE...` prints results in Markdown.

Runs the real engine with random weights (recorded steps, depth 2) under torch.profiler at a context of about 1,024
tokens (CONTEXT in the environment: another number), and writes $OUT/kernel_budget_<model>_<rows>.json (OUT: the current
folder if unset) for each number of rows, beside a trace of all that it saw. Of each kernel: `us`, how long it was on
the device, waiting for its predecessor included; `adds`, how much later its end was than all ends before, so that the
adds of a step are its time; and the floor: the bytes that it must read or write over the read bandwidth of the same
run, or its products at the rate of that run, whichever takes longer. Medians over steps, and for a layer over the
layers. Copies and memsets are kernels here.

All kernels of one replay of a graph have its correlation number. A step is everything that was launched from one replay
of the graph with most kernels to the next; a layer is what repeats in it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import version
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from thalweg.bench import ceilings, coverage
from thalweg.bench.in_process import random_batch, reserve, start, time_batch
from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import ThalwegError
from thalweg.core.sampling import SamplingParams
from thalweg.launch.planning.roofline import Ceilings

CONTEXT, STEPS, PROFILED = int(os.environ.get("CONTEXT", 1024)), 48, 24
LENGTH = max(4096, 2 * CONTEXT)  # of the longest sequence: what attention is split for
RAISED, INDEX_WEIGHTS = "_up of attention", "_logits of the indexer"
GRAPH = 20  # kernels that no launch but a graph's has
# what multiplies by a weight of a layer, in the order in which a layer does
PRODUCT = re.compile(r"_gemv|_linear|_matmul|_small_batch_gemm|_split_k_gemm|nvjet|gemm|cutlass", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """One kernel on the device, in µs. launch: number of the call that launched it, with all others of a graph."""

    name: str
    begin: float
    end: float
    launch: int
    stream: int


@dataclass(frozen=True)
class Line:
    """One place of a step, over steps. adds: see above."""

    name: str
    us: float
    adds: float


class Work(NamedTuple):
    """What a kernel is there for, the bytes that it must read or write, and its FLOPs."""

    what: str
    bytes: float = 0.0
    flops: float = 0.0


def short(name: str) -> str:
    """A name without templates and namespaces."""
    return re.sub(r"^void |<.*|\(.*", "", name).split("::")[-1][:60] or name[:60]


def steps(seen: Sequence[Seen]) -> list[list[Seen]]:
    """One list a step, all of the same names. Raises ValueError where no graph was replayed three times."""
    order = sorted(seen, key=attrgetter("launch", "begin"))
    launches = [list(each) for _, each in groupby(order, attrgetter("launch"))]
    forms = Counter(names(each) for each in launches if len(each) >= GRAPH)
    repeated = [form for form, times in forms.items() if times >= 3]
    if not repeated:
        raise ValueError(
            f"{len(seen)} kernels in {len(launches)} launches, but no graph that repeats: were the steps recorded?"
        )
    first, cut = max(repeated, key=len), list[list[Seen]]()
    for each in launches:
        if names(each) == first:
            cut.append([])
        if cut:
            cut[-1] += each
    whole = cut[:-1]  # the last may have been cut off
    common = Counter(names(each) for each in whole).most_common(1)[0][0]
    return [each for each in whole if names(each) == common]


def names(kernels: Sequence[Seen | Line]) -> tuple[str, ...]:
    return tuple(one.name for one in kernels)


def lines(cut: Sequence[Sequence[Seen]]) -> list[Line]:
    """Each place of a step, medians over steps. What runs beside it on another stream adds nothing."""
    adds: list[list[float]] = []
    for each in cut:
        latest, mine = each[0].begin, []
        for one in each:
            beside = one.stream != each[0].stream
            mine.append(0.0 if beside else max(0.0, one.end - latest))
            latest = latest if beside else max(latest, one.end)
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


def works(
    config: dict[str, Any], rows: int, covered: float, kernels: Sequence[str]
) -> tuple[list[Work], dict[str, Work]]:
    """A layer's products in their order, and its other kernels by name. covered: experts that are read, with the shared
    ones.
    """
    wide = 1 if config.get("quantization_config") else 2
    hidden, heads = config["hidden_size"], config["num_attention_heads"]

    def product(what: str, weights: int, bytes_each: int = wide) -> Work:
        return Work(what, weights * bytes_each, 2.0 * rows * weights)

    others = {
        "_rms_norm": Work("norm"), "_silu_mul": Work("silu(gate) · up"), "_quantize": Work("e4m3 codes"),
        "_rms_norm_quantize": Work("norm, e4m3 codes"), "_add_partials": Work("the product's parts added up"),
        "splitKreduce_kernel": Work("the product's parts added up"), "Memset ": Work("room for the product's parts"),
        "vectorized_elementwise_kernel": Work("an ordinary launch, which a library's kernel can stand behind"),
    }  # fmt: skip
    if "kv_lora_rank" not in config:
        dim, kv = config.get("head_dim", hidden // heads), config["num_key_value_heads"]
        inner = config["intermediate_size"]
        seen = rows * CONTEXT * dim
        return [
            product("query, key and value projection", (heads + 2 * kv) * dim * hidden),
            product("output projection", heads * dim * hidden),
            product("gate and up projection", 2 * inner * hidden),
            product("down projection", inner * hidden),
        ], others | {
            "_decode": Work("rotated and stored, attention", seen * 2 * kv * 2, 4.0 * seen * heads),
            "_merge": Work("parts merged"),
        }  # fmt: skip
    rank, nope, rope, v = (
        config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    lora, inner = config.get("q_lora_rank"), config["moe_intermediate_size"]
    query = heads * (nope + rope)
    into = product("queries into latent space", heads * nope * rank, 2)
    out_of = product("out of latent space", heads * v * rank, 2)
    index_heads, index_dim = (config.get(key, 0) for key in ("index_n_heads", "index_head_dim"))
    stored = next((i for i, name in enumerate(kernels) if name in ("_mla_absorb", "_mla_write")), 0)
    # four products before the KV is stored: two of them are the indexer's, in bfloat16
    has_own = sum(PRODUCT.search(name) is not None for name in kernels[:stored]) > 3
    own_key, own_queries = has_own * index_dim, has_own * index_heads * index_dim
    whole = (lora or query) + rank + rope + index_dim - own_key
    products = [product("query and latent projection", whole * hidden)]
    products += [product("index key", own_key * hidden, 2)] * has_own
    if lora:
        raising = query + index_heads * index_dim - own_queries
        products.append(product("query up projection", lora * raising))
        products += [product("index queries", own_queries * lora, 2)] * has_own
    if "_mla_absorb" not in kernels:
        products.append(into)
    raised = "_up" in kernels[: kernels.index("_choose")] if "_choose" in kernels else False
    if not (raised or {"_merge_up", "_merge_up_many"} & set(kernels)):
        products.append(out_of)
    products.append(product("output projection", heads * v * hidden))
    expert, columns = hidden * inner, config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
    up = Work("gate and up of the experts", 2 * covered * expert * wide, 4.0 * rows * columns * expert)
    down = Work("down of the experts", covered * expert * wide, 2.0 * rows * columns * expert)
    seen = rows * min(CONTEXT, config.get("index_topk", CONTEXT))
    attention = Work("attention on latents", seen * (rank + rope) * 2, 2.0 * seen * heads * (2 * rank + rope))
    scores = Work("index scores", rows * CONTEXT * (index_dim + 8), 2.0 * rows * CONTEXT * index_heads * index_dim)
    merged = Work("parts merged, out of latent space", out_of.bytes, out_of.flops)
    gate = Work(
        "router logits", config["n_routed_experts"] * hidden * 2, 2.0 * rows * config["n_routed_experts"] * hidden
    )
    return products, others | {
        "_write": Work("index key stored, index queries"), "_scores": scores, "sm90_fp8_paged_mqa_logits": scores,
        INDEX_WEIGHTS: Work("weights of the index heads", index_heads * hidden * 4, 2.0 * rows * index_heads * hidden),
        "_highest_of_groups": Work("highest scores of groups", rows * CONTEXT * 4),
        "_choose_or_bound": Work("choice of context, or a bound of it", rows * CONTEXT * 4),
        "_keep_above": Work("scores above the bound"), "_choose_among": Work("choice among these"),
        "_attend": Work("attention on records", seen * 656, attention.flops),
        "_mla_absorb": Work("latent normed, rotated, stored; queries into latent space", into.bytes, into.flops),
        "_mla_write": Work("latent normed, rotated, stored"),
        "_decode": attention, "flash_fwd_splitkv_mla_kernel": attention,
        "_merge": Work("parts merged"), "flash_fwd_mla_combine_kernel": Work("parts merged"),
        "_merge_up": merged, "_merge_up_many": merged, RAISED: out_of,
        "_logits": gate, "_logits_few": gate,
        "_choose": Work("choice of experts"), "_place": Work("pairs by expert"), "_count": Work("pairs counted"),
        "_up_pairs": up, "_up": up, "_down_tokens": down, "_down": down,
        "_combine": Work("experts' rows added up", rows * columns * hidden * 2),
    }  # fmt: skip


def budgeted(
    layer: Sequence[Line], config: dict[str, Any], rows: int, covered: float, top: Ceilings
) -> list[dict[str, Any]]:
    """The layer's kernels with what they do and their floor in µs. What is called `_up` ahead of the router is
    attention's, and `_logits` ahead of the index keys the indexer's.
    """
    products, others = works(config, rows, covered, names(layer))
    rate = top.fp8 if config.get("quantization_config") else top.bf16
    told, left = [], list(products)
    router, keys = (next((i for i, one in enumerate(layer) if one.name == name), 0) for name in ("_choose", "_write"))
    for i, one in enumerate(layer):
        name = RAISED if one.name == "_up" and i < router else one.name
        work = others.get(INDEX_WEIGHTS if name.startswith("_logits") and i < keys else name, Work(""))
        if one.name not in others and PRODUCT.search(one.name) and left:
            work = left.pop(0)
        floor = 1e6 * max(work.bytes / top.read, work.flops / rate)
        told.append(
            {
                "kernel": one.name, "what": work.what, "us": one.us, "adds": one.adds, "floor": floor,
                "mb": work.bytes / 1e6, "gflop": work.flops / 1e9,
            }
        )  # fmt: skip
    return told


def record(engine: Any, prompts: list[list[int]]) -> list[Seen]:
    """Kernels of the last PROFILED decode steps."""
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True))
    made = 0
    while made < STEPS - PROFILED:
        made += bool(engine.step())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        while not engine.idle:
            engine.step()
        torch.cuda.synchronize()
    return [
        Seen(short(e.name), e.time_range.start, e.time_range.end, e.id, e.device_resource_id)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]


def budget(seen: Sequence[Seen], known: dict[str, Any]) -> dict[str, Any]:
    """The result: `known` with what the kernels show. known: model, rows, step_ms, experts_read, config, ceilings and
    what else is to be kept.
    """
    cut = steps(seen)
    whole = lines(cut)
    config, rows, covered = known["config"], known["rows"], known["experts_read"]
    begin, size, times = layers(names(whole), config["num_hidden_layers"])
    equal = [whole[begin + i * size : begin + (i + 1) * size] for i in range(times)]
    middle = [
        Line(equal[0][i].name, median(e[i].us for e in equal), median(e[i].adds for e in equal)) for i in range(size)
    ]
    outside = whole[:begin] + whole[begin + times * size :]
    pauses = [b[0].begin - _end(a) for a, b in zip(cut, cut[1:], strict=False)]
    return {name: value for name, value in known.items() if name != "config"} | {
        "kernels_a_step": len(whole), "kernels_a_layer": size, "equal_layers": times, "steps_seen": len(cut),
        "pause_between_steps_us": median(pauses) if pauses else None, "layer_us": sum(one.adds for one in middle),
        "layer": budgeted(middle, config, rows, covered, Ceilings(**known["ceilings"])),
        "outside": [asdict(one) for one in outside],
    }  # fmt: skip


def _end(step: Sequence[Seen]) -> float:
    """Of all that a step waits for."""
    return max(one.end for one in step if one.stream == step[0].stream)


def measure(engine: Any, prompts: list[list[int]], known: dict[str, Any]) -> dict[str, Any]:
    """Times a batch, writes down its kernels and what they add up to. Raises ValueError where the steps cannot be told
    apart.
    """
    time_batch(engine, prompts, 4)  # what it leaves in the prefix cache lets all rows begin to decode at once
    alone = time_batch(engine, prompts, STEPS).decode
    seen = record(engine, prompts)
    experts = coverage.of_decode(engine, prompts)
    shared = known["config"].get("n_shared_experts") or 0
    known |= {
        "rows": len(prompts), "context": CONTEXT, "step_ms": median(alone) * 1e3,
        "experts_read": sum(experts) / len(experts) + shared if experts else 0.0,
    }  # fmt: skip
    kept = Path(os.environ.get("OUT", "."), f"trace_{known['model']}_{known['rows']}.json.gz")
    kept.write_bytes(gzip.compress(json.dumps({"known": known, "seen": [astuple(one) for one in seen]}).encode()))
    return budget(seen, known)


def save(told: dict[str, Any]) -> None:
    path = Path(os.environ.get("OUT", "."), f"kernel_budget_{told['model']}_{told['rows']}.json")
    path.write_text(json.dumps(told, indent=1) + "\n")


def show(told: dict[str, Any]) -> None:
    print(
        f"## {told['model']} rows {told['rows']}: step {told['step_ms']:.3f} ms, {told['kernels_a_step']} kernels,"
        f" {told['kernels_a_layer']} a layer x {told['equal_layers']}, layer {told['layer_us']:.1f} us, pause"
        f" {told['pause_between_steps_us']}, experts {told['experts_read']:.1f}",
        flush=True,
    )
    for one in told["layer"]:
        print(
            f"  {one['adds']:8.2f} adds {one['us']:8.2f} us {one['floor']:7.2f} floor  {one['kernel']:34s}"
            f" {one['what']}"
        )
    for one in sorted(told["outside"], key=lambda one: -one["adds"])[:14]:
        print(f"  {one['adds']:8.2f} adds {one['us']:8.2f} us outside  {one['name']}")


def table(paths: Sequence[str]) -> None:
    """Prints results as docs/kernels.md has them."""
    for path in paths:
        told = json.loads(Path(path).read_text())
        covered = f", {told['experts_read']:.1f} experts read a layer" if told["experts_read"] else ""
        print(f"**{told['model']}, batch {told['rows']}**: {told['step_ms']:.2f} ms a step{covered}\n")
        print("| kernel | does | MB | floor µs | adds µs |\n| --- | --- | --- | --- | --- |")
        for one in told["layer"]:
            size, floor = (f"{one[key]:.1f}" if one[key] >= 0.05 else "–" for key in ("mb", "floor"))
            print(f"| `{one['kernel']}` | {one['what']} | {size} | {floor} | {one['adds']:.1f} |")
        floors, size = (sum(one[key] for one in told["layer"]) for key in ("floor", "mb"))
        print(f"| {told['kernels_a_layer']} kernels | a layer | {size:.1f} | {floors:.1f} | {told['layer_us']:.1f} |")
        rest = sum(one["adds"] for one in told["outside"])
        count = told["kernels_a_step"] - told["kernels_a_layer"] * told["equal_layers"]
        print(f"| {count} kernels | outside the {told['equal_layers']} equal layers | | | {rest:.0f} |\n")


def again(paths: Sequence[str]) -> None:
    """Computes the results of kept traces."""
    for path in paths:
        kept = json.loads(gzip.decompress(Path(path).read_bytes()))
        told = budget([Seen(*one) for one in kept["seen"]], kept["known"])
        show(told)
        save(told)


def run(folder: Path, rows: Sequence[int]) -> None:
    config = json.loads((folder / "config.json").read_text())
    top = asdict(ceilings.measure())
    pages = 2 * max(rows) * (CONTEXT + STEPS + 128)
    wish = replace(
        Options(), model=str(folder), load_format="dummy", context_length=LENGTH, cuda_graph_bs=tuple(rows),
        warmup=False, cuda_graph_mode="full_decode_only", chunked_prefill_size=8192,
        max_total_tokens=max(LENGTH, pages), kv_cache_dtype="fp8_ds_mla" if "index_topk" in config else None,
    )  # fmt: skip
    resolved, engine = start(reserve(wish, max(rows), CONTEXT, STEPS))
    for count in rows:
        known = {
            "model": folder.name, "command": f"python benchmarks/gpu/kernel_budget.py {folder.name} {count}",
            "config": config, "ceilings": top, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": version("triton"), "cuda": torch.version.cuda,
        }  # fmt: skip
        try:
            told = measure(engine, random_batch(resolved, count, CONTEXT, Random(count)), known)
        except (RuntimeError, ValueError, ThalwegError) as failure:
            print(f"{folder.name} rows {count}: FAILED {failure!r}", flush=True)
            continue
        show(told)
        save(told)


def main() -> None:
    if sys.argv[1] in ("table", "again"):
        return {"table": table, "again": again}[sys.argv[1]](sys.argv[2:])
    run(Path(sys.argv[1]), [int(text) for text in sys.argv[2:]] or [1])


if __name__ == "__main__":
    main()
