"""Held-out results of a checkpoint with the training model's own code (`thalweg eval` measures the same through the
engine).

Every target is the only greedy text that the task's format allows, so "the model would write it" is read off one pass:
each next token of the target must be the most likely one. Where another wording would be right too, this counts it as
wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from thalweg.bench.tasks import Item, make_items
from tools.train_tiny.checkpoint import load_model
from tools.train_tiny.data import prompt_of
from tools.train_tiny.model import Attention, TinyModel
from tools.train_tiny.shape import read_shape
from tools.train_tiny.tokenizer import EOS

TASKS = ("sums", "recall", "tools", "agents")
_TOKENS_PER_BATCH = 32768
_GENERATED = 64


@dataclass(frozen=True)
class Batch:
    """Items as right-padded rows. `start_B`: where the target begins; `end_B`: behind its end token."""

    tokens_BT: Tensor
    start_B: Tensor
    end_B: Tensor

    @property
    def target_BT(self) -> Tensor:
        """True at the rows whose next token belongs to the target."""
        place = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        return (place >= self.start_B[:, None] - 1) & (place < self.end_B[:, None] - 1)

    @property
    def document_BT(self) -> Tensor:
        """Document 0 is the item, document -1 the padding."""
        place = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        return torch.where(place < self.end_B[:, None], 0, -1)


@dataclass(frozen=True)
class Result:
    """Counts of one task: items written right, tokens drafted right, and the targets' negative log-likelihood in
    nats.
    """

    items: int
    right: int
    drafted: int
    accepted: int
    nats: float
    tokens: int
    bytes: int

    def row(self) -> dict[str, float]:
        """The shares with their 95 % Wilson interval, and the perplexities."""
        accuracy, acceptance = wilson(self.right, self.items), wilson(self.accepted, self.drafted)
        return {
            "items": self.items,
            "exact": self.right / self.items,
            "exact_low": accuracy[0],
            "exact_high": accuracy[1],
            "nextn_acceptance": self.accepted / max(1, self.drafted),
            "nextn_low": acceptance[0],
            "nextn_high": acceptance[1],
            "perplexity_per_token": math.exp(self.nats / self.tokens),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
        }


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share."""
    if total == 0:
        return 0.0, 1.0
    z, share = 1.96, hits / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low, high = (middle - spread) / (1 + z * z / total), (middle + spread) / (1 + z * z / total)
    return max(0.0, low), min(1.0, high)


