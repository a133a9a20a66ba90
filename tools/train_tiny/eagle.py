"""Trains an EAGLE-3 head for the bundled model, writes it in the published format, and measures through the engine how
many drafts are accepted.

    python -m tools.train_tiny.eagle --corpus FOLDER --out HEAD --minutes 3

The head reads the residual streams behind layers 1, 2 and 3, and is trained as it will be used: a few steps unrolled,
the first on the target's states, each other on what the one before returned, where the entries behind it are those that
drafting would have made (EAGLE-3's training-time test). It learns the target's own distribution, over the tokens that
are most frequent in what it is shown. The course follows the clock. On a CPU the same command works with `--rows 2
--length 256 --workers 1`; rows so short hold sums and talk only.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from thalweg.bench.tasks import make_items
from thalweg.config.engine import EngineConfig
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.local import LocalEngine
from tools.train_tiny.checkpoint import load_model
from tools.train_tiny.data import Rows, prompt_of, stream_rows
from tools.train_tiny.model import RMSNorm, TinyModel, rotate_halves
from tools.train_tiny.shape import Shape, read_shape
from tools.train_tiny.tokenizer import EOS

WATCHED = (1, 2, 3)  # layers whose output the head reads
HEADS, KV_HEADS, WIDTH, INNER, THETA = 8, 4, 32, 384, 10000.0
DECAY = 0.8  # of the weight of each further step
COUNTED = 24  # batches by which the frequent tokens are found
TASKS = ("sums", "recall", "tools", "agents", "dialogue")
TREE = TreeShape(branching=4, max_depth=5, num_drafts=15)


@dataclass(frozen=True)
class Plan:
    """What the command line chose."""

    corpus: Path
    target: Path
    out: Path
    minutes: float
    rows: int
    length: int
    workers: int
    rate: float
    steps: int
    vocab: int
    items: int
    seed: int
    device: torch.device


@dataclass(frozen=True)
class Seen:
    """What the target says of packed rows. document: of each token, -1 for padding. learned: whether what is said of
    the token behind it counts.
    """

    tokens_BT: Tensor
    streams_BTX: Tensor
    logits_BTV: Tensor
    document_BT: Tensor
    learned_BT: Tensor


class Attention(nn.Module):
    """Grouped-query attention of one step of the unrolled head to its first step's entries, and to the one entry of
    each later step that a draft at its place has behind it.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(2 * hidden, KV_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(2 * hidden, KV_HEADS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, hidden, bias=False)

    def forward(self, x_BTX: Tensor, allowed_BTS: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, T, C]. allowed: which of the first step's entries each place has, were it of the first step. past: keys
        and values of the steps before, to which this one's are added.
        """
        length = x_BTX.shape[1]
        frequency = THETA ** (-torch.arange(0, WIDTH, 2, device=x_BTX.device) / WIDTH)
        angle = torch.arange(length, device=x_BTX.device)[:, None] * frequency
        q, k, v = (proj(x_BTX).unflatten(-1, (-1, WIDTH)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate_halves(y, angle.cos(), angle.sin()) for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for y in (k, v))
        past.append((k, v))
        q, step = q.transpose(1, 2) * WIDTH**-0.5, len(past) - 1
        visible_BTS = allowed_BTS.tril(-step)
        scores = [(q @ past[0][0].mT).float().masked_fill(~visible_BTS[:, None], -math.inf)]
        behind = [[y.roll(step - j, 2) for y in past[j]] for j in range(1, step + 1)]
        scores += [(q * key).sum(-1, keepdim=True).float() for key, _ in behind]
        shares = torch.cat(scores, -1).softmax(-1).to(v.dtype)
        out = shares[..., :length] @ past[0][1]
        for j, (_, value) in enumerate(behind):
            out = out + shares[..., length + j, None] * value
        summed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return summed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, INNER, bias=False)
        self.up_proj = nn.Linear(hidden, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Layer(nn.Module):
    """The published midlayer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.self_attn, self.mlp = Attention(hidden), Mlp(hidden)

    def forward(
        self, embedded_BTC: Tensor, state_BTC: Tensor, allowed_BTS: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The states behind the entries, [B, T, C]."""
        joined = torch.cat((self.input_layernorm(embedded_BTC), self.hidden_norm(state_BTC)), -1)
        h_BTC = state_BTC + self.self_attn(joined, allowed_BTS, past)
        made: Tensor = h_BTC + self.mlp(self.post_attention_layernorm(h_BTC))
        return made


class Head(nn.Module):
    """An EAGLE-3 head whose parameters have their published names. ids_D: the tokens that it drafts."""

    def __init__(self, shape: Shape, ids_D: Tensor) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(WATCHED) * hidden, hidden, bias=False)
        self.midlayer = Layer(hidden)
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, len(ids_D), bias=False)
        self.register_buffer("ids_D", ids_D, persistent=False)

    def published(self, vocab: int) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        ids = self.get_buffer("ids_D").cpu()
        tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in self.state_dict().items()}
        kept = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


class Teacher:
    """The target, frozen. Of packed rows it says what a head is made of and what it should learn."""

    def __init__(self, plan: Plan) -> None:
        self.model: TinyModel = (
            load_model(plan.target, read_shape(plan.target)).to(plan.device).eval().requires_grad_(False)
        )
        self.plan = plan

    @torch.no_grad()
    def see(self, rows: Rows) -> Seen:
        device, length = self.plan.device, self.plan.length
        tokens, document, weight = (
            torch.from_numpy(part[:, :length]).to(device) for part in (rows.tokens, rows.document, rows.weight)
        )
        tokens, document, streams = tokens.long(), document.long(), list[Tensor]()
        hooks = [
            self.model.layers[i].register_forward_hook(lambda layer, given, made: streams.append(made[0]))
            for i in WATCHED
        ]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            hidden = self.model(tokens, self.model.view(document, "sparse"), draft=False).main_BTC
            logits = self.model.lm_head(hidden).float()
        for hook in hooks:
            hook.remove()
        behind = torch.zeros_like(document, dtype=torch.bool)
        behind[:, :-1] = (weight[:, 1:] > 0) & (document[:, 1:] == document[:, :-1])
        return Seen(tokens, torch.cat(streams, -1).float(), logits, document, behind)


def before(x_BTC: Tensor, document_BT: Tensor) -> Tensor:
    """Of each place what stands at the one before it; 0 where a document begins."""
    moved = x_BTC.roll(1, 1)
    first = document_BT != document_BT.roll(1, 1)
    first[:, 0] = True
    return moved.masked_fill(first[..., None], 0.0)


def losses(head: Head, embedding: nn.Embedding, seen: Seen, steps: int) -> tuple[Tensor, list[float]]:
    """What is minimized, and of each step the share of its drafts that are the target's most likely token."""
    ids = head.get_buffer("ids_D")
    embedded = embedding(seen.tokens_BT)
    length = seen.tokens_BT.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    allowed = (seen.document_BT[:, :, None] == seen.document_BT[:, None]) & causal
    teacher = seen.logits_BTV[..., ids].softmax(-1)
    choice = seen.logits_BTV.argmax(-1)
    state, past, total, shares = head.fc(seen.streams_BTX), list[tuple[Tensor, Tensor]](), torch.zeros(()), []
    for step in range(steps):
        state = head.midlayer(embedded, before(state, seen.document_BT), allowed, past)
        # a chain of so many drafts must have begun in this document
        began = torch.zeros_like(seen.learned_BT)
        began[:, step:] = seen.document_BT[:, step:] == seen.document_BT[:, : length - step]
        mask = seen.learned_BT & began
        logits = head.lm_head(head.norm(state))[mask].float()
        known = teacher[mask]
        each = F.cross_entropy(logits, known, reduction="none")
        total = total.to(each.device) + DECAY**step * each.mean()
        shares.append(float((ids[logits.argmax(-1)] == choice[mask]).float().mean()))
    return total, shares


def frequent(teacher: Teacher, stream: Iterator[Rows], count: int) -> Tensor:
    """The tokens that the target most often finds likeliest, in order of their ids."""
    found = torch.zeros(teacher.model.shape.vocab_size)
    for rows in islice(stream, COUNTED):
        seen = teacher.see(rows)
        chosen = seen.logits_BTV.argmax(-1)[seen.learned_BT].cpu()
        found += torch.bincount(chosen, minlength=len(found))
    return found.argsort(descending=True, stable=True)[:count].sort().values


def train(plan: Plan, tokenizer: Tokenizer) -> Head:
    """Trains until the time is over."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    teacher = Teacher(plan)
    stream = stream_rows(plan.corpus, tokenizer, plan.length, plan.rows, plan.workers, plan.seed * 1000)
    head = Head(teacher.model.shape, frequent(teacher, stream, plan.vocab)).to(plan.device)
    print(f"{sum(one.numel() for one in head.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.02)
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        with torch.autocast(plan.device.type, dtype=torch.bfloat16, enabled=plan.device.type == "cuda"):
            loss, shares = losses(head, teacher.model.embed_tokens, teacher.see(next(stream)), plan.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        share = (time.monotonic() - began) / (60 * plan.minutes)
        if step <= 3 or step % 25 == 0 or share >= 1:
            told = " ".join(f"{one:.3f}" for one in shares)
            print(
                f"step {step} {time.monotonic() - began:.0f} s loss {float(loss.detach()):.3f} right {told}", flush=True
            )
    return head


def save(head: Head, plan: Plan) -> None:
    """The head in the published format."""
    shape = read_shape(plan.target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": plan.vocab,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(WATCHED), "use_aux_hidden_state": True},
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(head.published(shape.vocab_size), plan.out / "model.safetensors", {"format": "pt"})


def accepted(plan: Plan, tokenizer: Tokenizer, width: int, tree: TreeShape = CHAIN) -> dict[str, float]:
    """Tokens that a verification of `width` drafts brings, by task: held-out prompts, greedy, through the engine."""
    engine = LocalEngine(
        EngineConfig(
            model_path=str(plan.target),
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(plan.out),
            speculative_num_steps=tree.max_depth if tree.is_tree else width,
            speculative_eagle_topk=tree.branching,
            speculative_num_draft_tokens=width + 1,
            context_length=2048,
            eos_ids=(tokenizer.token_to_id(EOS),),
            show_progress=False,
        )
    )
    found: dict[str, float] = {}
    for task in TASKS:
        before = engine.loop.stats()
        for item in make_items(task, "held_out", plan.items):
            prompt = tokenizer.encode(prompt_of(item), add_special_tokens=False).ids
            engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=min(item.max_new_tokens, 64)))
        while not engine.idle:
            engine.step()
        after = engine.loop.stats()
        verified = after.verifications - before.verifications
        found[task] = 1 + (after.accepted_tokens - before.accepted_tokens) / max(verified, 1)
    return found


def main() -> None:
    """Train, export, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the .txt files of the corpus")
    parser.add_argument("--target", type=Path, default=Path("models/tiny"), help="the model to draft for")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="training time, what is measured not counted; 0: none"
    )
    parser.add_argument("--rows", type=int, default=21, help="rows a step")
    parser.add_argument("--length", type=int, default=1536, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=12, help="processes that make training documents")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=4, help="drafts that training unrolls")
    parser.add_argument("--vocab", type=int, default=1024, help="tokens that the head drafts")
    parser.add_argument("--items", type=int, default=24, help="held-out items a task")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="*",
        default=[1, 3, 5],
        help="lengths of the chains that are measured, and a tree; without any, nothing is",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args())
    widths = options.pop("widths")
    plan = Plan(device=torch.device(options.pop("device")), **options)
    tokenizer = Tokenizer.from_file(str(plan.target / "tokenizer.json"))
    if plan.minutes:
        save(train(plan, tokenizer), plan)
    results = {f"chain of {width}": accepted(plan, tokenizer, width) for width in widths}
    if widths:
        results[f"tree of {TREE.num_drafts}"] = accepted(plan, tokenizer, TREE.num_drafts, TREE)
    (plan.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"| drafts | {' | '.join(TASKS)} |\n|---|{'---|' * len(TASKS)}")
    for name, row in results.items():
        print(f"| {name} | {' | '.join(f'{row[task]:.2f}' for task in TASKS)} |")


if __name__ == "__main__":
    main()
