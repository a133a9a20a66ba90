"""Speculation on one GPU: what steps with drafts take, what of them is overhead, whether a long generation stays what
it should be, and how many drafts of a trained head are accepted.

    python benchmarks/gpu/speculation.py plan
    python benchmarks/gpu/speculation.py PART ... --models FOLDER --out FOLDER [--again]

Each part starts one engine and writes one JSON when it is done; one that is there is left alone (--again: measured
anew). `plan` lists them with the seconds that they take on an H100. FOLDER has deepseek-v3-slim,
deepseek-v32-slim, deepseek-v2-lite and qwen2.5-7b, of which config.json and the tokenizer are enough: weights are
random. So no draft would be right, and as many are accepted by simulation as make 2.5 tokens of each verification on
average, 2 with one draft. EAGLE-3 heads have the published shape, and random weights, too.

v3-slim, v2-lite, qwen: chains of 0 to 4 drafts, 1 to 128 requests of 1,024 tokens; of one request also how long the
    forwards take by themselves, and what else there is in a step. For v3-slim as many drafts as the engine chooses,
    too. NAME-tree: trees of 16 nodes with the root, 4 deep, and in the same engine smaller ones, no drafts, and as many
    as it chooses. NAME-32k: 1 to 32 requests of 32,768 tokens, of v32-slim, too. long, long-v32: 32,768 tokens of
    v3-slim and of v32-slim, in verifications of drafts of their next-token layer; see recompute.py. Ends with 1 where
    it is not fine. v32-slim has three layers and bfloat16 weights for it: products of few tokens round FP8 weights
    otherwise than those of a prompt, after which an indexer chooses otherwise, and that is larger than what is looked
    for. head: trains an EAGLE-3 head for the bundled model, with the corpus that --corpus names, for
    --minutes. accepted: how many of its drafts are right on held-out items, as chains and as a tree; on the CPU, whose
    tokens are exactly plain decoding's.

To try a part on a CPU: --model models/tiny --batches 1 2 --input 60 --output 24.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import recompute
import torch
from step_parts import add_overhead

from thalweg.bench import acceptance
from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.draft_shapes import ADAPTIVE, DraftShape, Row, resolved_for, started
from thalweg.bench.in_process import Lengths, configuration, reserve
from thalweg.bench.results import provenance, write
from thalweg.bench.speculation import DecodeCase, label, rows_of
from thalweg.config.options import Options
from thalweg.config.tree import options_of
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine

ACCEPTED = 2.5  # tokens of a verification
SEED = 1
CHAINS, TREE, TREES_OF_ALL = (
    (0, 1, 2, 3, 4),
    DraftShape(4, 4, 15, (0, 15)),
    DraftShape(4, 4, 15, (0, 1, 3, 7, 15, ADAPTIVE)),
)
BATCHES = (
    (1, 256),
    (2, 256),
    (4, 256),
    (8, 256),
    (16, 192),
    (32, 192),
    (128, 128),
)  # requests, and tokens that each writes
LONG_BATCHES = ((1, 256), (2, 192), (4, 192), (8, 128), (16, 96), (32, 96))  # 128 would take more than there is
BUDGET = 8192  # tokens of a step: what 128 cached prompts have left
ROWS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    256,
)  # recorded: those of all that a server would record which are used here
FEW_ROWS = (1, 2, 4, 8, 16, 32, 128, 256)
TOKENS = (128, 256, 384, 512, 640, 1024, 2048)
DRAFTED = 32000  # tokens that a published EAGLE-3 head has
GENERATED, PROMPT = 32768, 64
WIDTHS, TREES = "1 3 5", "4x5x15"  # of the trained head


@dataclass(frozen=True)
class Part:
    """seconds: on an H100. shape: what drafts, None for a part that times nothing. eagle: whether an EAGLE-3 head
    drafts, else the model's own next-token layer.
    """

    seconds: int
    what: str
    model: str = ""
    shape: DraftShape | None = None
    eagle: bool = False
    input: int = 1024
    batches: tuple[tuple[int, int], ...] = BATCHES
    changes: tuple[tuple[str, Any], ...] = ()  # of config.json


def chains(*widths: int) -> DraftShape:
    return DraftShape(1, max(widths), max(widths), widths)


THREE_IN_BF16 = ("num_hidden_layers", 3), ("quantization_config", None)
V3, V32, V2, QWEN = "deepseek-v3-slim", "deepseek-v32-slim", "deepseek-v2-lite", "qwen2.5-7b"
PARTS = {
    "v3-slim": Part(80, "chains, 1k", V3, chains(*CHAINS, ADAPTIVE)),
    "v3-slim-tree": Part(90, "trees, 1k", V3, TREES_OF_ALL),
    "v3-slim-32k": Part(120, "chains, 32k", V3, chains(*CHAINS), input=32768, batches=LONG_BATCHES),
    "v3-slim-32k-tree": Part(90, "trees, 32k", V3, TREE, input=32768, batches=LONG_BATCHES),
    "v32-slim-32k": Part(130, "chains, 32k", V32, chains(*CHAINS), input=32768, batches=LONG_BATCHES),
    "v32-slim-32k-tree": Part(100, "trees, 32k", V32, TREE, input=32768, batches=LONG_BATCHES),
    "v2-lite": Part(80, "chains, 1k, EAGLE-3", V2, chains(*CHAINS), eagle=True),
    "v2-lite-tree": Part(90, "trees, 1k, EAGLE-3", V2, TREES_OF_ALL, eagle=True),
    "v2-lite-32k": Part(120, "chains, 32k, EAGLE-3", V2, chains(*CHAINS), True, 32768, LONG_BATCHES),
    "v2-lite-32k-tree": Part(90, "trees, 32k, EAGLE-3", V2, TREE, True, 32768, LONG_BATCHES),
    "qwen": Part(80, "chains, 1k, EAGLE-3", QWEN, chains(*CHAINS), eagle=True),
    "qwen-tree": Part(90, "trees, 1k, EAGLE-3", QWEN, TREES_OF_ALL, eagle=True),
    "long": Part(80, f"{GENERATED:,} tokens", V3, chains(3)),
    "long-v32": Part(90, f"{GENERATED:,} tokens, 3 layers, bf16", V32, chains(3), changes=THREE_IN_BF16),
    "head": Part(200, "trains an EAGLE-3 head"),
    "accepted": Part(0, "its accepted drafts (a minute or two on a CPU)"),
}


def path_of(out: Path, name: str) -> Path:
    """Where a part's result goes."""
    return out / f"speculation_{name.replace('-', '_')}.json"