def make_batches(items: Sequence[Item], tokenizer: Tokenizer, device: torch.device, room: int = 0) -> Iterator[Batch]:
    """Batches of similar length, each row with `room` more places than its target."""
    end = tokenizer.token_to_id(EOS)
    rows = []
    for item in items:
        prompt = tokenizer.encode(prompt_of(item), add_special_tokens=False).ids
        rows.append((prompt, [*tokenizer.encode(item.target, add_special_tokens=False).ids, end]))
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    size = max(1, _TOKENS_PER_BATCH // (len(rows[-1][0]) + len(rows[-1][1]) + room))
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        length = -(-max(len(a) + len(b) + room for a, b in part) // 8) * 8
        tokens = torch.full((len(part), length), end, dtype=torch.long)
        for number, (prompt, target) in enumerate(part):
            tokens[number, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        start = torch.tensor([len(prompt) for prompt, _ in part])
        stop = torch.tensor([len(prompt) + len(target) for prompt, target in part])
        yield Batch(tokens.to(device), start.to(device), stop.to(device))


def _logits(model: TinyModel, batch: Batch, attention: Attention) -> tuple[Tensor, Tensor]:
    """fp32 logits [B, T, V] of the main model and of the draft layer."""
    with torch.autocast(batch.tokens_BT.device.type, dtype=torch.bfloat16, enabled=batch.tokens_BT.is_cuda):
        hidden = model(batch.tokens_BT, model.view(batch.document_BT, attention))
        return model.lm_head(hidden.main_BTC).float(), model.lm_head(hidden.draft_BTC).float()


@torch.no_grad()
def measure(
    model: TinyModel, tokenizer: Tokenizer, items: Sequence[Item], attention: Attention, device: torch.device
) -> Result:
    """Read off the targets whether greedy decoding writes them, and whether the draft layer foresees it."""
    right = drafted = accepted = tokens = 0
    nats = 0.0
    for batch in make_batches(items, tokenizer, device):
        main, draft = _logits(model, batch, attention)
        target = batch.target_BT[:, :-1]
        following = batch.tokens_BT[:, 1:]
        loss = F.cross_entropy(main[:, :-1].transpose(1, 2), following, reduction="none")
        nats += float((loss * target).sum())
        tokens += int(target.sum())
        choice = main.argmax(-1)
        right += int(((choice[:, :-1] == following) | ~target).all(1).sum())
        hits, tries = _acceptance(choice, draft.argmax(-1), batch)
        accepted, drafted = accepted + hits, drafted + tries
    size = sum(len(item.target.encode()) for item in items)
    return Result(len(items), right, drafted, accepted, nats, tokens, size)


def _acceptance(choice_BT: Tensor, draft_BT: Tensor, batch: Batch) -> tuple[int, int]:
    """Drafts equal to the main model's next choice, and drafts: row i drafts what row i+1 chooses."""
    rows = batch.target_BT[:, :-1] & batch.target_BT[:, 1:]
    return int(((draft_BT[:, :-1] == choice_BT[:, 1:]) & rows).sum()), int(rows.sum())


@torch.no_grad()
def measure_greedy(
    model: TinyModel, tokenizer: Tokenizer, items: Sequence[Item], device: torch.device
) -> tuple[int, int, list[str]]:
    """Accepted drafts, drafts, and three texts, on what the model itself writes greedily after the items' prompts."""
    end, hits, tries = tokenizer.token_to_id(EOS), 0, 0
    texts: list[str] = []
    for batch in make_batches(items, tokenizer, device, room=_GENERATED):
        tokens, length = batch.tokens_BT.clone(), batch.start_B.clone()
        live, rows = torch.ones_like(length, dtype=torch.bool), torch.arange(len(length), device=device)
        for _ in range(_GENERATED):
            now = Batch(tokens, batch.start_B, length)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
                hidden = model(tokens, model.view(now.document_BT, "sparse"), draft=False)
                token = model.lm_head(hidden.main_BTC[rows, length - 1]).argmax(-1)
            tokens[rows[live], length[live]] = token[live]
            length = length + live.long()
            live = live & (token != end)
        written = Batch(tokens, batch.start_B, length)
        main, draft = _logits(model, written, "sparse")
        hit, tried = _acceptance(main.argmax(-1), draft.argmax(-1), written)
        hits, tries = hits + hit, tries + tried
        if len(texts) < 3:
            texts.append(tokenizer.decode(tokens[0, : int(length[0])].tolist(), skip_special_tokens=False))
    return hits, tries, texts


@torch.compiler.set_stance("force_eager")  # each batch has other lengths
def evaluate(
    model: TinyModel, tokenizer: Tokenizer, count: int, device: torch.device, seconds: float = math.inf
) -> dict[str, dict[str, float]]:
    """All results, `count` held-out items a task; dialogue's acceptance is on the model's own greedy text.

    seconds: a task does not begin after so many, and is then missing.
    """
    model = model.to(device).eval()
    began = time.monotonic()
    steps: dict[str, Callable[[], dict[str, float]]] = {}
    for task in TASKS:
        items = partial(make_items, task, "held_out", count)
        steps[task] = lambda items=items: measure(model, tokenizer, items(), "sparse", device).row()
    recall = partial(make_items, "recall", "held_out", count)
    steps["recall, dense attention"] = lambda: measure(model, tokenizer, recall(), "dense", device).row()
    steps["recall, random choice"] = lambda: measure(model, tokenizer, recall(), "random", device).row()
    steps["dialogue"] = lambda: _dialogue(model, tokenizer, count, device)
    results: dict[str, dict[str, float]] = {}
    for name, step in steps.items():
        if time.monotonic() - began > seconds:
            print(f"no time for {name}: python -m tools.train_tiny.evaluate measures it later", flush=True)
        else:
            results[name] = step()
    return results


def _dialogue(model: TinyModel, tokenizer: Tokenizer, count: int, device: torch.device) -> dict[str, float]:
    dialogues = make_items("dialogue", "held_out", count)
    row = measure(model, tokenizer, dialogues, "sparse", device).row()
    accepted, drafted, texts = measure_greedy(model, tokenizer, dialogues, device)
    row["nextn_acceptance"] = accepted / max(1, drafted)
    row["nextn_low"], row["nextn_high"] = wilson(accepted, drafted)
    for text in texts:
        print(json.dumps(text, ensure_ascii=False))
    return row


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| task | items | exact (95 % interval) | NextN acceptance | perplexity a token | bits a byte |",
        "|---|---|---|---|---|---|",
    ]
    for task, r in results.items():
        exact = "–" if task == "dialogue" else f"{r['exact']:.1%} ({r['exact_low']:.1%}–{r['exact_high']:.1%})"
        draft = f"{r['nextn_acceptance']:.1%} ({r['nextn_low']:.1%}–{r['nextn_high']:.1%})"
        lines.append(
            f"| {task} | {r['items']:.0f} | {exact} | {draft} | {r['perplexity_per_token']:.3f} |"
            f" {r['bits_per_byte']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Evaluate a checkpoint folder, write its `results.json` and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    model = load_model(options.folder, read_shape(options.folder))
    results = evaluate(model, tokenizer, options.items, torch.device(options.device))
    (options.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
