"""Trains the bundled model on one GPU, writes it as a published FP8 checkpoint and evaluates that checkpoint.

    python -m tools.train_tiny.train --corpus FOLDER --out models/tiny

The course follows DeepSeek-V3.2's: dense attention while the indexer learns its distribution (KL divergence), then
sparse attention over the indexer's choice, on which the indexer goes on learning; the NextN layer is trained all along,
on the text and on the main model's own distribution; experts are balanced by their bias alone. Towards the end the FP8
weights are rounded in the forward pass, so the model learns to live with the checkpoint's precision. Phases and
learning rate follow the clock, not the step number: the same command makes use of whatever GPU it finds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.checkpoint import load_model, parameter_count, save_model
from tools.train_tiny.corpus import Section, read_sections
from tools.train_tiny.data import MIX, Rows, Source, stream_rows
from tools.train_tiny.evaluate import evaluate, table
from tools.train_tiny.model import Attention, TinyModel
from tools.train_tiny.shape import Shape
from tools.train_tiny.tokenizer import save_tokenizer, train_tokenizer

LENGTH = 1536  # the longest conversations have 1,500 tokens
SPARSE_FROM, QUANTIZED_FROM = 0.4, 0.85  # share of the time
DROPOUT_ON_CORPUS = 0.3
INDEXER_ROWS = 64
BIAS_STEP = 1e-3
_STARTED = time.monotonic()


@dataclass(frozen=True)
class Plan:
    """What the command line chose."""

    corpus: Path
    out: Path
    minutes: float
    rows: int
    workers: int
    rate: float
    device: torch.device
    length: int
    init: Path | None
    start: float
    items: int
    reserve: float
    save_every: float
    seed: int

    @property
    def until(self) -> float:
        """The end of training, by the monotonic clock."""
        return _STARTED + 60 * self.minutes - self.reserve


def tokenizer_texts(sections: list[Section]) -> Iterator[str]:
    """What the tokenizer is trained on: the training text once, and some hundred documents of every task."""
    source = Source(sections, seed=0)
    for section in source.sections:
        yield section.text
    for run in source.runs:
        yield "\n".join(run)
    for kind in ("sums", "recall", "tools", "chat", "agents", "json"):
        for _ in range(600):
            # most of a tool prompt is the same each time: a few whole ones are enough
            yield source.draw(kind).text.split("<functions>")[-1]
    for _ in range(40):
        yield source.draw("tools").text


def make_tokenizer(plan: Plan) -> Tokenizer:
    """The tokenizer of the output folder, trained if it is not there yet."""
    path = plan.out / "tokenizer.json"
    if not path.exists():
        shape = Shape()
        save_tokenizer(
            train_tokenizer(tokenizer_texts(read_sections(plan.corpus)), shape.vocab_size),
            plan.out,
            shape.max_position_embeddings,
        )
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class Losses:
    """Scalars of one step; `total` is what is minimized. Of every learned token: its weight, and whether it was
    foreseen.
    """

    total: Tensor
    main: Tensor
    draft: Tensor
    index: Tensor
    accepted: Tensor
    weight_N: Tensor
    right_N: Tensor

    def report(self) -> str:
        """The scalars, and the share of tokens foreseen in every kind of document that has a weight of its own."""
        scalars = {"main": self.main, "draft": self.draft, "index": self.index, "accepted": self.accepted}
        parts = [f"{name} {float(value.detach()):.4f}" for name, value in scalars.items()]
        for weight in sorted(set(self.weight_N.tolist())):
            kinds = "/".join(kind for kind, (_, _, own) in MIX.items() if abs(own - weight) < 1e-3)
            parts.append(f"{kinds} {float(self.right_N[self.weight_N == weight].float().mean()):.3f}")
        return " ".join(parts)


def losses(
    model: TinyModel, rows: Rows, attention: Attention, device: torch.device
) -> tuple[Losses, tuple[Tensor, ...]]:
    """One forward pass over packed rows; also the expert loads."""
    tokens = torch.from_numpy(rows.tokens).to(device, non_blocking=True).long()
    weight = torch.from_numpy(rows.weight).to(device, non_blocking=True).float()
    document = torch.from_numpy(rows.document).to(device, non_blocking=True).long()
    keep = 1 - DROPOUT_ON_CORPUS * torch.from_numpy(rows.dropout).to(device, non_blocking=True).float()[..., None]
    chosen = torch.randperm(tokens.shape[1], device=device)[:INDEXER_ROWS]
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model(tokens, model.view(document, attention, chosen, keep))
        # row i of the main model is asked for token i+1; row i-1 of the draft layer for the same token
        asked = (weight[:, 1:] > 0) & (document[:, 1:] == document[:, :-1])
        asked[:, 0] = False
        row, place = asked.nonzero(as_tuple=True)
        wanted = tokens[row, place + 1]
        main_logits = model.lm_head(hidden.main_BTC[row, place])
        draft_logits = model.lm_head(hidden.draft_BTC[row, place - 1])
    counts = weight[row, place + 1]
    main = (F.cross_entropy(main_logits.float(), wanted, reduction="none") * counts).sum() / counts.sum()
    known = counts * (document[row, place - 1] == document[row, place])
    teacher = main_logits.detach().float()
    draft_each = 0.5 * F.cross_entropy(draft_logits.float(), wanted, reduction="none")
    draft_each = draft_each + 0.5 * F.cross_entropy(draft_logits.float(), teacher.softmax(-1), reduction="none")
    draft = (draft_each * known).sum() / known.sum()
    accepted = ((draft_logits.argmax(-1) == teacher.argmax(-1)).float() * known).sum() / known.sum()
    total = main + 0.4 * draft + hidden.index_loss
    right = teacher.argmax(-1) == wanted
    return Losses(total, main, draft, hidden.index_loss, accepted, counts, right), hidden.loads


def balance(model: TinyModel, loads: tuple[Tensor, ...]) -> None:
    """Raise the bias of experts that got too little, lower the others' (DeepSeek-V3's balancing without a loss)."""
    for moe, load in zip(model.moe_layers(), (load for load in loads if load.numel()), strict=True):
        bias = moe.get_buffer("e_score_correction_bias")
        bias.add_(BIAS_STEP * (load.mean() - load).sign())


def optimizer_for(model: TinyModel, plan: Plan) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.97), fused=plan.device.type == "cuda")


def rate_at(plan: Plan, share: float, step: int) -> float:
    """Warm-up by steps, then a cosine down to 2 %."""
    return plan.rate * min(1.0, (step + 1) / 200) * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))


def train(plan: Plan, tokenizer: Tokenizer) -> TinyModel:
    """Train until the time is over."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    model = resume(plan).to(plan.device).train()
    print(f"{parameter_count(model) / 1e6:.2f} M parameters", flush=True)
    optimizer, stream = (
        optimizer_for(model, plan),
        stream_rows(plan.corpus, tokenizer, plan.length, plan.rows, plan.workers, plan.seed * 1000),
    )
    rows, step, began = next(stream), 0, time.monotonic()
    logged = saved = began
    seconds = max(1.0, plan.until - began)
    print(f"{began - _STARTED:.0f} s for the start, {seconds:.0f} s for training", flush=True)
    while True:
        share = plan.start + (1 - plan.start) * (time.monotonic() - began) / seconds
        if share >= 1:
            print(f"{step} steps, {step * rows.tokens.size / 1e6:.0f} M tokens", flush=True)
            return model
        model.set_quantize(share >= QUANTIZED_FROM)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(plan, share, step)
        loss, loads = losses(model, rows, "sparse" if share >= SPARSE_FROM else "dense", plan.device)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance(model, loads)
        rows = next(stream)
        step += 1
        if time.monotonic() - saved > plan.save_every:
            save_model(model, plan.out)  # until it is trained, not fit for FP8 yet
            save_master(model, plan.out)
            saved = time.monotonic()
        if step <= 3 or step % 100 == 0:
            now = time.monotonic()
            print(
                f"step {step} {now - began:.0f} s (+{now - logged:.1f}) {share:.2f} {loss.report()} norm"
                f" {float(norm):.2f}",
                flush=True,
            )
            logged = now


