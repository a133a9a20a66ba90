"""A small causal decoder whose attention is native sparse attention, over pages in steps of any rows, or by the
definition in one forward; and checks that every implementation of the kernels must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.attend.case import to_device
from thalweg.kernels.nsa import case
from thalweg.kernels.nsa.ref import PAGE, NsaConfig, NsaPlanes

LAYERS, DIM, VOCAB, PAGES = 2, 32, 96, 8  # PAGES of a row
CONFIG = NsaConfig(topk=4, window=40, scale=DIM**-0.5)
TOLERANCE = 2e-5  # of max |logit - exact| / max |exact|; float32 leaves some 2e-6
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]  # layer, queries, gates, keys, values


class Decoder(nn.Module):
    """Random weights; projections are large enough that tokens attend to few."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.heads, self.kv_heads, width = heads, kv_heads, heads * DIM
        qkv = width + 2 * kv_heads * DIM + 3 * heads
        shapes = {"embed": (VOCAB, width), "place": (PAGES * PAGE, width), "head": (VOCAB, width)}
        for layer in range(LAYERS):
            shapes |= {f"qkv{layer}": (qkv, width), f"out{layer}": (width, width), f"mlp{layer}": (width, width)}
        for name, shape in shapes.items():
            scale = {"em": 0.3, "pl": 0.3, "qk": 1.5 * width**-0.5}.get(name[:2], width**-0.5)
            self.register_buffer(name, torch.randn(shape, generator=generator) * scale)

    def forward(self, ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """→ logits [T, VOCAB]."""
        weights = dict(self.named_buffers())
        h = weights["embed"][ids_T] + weights["place"][positions_T]
        for layer in range(LAYERS):
            x = nn.functional.rms_norm(h, h.shape[1:]) @ weights[f"qkv{layer}"].t()
            counts = self.heads, self.kv_heads, self.kv_heads
            parts = x.split([*(count * DIM for count in counts), 3 * self.heads], 1)
            query, key, value = (part.unflatten(1, (-1, DIM)) for part in parts[:3])
            out = attention(layer, query, parts[3].sigmoid().view(-1, self.heads, 3), key, value)
            h = h + out.flatten(1) @ weights[f"out{layer}"].t()
            h = h + nn.functional.silu(nn.functional.rms_norm(h, h.shape[1:]) @ weights[f"mlp{layer}"].t())
        return nn.functional.rms_norm(h, h.shape[1:]) @ weights["head"].t()


def filled(pages: int, kv_heads: int, dims: tuple[int, int], number: float, device: torch.device) -> NsaPlanes:
    """Planes full of one number."""
    sizes = [(pages, *page, kv_heads, dim) for page in ((PAGE,), ()) for dim in dims]
    return NsaPlanes(*(torch.full(size, number, device=device) for size in sizes))


class PagedRun:
    """Rows of a decoder whose pages hold what they have computed. kernels: the module that stores and attends."""

    def __init__(self, model: Decoder, kernels: Any, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.model, self.kernels, self.device = model.to(device), kernels, device
        self.ids = [list(prompt) for prompt in prompts]
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        generator, pages = torch.Generator().manual_seed(8), len(prompts) * PAGES
        self.table_RL = torch.randperm(pages, generator=generator).view(-1, PAGES).to(torch.int32) + 1
        self.planes = [filled(pages + 1, model.kv_heads, (DIM, DIM), 1e3, device) for _ in range(LAYERS)]

    def step(self, counts: Sequence[int]) -> None:
        """Computes so many tokens of each row; a row that has computed all of its tokens gets its next one."""
        done = [len(logits) for logits in self.logits]
        positions_T = torch.cat([torch.arange(n, n + count) for n, count in zip(done, counts, strict=True)])
        rows_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        ids = [ids[n : n + count] for ids, n, count in zip(self.ids, done, counts, strict=True)]
        write_T = self.table_RL[rows_T, positions_T // PAGE].long() * PAGE + positions_T % PAGE
        rows = to_device(QueryRows(rows_T.to(torch.int32), self.table_RL, positions_T), self.device)
        write_T = write_T.to(self.device)

        def attention(layer: int, query: Tensor, gates: Tensor, key: Tensor, value: Tensor) -> Tensor:
            planes = self.planes[layer]
            self.kernels.write(key, value, write_T, planes)
            attended: Tensor = self.kernels.attend(query, gates, planes, rows, CONFIG, PAGES * PAGE)
            return attended

        logits_TV = self.model(torch.tensor(sum(ids, []), device=self.device), rows.positions_T, attention).cpu()
        for row, logits_tV in enumerate(logits_TV.split(list(counts))):
            self.logits[row] += logits_tV
            if len(self.logits[row]) == len(self.ids[row]) and len(logits_tV):
                self.ids[row].append(int(logits_tV[-1].argmax()))


def exact_logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    """One forward by the definition, in float64."""
    exact = Decoder(model.heads, model.kv_heads).double()

    def attention(layer: int, query: Tensor, gates: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = [case.exact_token(query[t], gates[t], key[: t + 1], value[: t + 1], CONFIG) for t in range(len(query))]
        assert min(gap for _, gap in outs) > 1e-5, "rounding may choose another block: draw other weights"
        return torch.stack([out for out, _ in outs])

    logits_TV: Tensor = exact(torch.tensor(ids), torch.arange(len(ids)), attention)
    return logits_TV


def check_generation(kernels: Any, heads: int, kv_heads: int, device: torch.device) -> None:
    """Two prompts in chunks, one of them beside decode rows, then token by token: the logits of all tokens are those of
    one forward over prompt and answer, and each token is the best by far.
    """
    model, generator = Decoder(heads, kv_heads), torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, VOCAB, (count,), generator=generator).tolist() for count in (60, 300)]
    run = PagedRun(model, kernels, prompts, device)
    for counts in ((60, 100), (1, 130), (1, 70), *((1, 1),) * 6):  # row 0 fills a page, row 1 begins one
        run.step(counts)
    for ids, logits, prompt in zip(run.ids, run.logits, prompts, strict=True):
        exact = exact_logits(model, ids[:-1])
        error = float((torch.stack(logits).double() - exact).abs().max() / exact.abs().max())
        assert error < TOLERANCE, error
        best = exact[len(prompt) - 1 :].topk(2).values
        assert ids[len(prompt) :] == exact[len(prompt) - 1 :].argmax(1).tolist()
        assert float((best[:, 0] - best[:, 1]).min()) > 2 * TOLERANCE * float(exact.abs().max()), "a near tie"


def check_bits(kernels: Any, inputs: dict[str, Any]) -> None:
    """Tokens of a step have the bits that they have in steps of one token, and so have the planes."""
    whole, alone = ({name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()} for _ in range(2))
    together = case.run(**whole, kernels=kernels)[0]
    parts = []
    for token in range(len(together)):
        own = {
            name: x[token : token + 1]
            for name, x in alone.items()
            if name.endswith(("_T", "_THd", "_TH3", "_TKd", "_TKv"))
        }
        parts += case.run(**alone | own, kernels=kernels)
    assert torch.equal(torch.cat(parts), together)
    for name in NsaPlanes._fields:
        assert torch.equal(whole[name], alone[name]), name


def check_pooling(kernels: Any, device: torch.device) -> None:
    """A page is pooled when its last token is stored, of whichever step its tokens are; rejected drafts are forgotten,
    and nothing else is written.
    """
    generator = torch.Generator().manual_seed(10)
    planes = filled(4, 2, (24, 16), 7.0, device)
    exact = [torch.full(plane.shape, 7.0) for plane in planes]
    again = [*range(61, 64), *range(2 * PAGE, 3 * PAGE)]  # after five drafts; and a page of another row
    for places in (range(63), range(63, 66), again):
        new = [torch.randn(len(places), 2, dim, generator=generator) for dim in (24, 16)]
        at = torch.tensor(places) + PAGE  # from page 1 on
        kernels.write(*(x.to(device) for x in new), at.to(device), planes)
        for x, plane, pooled in zip(new, exact[:2], exact[2:], strict=True):
            plane.flatten(0, 1)[at] = x
            for page in at[at % PAGE == PAGE - 1] // PAGE:
                pooled[page] = plane[page].mean(0)
        torch.testing.assert_close([plane.cpu() for plane in planes], exact, rtol=1e-6, atol=1e-6)


def check_ties(kernels: Any, device: torch.device) -> None:
    """Of equal blocks the first are chosen, after the token's own, the one before and the first."""
    blocks = 7
    key, value = torch.zeros(2, blocks + 1, PAGE, 1, 16, device=device)
    value[1:, :, 0, :blocks] = torch.eye(blocks, device=device)[:, None]  # the output tells which blocks
    planes = NsaPlanes(key, value, key.mean(1), value.mean(1))
    table = torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None]
    position = torch.tensor([blocks * PAGE - 1], device=device)
    rows = QueryRows(torch.zeros(1, dtype=torch.int32, device=device), table, position)
    query, gates = torch.ones(1, 16, 16, device=device), torch.tensor([0.0, 1.0, 0.0], device=device).expand(1, 16, 3)
    for topk, wanted in ((1, [6]), (2, [5, 6]), (3, [0, 5, 6]), (5, [0, 1, 2, 5, 6]), (9, [*range(7)])):
        out = kernels.attend(query, gates.contiguous(), planes, rows, NsaConfig(topk, 0, 1.0), blocks * PAGE)
        assert out[0, 0].nonzero().flatten().tolist() == wanted, (topk, out[0, 0])