@contextmanager
def head_of(model: Path) -> Iterator[Path]:
    """A folder that describes an EAGLE-3 head of the published shape: one layer as wide as the target's, with its
    number of heads.
    """
    target = json.loads((model / "config.json").read_text())
    heads = target["num_attention_heads"]
    latent = "kv_lora_rank" in target  # a head keeps keys and values of each of its heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else target["num_key_value_heads"],
        "head_dim": target["v_head_dim"] if latent else target["hidden_size"] // heads,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": min(DRAFTED, target["vocab_size"] // 2),
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder, "eagle3-head")
        head.mkdir()
        (head / "config.json").write_text(json.dumps(config))
        yield head


@contextmanager
def model_of(part: Part, said: argparse.Namespace) -> Iterator[Path]:
    """The folder of the part's model, or one with its tokenizer and changes of its config.json."""
    model = said.model or said.models / part.model
    if said.model or not part.changes:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, part.model)
        shutil.copytree(model, changed)
        config = json.loads((changed / "config.json").read_text()) | dict(part.changes)
        (changed / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
        yield changed


def cases_of(part: Part, said: argparse.Namespace) -> list[DecodeCase]:
    """What the part measures, or the little that was asked for."""
    batches = [(many, said.output) for many in said.batches] if said.batches else part.batches
    return [DecodeCase(many, said.input or part.input, output or 24, SEED) for many, output in batches]


def config_for(part: Part, said: argparse.Namespace, cases: Sequence[DecodeCase], head: Path | None) -> Options:
    """A server's, but for graphs and rooms that nothing here would use. head: the drafter's folder."""
    assert part.shape is not None, "what is timed drafts"
    batch, longest = max(case.batch for case in cases), max(case.input + case.output for case in cases)
    wishes: dict[str, Any] = {"model": str(said.model or said.models / part.model), "load_format": said.load_format}
    wishes["speculative_simulate_accept_length"] = ACCEPTED
    wishes |= {"warmup": False, "max_running_requests": batch, "chunked_prefill_size": BUDGET}
    wishes |= {"speculative_draft_model_path": str(head)} if head else {"speculative_algorithm": "NEXTN"}
    if not said.input:
        context = max(4096, -(-(longest + 2 * PAGE) // PAGE) * PAGE)
        wishes["context_length"] = context
        if part.batches is LONG_BATCHES:  # not twice, as for short prompts: what was written before may leave the cache
            wishes["max_total_tokens"] = (batch + 1) * context
    if torch.cuda.is_available():
        rows = ROWS if part.shape.branches == 1 else FEW_ROWS
        most = batch * (1 + (part.shape.deepest if part.shape.branches == 1 else 1))
        wishes["cuda_graph_bs"] = tuple(one for one in rows if one <= most)
        wishes["piecewise_cuda_graph_tokens"] = TOKENS
    input = max(case.input for case in cases)
    return reserve(options_of(**wishes), batch, input, longest - input + 2 * PAGE)


def speed(name: str, part: Part, said: argparse.Namespace) -> int:
    """Times the part's steps; what there is is written when it ends early."""
    assert part.shape is not None, "what is timed drafts"
    cases, model, rows = cases_of(part, said), said.model or said.models / part.model, list[Row]()
    told: dict[str, Any] = {"model": part.model, "accept_length": ACCEPTED, "partial": True}
    with head_of(model) as head:
        begun = time.perf_counter()
        try:
            config = config_for(part, said, cases, head if part.eagle else None)
            resolved, engine = started(part.shape, config)
            Lengths(max(case.input for case in cases), max(case.output for case in cases)).check(engine.context)
            told |= about(name, configuration(resolved)) | {"start_seconds": round(time.perf_counter() - begun, 1)}
            for row in rows_of(part.shape, resolved, engine, cases, said.repeat):
                rows.append(row)
                print(_line(row), flush=True)
            alone = [case for case in cases if case.batch == 1]
            add_overhead(part.shape, resolved, engine, alone, rows)
            told["drafter_failures"] = engine.loop.stats().drafter_failures
            told["partial"] = False
        finally:
            told["seconds"] = round(time.perf_counter() - begun, 1)
            if rows:
                write(path_of(said.out, name), {"speculation": rows, **told})
    for row in rows:
        if "overhead_seconds" in row:
            print(_line(row))
    print(
        f"{name}: started in {told['start_seconds']} s, {told['seconds']} s in all, failures {told['drafter_failures']}"
    )
    return int(told["drafter_failures"] > 0)


def _line(row: Row) -> str:
    parts = [f"{key.removesuffix('_seconds')} {1e6 * value:.0f} µs" for key, value in row.items()
             if key.endswith("_seconds") and isinstance(value, float)]  # fmt: skip
    ms, length, rate = (float(str(row[key])) for key in ("step_latency", "accept_length", "decode_throughput"))
    where = f"{label(row):>8} drafts, {row['batch_size']:>3} × {row['input_len']}"
    return f"{where}: {1e3 * ms:.3f} ms a step, {length:.2f} tokens, {rate:,.0f} tok/s {', '.join(parts)}"


def long(name: str, part: Part, said: argparse.Namespace) -> int:
    """Generates, and computes the same anew."""
    with model_of(part, said) as model:
        return _long(name, part, said, model)


def _long(name: str, part: Part, said: argparse.Namespace, model: Path) -> int:
    assert part.shape is not None, "what generates drafts"
    tokens = said.output or GENERATED
    chunk = max(min(BUDGET, tokens // 4 // PAGE * PAGE), 2 * PAGE)
    config = options_of(
        model=str(model),
        load_format=said.load_format,
        speculative_algorithm="NEXTN",
        speculative_simulate_accept_length=ACCEPTED,
        context_length=(tokens // PAGE + 4) * PAGE,
        max_total_tokens=(tokens // PAGE + 8) * PAGE,
        max_running_requests=1,
        chunked_prefill_size=chunk,
        warmup=False,
    )
    begun = time.perf_counter()
    resolved = resolved_for(part.shape, config)
    engine = LocalEngine(msgspec.structs.replace(resolved.engine, speculative_adaptive=False))
    ready = time.perf_counter()
    prompt = vocabulary_of(resolved.path).draw(Random(SEED), PROMPT)
    request = recompute.generated(engine, prompt, tokens, SEED)
    stats, written = engine.loop.stats(), time.perf_counter()
    found = recompute.check(engine, request, chunk)
    found |= {
        "steps": stats.steps,
        "accept_length": stats.acceptance.mean_length,
        "drafter_failures": stats.drafter_failures,
        "seconds": {"start": ready - begun, "generation": written - ready, "check": time.perf_counter() - written},
    }
    found["fine"] = found["fine"] and not stats.drafter_failures
    for one in found["parts"]:
        print(
            f"{one['name']:>8} {one['layer']:>3}: median {one['error_median']:.2e} (again {one['noise_median']:.2e},"
            f" bound {one['bound_median']:.2e}), 99 % {one['error_p99']:.2e} ({one['noise_p99']:.2e},"
            f" {one['bound_p99']:.2e}), most {one['error_max']:.2e}, others {one['others']}, broken {one['broken']},"
            f" fine {one['fine']}"
        )
    told = {key: value for key, value in found.items() if key != "parts"}
    print(f"{name}: {json.dumps(told)}", flush=True)
    write(path_of(said.out, name), {"model": part.model, "part": name, **found, **about(name, configuration(resolved))})
    return int(not found["fine"])


def head(name: str, part: Part, said: argparse.Namespace) -> int:
    """Trains."""
    target = said.model or Path("models/tiny")
    words = [sys.executable, "-m", "tools.train_tiny.eagle", "--corpus", str(said.corpus), "--target", str(target)]
    words += ["--out", str(said.head), "--minutes", str(said.minutes), *said.train.split(), "--widths"]
    return subprocess.run(words, check=False).returncode


def accepted(name: str, part: Part, said: argparse.Namespace) -> int:
    """Counts, and compares with plain decoding."""
    words = ["--model", str(said.model or "models/tiny"), "--speculative-draft-model-path", str(said.head)]
    words += ["--device", "cpu", "--threads", "1", "--items", str(said.items), "--widths", *WIDTHS.split()]
    words += ["--trees", TREES, "--result-filename", str(path_of(said.out, name))]
    status, path = acceptance.main(words), path_of(said.out, name)
    if path.is_file():
        write(path, json.loads(path.read_text()) | about("head accepted", {}))
    return status


def about(name: str, configured: dict[str, Any]) -> dict[str, object]:
    """What goes with every result. Folders of this machine are told by their names."""
    text = json.dumps(configured, default=str)
    for folder in (
        (configured["engine"][key] for key in ("model_path", "speculative_draft_model_path")) if configured else ()
    ):
        text = text.replace(folder, Path(folder).name) if folder else text
    return provenance("", [], json.loads(text)) | {
        "command": f"python benchmarks/gpu/speculation.py {name} --models FOLDER"
    }


OTHERS: dict[str, Callable[[str, Part, argparse.Namespace], int]] = {
    "long": long,
    "long-v32": long,
    "head": head,
    "accepted": accepted,
}


def done(path: Path) -> bool:
    """Whether a part's result is there, and whole."""
    return path.is_file() and not json.loads(path.read_text()).get("partial")


def plan() -> None:
    """Prints the parts."""
    for name, part in PARTS.items():
        print(f"{name:18} {part.seconds:4} s  {part.model or 'models/tiny'}: {part.what}")
    print(f"{'together':18} {sum(part.seconds for part in PARTS.values()):4} s")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="+", choices=("plan", *PARTS), metavar="PART", help=f"plan, {', '.join(PARTS)}")
    add("--models", type=Path, default=Path("shapes"), metavar="FOLDER", help="where the models are (default: shapes)")
    add("--out", type=Path, default=Path("."), metavar="FOLDER", help="where results go (default: here)")
    add("--again", action="store_true", help="measures parts whose results are there, too")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each; the fastest counts (default: 1)")
    add("--model", type=Path, metavar="FOLDER", help="another model than the part's")
    add("--load-format", default="dummy", help="auto: the model's own weights (default: dummy)")
    add("--batches", type=int, nargs="+", metavar="N", help="other numbers of requests than the part's")
    add("--input", type=int, metavar="N", help="tokens of a prompt, other than the part's")
    add("--output", type=int, metavar="N", help="tokens to write, other than the part's")
    add("--corpus", type=Path, default=Path("corpus"), metavar="FOLDER", help="of head (default: corpus)")
    add("--head", type=Path, default=Path("head"), metavar="FOLDER", help="that head writes (default: head)")
    add("--minutes", type=float, default=3.0, metavar="X", help="of training (default: 3)")
    add("--train", default="", metavar="WORDS", help="further words for tools.train_tiny.eagle")
    add("--items", type=int, default=24, metavar="N", help="held-out items of a task (default: 24)")
    said = parser.parse_args(argv)
    failed: list[str] = []
    for name in said.parts:
        if name == "plan":
            plan()
        elif done(path_of(said.out, name)) and not said.again:
            print(f"{name}: {path_of(said.out, name)} is there (--again measures it anew)")
        elif OTHERS.get(name, speed)(name, PARTS[name], said):
            failed.append(name)
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