def resume(plan: Plan) -> TinyModel:
    """A fresh model, or the one whose full-precision weights a former run left."""
    model = TinyModel(Shape())
    if plan.init is None:
        return model
    parts = sorted(plan.init.glob("master-*.safetensors"))
    model.load_state_dict({name: tensor.float() for part in parts for name, tensor in load_file(part).items()})
    return model


def save_master(model: TinyModel, folder: Path) -> None:
    """Weights to go on training from, in bf16: two files of at most 16 MB."""
    state = {name: tensor.detach().to("cpu", torch.bfloat16, copy=True) for name, tensor in model.state_dict().items()}
    half, part = sum(tensor.numel() for tensor in state.values()) // 2, 0
    groups: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, tensor in state.items():
        groups[part > half][name] = tensor
        part += tensor.numel()
    for number, group in enumerate(groups):
        path = folder / f"master-{number}.safetensors"
        save_file(group, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # whole, whenever the process is ended


def main() -> None:
    """Train, export, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the .txt files of the corpus")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the checkpoint; a tokenizer found there is kept"
    )
    parser.add_argument("--minutes", type=float, default=8.7, help="time for all, from the start to the evaluation")
    parser.add_argument("--rows", type=int, default=21, help="rows of tokens a step")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row; longer documents are left out")
    parser.add_argument("--workers", type=int, default=12, help="processes that make training documents")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--init", type=Path, help="folder with master-*.safetensors of a former run to go on from")
    parser.add_argument("--start", type=float, default=0.0, help="share of the course to begin at (with --init)")
    parser.add_argument("--items", type=int, default=1024, help="held-out items a task")
    parser.add_argument("--reserve", type=float, default=40.0, help="seconds of it for export and evaluation")
    parser.add_argument("--save-every", type=float, default=90.0, help="seconds between saves of the master weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args())
    plan = Plan(device=torch.device(options.pop("device")), **options)
    plan.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(plan)
    model = train(plan, tokenizer)
    save_model(model, plan.out)
    save_master(model, plan.out)
    left = _STARTED + 60 * plan.minutes - time.monotonic()
    results = evaluate(load_model(plan.out, Shape()), tokenizer, plan.items, plan.device, left)
    (plan.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
