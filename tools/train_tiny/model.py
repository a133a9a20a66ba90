"""DeepSeek-V3.2 as a model that can be trained: plain PyTorch, whole sequences, no cache.

Written from the published description of the architecture; the tests compare it with transformers' `deepseek_v32`. It
computes what inference computes, in the form that suits training: all routed experts run as one wide MLP whose channels
are scaled by the router, attention is masked instead of gathered, and FP8 weights are rounded in the forward pass only.

Letters in names: B rows, T tokens of a row, S keys, H heads, D head width, E experts, N chosen rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_tiny.shape import Shape

Attention = Literal["dense", "sparse", "random"]
"""Which keys a query sees: all, the indexer's `index_topk`, or as many drawn at random, to show the indexer's worth."""

FP8_MAX = 448.0
BLOCK = 128

fused: Callable[..., Any] = torch.compile(dynamic=False) if torch.cuda.is_available() else lambda function: function
"""Makes one kernel of a function's elementwise work, on a GPU."""


def block_scale(weight: Tensor) -> Tensor:
    """Power-of-two scale of every 128 × 128 block of a [O, I] weight: fp32 [ceil(O/128), ceil(I/128)]."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-4)
    return torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))


def spread_scale(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element of a weight of `shape`."""
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def round_to_fp8(weight: Tensor) -> Tensor:
    """The weight as its FP8 checkpoint holds it; gradients pass as if nothing had happened."""
    scale = spread_scale(block_scale(weight.detach()), weight.shape)
    rounded = (weight.detach().float() / scale).to(torch.float8_e4m3fn).float() * scale
    return weight + (rounded - weight).detach()


class Linear(nn.Module):
    """A projection without bias, stored in FP8 blocks by the checkpoint."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (gain * inputs**-0.5))
        self.quantize = False

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return F.linear(x, round_to_fp8(self.weight) if self.quantize else self.weight)


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32; same shape and dtype as `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@fused
def weighted_gate(gate_BTI: Tensor, up_BTI: Tensor, weight_BTE: Tensor) -> Tensor:
    """SwiGLU of all experts' channels, side by side, each scaled by its expert's weight: [B, T, I]."""
    inner = (F.silu(gate_BTI) * up_BTI).unflatten(-1, (weight_BTE.shape[-1], -1))
    return (inner * weight_BTE.to(inner.dtype)[..., None]).flatten(-2)


@fused
def weighted_relu(products_BTHS: Tensor, w_BTH: Tensor) -> Tensor:
    """fp32 [B, T, S]: sum over heads of w · relu(product)."""
    return (F.relu(products_BTHS).float() * w_BTH[..., None]).sum(2)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return rms_norm(x, self.weight, self.eps)


def yarn_frequencies(shape: Shape) -> Tensor:
    """Angle per position of every rotated pair: fp32 [rope/2]."""
    width, theta = shape.qk_rope_head_dim, shape.rope_theta
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)

    def pair_that_turns(times: float) -> float:
        return width * math.log(shape.yarn_original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(32)), 0)
    high = min(math.ceil(pair_that_turns(1)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / shape.yarn_factor * ramp + frequency * (1 - ramp)


def rotate_interleaved(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs (2j, 2j+1), in fp32."""
    even, odd = x_BTHD.float()[..., 0::2], x_BTHD.float()[..., 1::2]
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x_BTHD.dtype)


def rotate_halves(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding of the pairs (j, j + D/2), in fp32."""
    first, second = x_BTHD.float().chunk(2, -1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTHD.dtype)


@dataclass(frozen=True)
class View:
    """What the layers of one forward pass share.

    `allowed_BTS`: key at or before the query and of the same document. `rows_N`: the queries on which the indexers are
    trained, empty when they are not. `keep_BT1`: dropout's multiplier is drawn per token with this probability of
    keeping.
    """

    allowed_BTS: Tensor
    cos_TD: Tensor
    sin_TD: Tensor
    rows_N: Tensor
    keep_BT1: Tensor
    attention: Attention


class Indexer(nn.Module):
    """The lightning indexer: scores every key for every query, and learns the attention it stands in for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.width, self.rope = shape.index_n_heads, shape.index_head_dim, shape.qk_rope_head_dim
        self.wq_b = Linear(shape.q_lora_rank, self.heads * self.width)
        self.wk = Linear(shape.hidden_size, self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = nn.Linear(shape.hidden_size, self.heads, bias=False)

    def project(self, x_BTC: Tensor, latent_BTC: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, T, H, D], key [B, S, D] and head weight [B, T, H] of every token."""
        q = self.wq_b(latent_BTC).unflatten(-1, (self.heads, self.width))
        k = F.layer_norm(self.wk(x_BTC).float(), (self.width,), self.k_norm.weight, self.k_norm.bias, 1e-6)[:, :, None]
        q = torch.cat((rotate_halves(q[..., : self.rope], view.cos_TD, view.sin_TD), q[..., self.rope :]), -1)
        k = torch.cat((rotate_halves(k[..., : self.rope], view.cos_TD, view.sin_TD), k[..., self.rope :]), -1)
        return q, k[:, :, 0].to(q.dtype), self.weights_proj(x_BTC).float() * (self.heads * self.width) ** -0.5

    def score(self, q_BTHD: Tensor, k_BSD: Tensor, w_BTH: Tensor) -> Tensor:
        """fp32 [B, T, S]: sum over heads of w · relu(q · k)."""
        with torch.autocast(q_BTHD.device.type, enabled=False):  # sums in bf16 would tie
            return weighted_relu((q_BTHD.flatten(1, 2) @ k_BSD.mT).unflatten(1, q_BTHD.shape[1:3]), w_BTH)


class SparseAttention(nn.Module):
    """Multi-head latent attention over the keys that the indexer chooses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        self.q_a_proj = Linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank)
        self.q_b_proj = Linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank)
        self.kv_b_proj = Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = Linear(heads * shape.v_head_dim, shape.hidden_size, gain=(2 * shape.num_hidden_layers) ** -0.5)
        self.indexer = Indexer(shape)

    def forward(self, x_BTC: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """The attention's output [B, T, C] and the indexer's loss (a scalar, 0 without `view.rows_N`)."""
        shape, heads = self.shape, self.shape.num_attention_heads
        latent = self.q_a_layernorm(self.q_a_proj(x_BTC))
        q = self.q_b_proj(latent).unflatten(-1, (heads, shape.qk_head_dim))
        q_plain, q_rope = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
        c, k_rope = self.kv_a_proj_with_mqa(x_BTC).split((shape.kv_lora_rank, shape.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (heads, shape.qk_nope_head_dim + shape.v_head_dim))
        k_plain, v = kv.split((shape.qk_nope_head_dim, shape.v_head_dim), -1)
        k_rope = rotate_interleaved(k_rope[:, :, None], view.cos_TD, view.sin_TD).expand(-1, -1, heads, -1)
        q = torch.cat((q_plain, rotate_interleaved(q_rope, view.cos_TD, view.sin_TD)), -1).transpose(1, 2)
        k = torch.cat((k_plain, k_rope), -1).transpose(1, 2)

        # The language-model loss does not train the indexer, nor the indexer's loss the model: only its own parameters.
        index = self.indexer.project(x_BTC.detach(), latent.detach(), view)
        visible_BTS = self._visible(index, view)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=visible_BTS[:, None], scale=shape.softmax_scale
        )
        loss = self._indexer_loss(q, k, index, visible_BTS, view) if view.rows_N.numel() else x_BTC.new_zeros(())
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss

    @torch.no_grad()
    def _visible(self, index: tuple[Tensor, Tensor, Tensor], view: View) -> Tensor:
        if view.attention == "dense":
            return view.allowed_BTS
        scores = (
            torch.rand_like(view.allowed_BTS, dtype=torch.float32)
            if view.attention == "random"
            else self.indexer.score(*index)
        )
        scores = scores.masked_fill(~view.allowed_BTS, -math.inf)
        chosen = scores.topk(min(self.shape.index_topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(view.allowed_BTS).scatter_(-1, chosen, True) & view.allowed_BTS

    def _indexer_loss(
        self, q: Tensor, k: Tensor, index: tuple[Tensor, Tensor, Tensor], visible_BTS: Tensor, view: View
    ) -> Tensor:
        """KL divergence, on the chosen rows, from attention summed over heads to the softmax of the index scores."""
        visible = visible_BTS[:, view.rows_N]
        with torch.no_grad():
            logits = (q[:, :, view.rows_N] @ k.mT).float() * self.shape.softmax_scale
            target = logits.masked_fill(~visible[:, None], -math.inf).softmax(-1).mean(1)
        iq, ik, iw = index
        scores = self.indexer.score(iq[:, view.rows_N], ik, iw[:, view.rows_N]).masked_fill(~visible, -1e9)
        return F.kl_div(scores.log_softmax(-1), target, reduction="none").sum(-1).mean()


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, width)
        self.up_proj = Linear(shape.hidden_size, width)
        self.down_proj = Linear(width, shape.hidden_size, gain=(2 * shape.num_hidden_layers) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and an empty expert load."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x.new_zeros(0)


class MoE(nn.Module):
    """Routed experts chosen by `noaux_tc`, and a shared one.

    `experts` holds expert e's channels at e·I … (e+1)·I, so that every 128 × 128 block belongs to one expert.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden_size, shape.n_routed_experts, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.experts = MLP(shape, shape.n_routed_experts * shape.moe_intermediate_size)
        nn.init.normal_(
            self.experts.down_proj.weight, std=(2 * shape.num_hidden_layers * shape.moe_intermediate_size) ** -0.5 / 2
        )
        self.shared_experts = MLP(shape, shape.n_shared_experts * shape.moe_intermediate_size)

    def route(self, x_BTC: Tensor) -> Tensor:
        """Weight of every expert for every token, fp32 [B, T, E], zero where it is not chosen."""
        shape = self.shape
        with torch.autocast(x_BTC.device.type, enabled=False):
            score = F.linear(x_BTC.float(), self.gate.weight.float()).sigmoid()
        choice = score.detach() + self.get_buffer("e_score_correction_bias")
        groups = choice.unflatten(-1, (shape.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(shape.topk_group, -1).indices
        open_group = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        choice = groups.masked_fill(~open_group[..., None], -math.inf).flatten(-2)
        chosen = choice.topk(shape.num_experts_per_tok, -1).indices
        weight = score.gather(-1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor
        return torch.zeros_like(score).scatter(-1, chosen, weight)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and how much of the tokens each expert got [E]."""
        weight_BTE = self.route(x_BTC)
        experts = self.experts
        routed = experts.down_proj(weighted_gate(experts.gate_proj(x_BTC), experts.up_proj(x_BTC), weight_BTE))
        return routed + self.shared_experts(x_BTC)[0], (weight_BTE > 0).float().mean((0, 1))


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each on the normed residual stream."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SparseAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp: MLP | MoE = MLP(shape, shape.intermediate_size) if dense else MoE(shape)

    def forward(self, x_BTC: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """The stream after the layer, the indexer's loss, the expert load."""
        attended, loss = self.self_attn(self.input_layernorm(x_BTC), view)
        x_BTC = x_BTC + self._drop(attended, view)
        fed, load = self.mlp(self.post_attention_layernorm(x_BTC))
        return x_BTC + self._drop(fed, view), loss, load

    def _drop(self, x_BTC: Tensor, view: View) -> Tensor:
        return (
            x_BTC * (torch.rand_like(x_BTC) < view.keep_BT1) / view.keep_BT1.to(x_BTC.dtype) if self.training else x_BTC
        )


class NextN(DecoderLayer):
    """The layer that drafts: from the final hidden state of token i and the embedding of token i+1, token i+2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, dense=False)
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.shared_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def join(self, embedded_BTC: Tensor, hidden_BTC: Tensor) -> Tensor:
        """The layer's input; the embedding comes first."""
        return self.eh_proj(torch.cat((self.enorm(embedded_BTC), self.hnorm(hidden_BTC)), -1))


@dataclass(frozen=True)
class Hidden:
    """Final hidden states (normed, ready for the head), the indexers' loss and each MoE layer's expert load."""

    main_BTC: Tensor
    draft_BTC: Tensor
    index_loss: Tensor
    loads: tuple[Tensor, ...]


class TinyModel(nn.Module):
    """The whole model; `forward` gives hidden states, `head` turns chosen ones into logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, i < shape.first_k_dense_replace) for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.nextn = NextN(shape)
        self.register_buffer("frequency", yarn_frequencies(shape), persistent=False)

    def set_quantize(self, on: bool) -> None:
        """Round the FP8 weights in the forward pass, or not."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.quantize = on

    def view(
        self, document_BT: Tensor, attention: Attention, rows_N: Tensor | None = None, keep_BT1: Tensor | None = None
    ) -> View:
        """Masks and rotary tables for rows of packed documents."""
        length, device = document_BT.shape[1], document_BT.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        angle = torch.arange(length, device=device).float()[:, None] * self.get_buffer("frequency")
        return View(
            allowed_BTS=(document_BT[:, :, None] == document_BT[:, None]) & causal,
            cos_TD=angle.cos(),
            sin_TD=angle.sin(),
            rows_N=torch.empty(0, dtype=torch.long, device=device) if rows_N is None else rows_N,
            keep_BT1=torch.ones(*document_BT.shape, 1, device=device) if keep_BT1 is None else keep_BT1,
            attention=attention,
        )

    def forward(self, tokens_BT: Tensor, view: View, draft: bool = True) -> Hidden:
        """Hidden states of the main model and, with `draft`, of the NextN layer (row i drafts token i+2)."""
        embedded = self.embed_tokens(tokens_BT)
        x, loss, loads = embedded, torch.zeros((), device=tokens_BT.device), []
        for layer in self.layers:
            x, layer_loss, load = layer(x, view)
            loss = loss + layer_loss
            loads.append(load)
        main = self.norm(x)
        if not draft:
            return Hidden(main, main, loss, tuple(loads))
        shifted = torch.cat((embedded[:, 1:], embedded[:, -1:]), 1)
        drafted, layer_loss, load = self.nextn(self.nextn.join(shifted, main), view)
        return Hidden(main, self.nextn.shared_norm(drafted), loss + layer_loss, (*loads, load))

    def moe_layers(self) -> list[MoE]:
        """The layers whose loads `Hidden.loads` reports with a length above 0, in that order."""
        return [layer.mlp for layer in (*self.layers, self.nextn) if isinstance(layer.mlp, MoE)]
