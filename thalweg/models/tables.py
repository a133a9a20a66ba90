"""Pieces of the weight tables that several families share. Published names on the left, parameters on the right."""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from thalweg.config.model import Mla, ModelFacts, Moe
from thalweg.layers.rotary import pairs_from_halves
from thalweg.weights.table import Table, Transform, same

ROTARY_BUFFERS = (
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"  # old exports carry them; they follow from the config
)
LATENT_SCALES = ("", "attn.", "mla_attn.", "k_proj.")  # where tools put the scales of a cache in FP8


def outside(facts: ModelFacts) -> Table:
    """Embedding, final norm and head. A tied checkpoint may repeat the embedding as its head."""
    table = Table(skips=[ROTARY_BUFFERS])
    table.add("model.embed_tokens.weight", "embedding.weight")
    table.add("model.norm.weight", "norm.weight")
    if facts.tied:
        table.skips.append(r"lm_head\.weight")
    else:
        table.add("lm_head.weight", "head.weight")
    return table


def norms(table: Table, layer: int, into: str = "layers.{}") -> None:
    """The two norms of a pre-norm layer."""
    there = into.format(layer)
    table.add(f"model.layers.{layer}.input_layernorm.weight", f"{there}.attention_norm.weight")
    table.add(f"model.layers.{layer}.post_attention_layernorm.weight", f"{there}.mlp_norm.weight")


def mlp(table: Table, source: str, target: str, size: int, bias: bool = False) -> None:
    """A SwiGLU MLP with gate above up."""
    for kind in ("weight", "bias") if bias else ("weight",):
        table.stack({f"{source}.gate_proj.{kind}": size, f"{source}.up_proj.{kind}": size}, f"{target}.gate_up.{kind}")
        table.add(f"{source}.down_proj.{kind}", f"{target}.down.{kind}")


def gqa(table: Table, facts: ModelFacts, layer: int, *, qk_norm: bool, out_bias: bool) -> None:
    """Dense attention of one of the model's layers."""
    source, target = f"model.layers.{layer}.self_attn", f"layers.{layer}.attention"
    gqa_of(table, facts, source, target, qk_norm=qk_norm, out_bias=out_bias)
    for plane, letter in (("key", "k"), ("value", "v")):
        names = f"{letter}_scale", f"{letter}_proj.{letter}_scale", f"attn.{letter}_scale"
        table.scales[plane, layer] = tuple(f"{source}.{name}" for name in names)


def gqa_of(table: Table, facts: ModelFacts, source: str, target: str, *, out_bias: bool, qk_norm: bool = False) -> None:
    """Dense attention: query and key rows go from halves to pairs."""
    dim = facts.head_dim
    pairs = {
        heads: partial(pairs_from_halves, heads=heads, dim=facts.rope.dim) for heads in (1, facts.heads, facts.kv_heads)
    }
    for kind in ("weight", "bias") if facts.qkv_bias else ("weight",):
        q, k, v = (f"{source}.{name}_proj.{kind}" for name in "qkv")
        rows = {q: facts.heads * dim, k: facts.kv_heads * dim, v: facts.kv_heads * dim}
        table.stack(rows, f"{target}.qkv.{kind}", transforms={q: pairs[facts.heads], k: pairs[facts.kv_heads]})
    table.add(f"{source}.o_proj.weight", f"{target}.out.weight")
    if out_bias:
        table.add(f"{source}.o_proj.bias", f"{target}.out.bias")
    if qk_norm:
        table.add(f"{source}.q_norm.weight", f"{target}.query_norm.weight", transform=pairs[1])
        table.add(f"{source}.k_norm.weight", f"{target}.key_norm.weight", transform=pairs[1])


def mla(
    table: Table, facts: ModelFacts, layer: int, indexed: bool, into: str = "layers.{}", own_index: bool = False
) -> None:
    """MLA: everything that reads the hidden state in one GEMM, everything that reads the query latent in another; own_index: but for the
    indexer (`Parts.own_index`)."""
    assert facts.mla is not None
    shape, source, target = facts.mla, f"model.layers.{layer}.self_attn", f"{into.format(layer)}.attention"
    queries = facts.heads * (shape.nope + shape.rope)
    first = {f"{source}.q_a_proj.weight": shape.q_lora} if shape.q_lora else {f"{source}.q_proj.weight": queries}
    down = first | {f"{source}.kv_a_proj_with_mqa.weight": shape.kv_lora + shape.rope}
    up = {f"{source}.q_b_proj.weight": queries}
    turns: dict[str, Transform] = {}
    if indexed:
        turns = _indexer(table, facts, f"{source}.indexer", f"{target}.indexer")
        assert facts.indexer is not None
        key, query = f"{source}.indexer.wk.weight", f"{source}.indexer.wq_b.weight"
        if own_index:
            table.add(key, f"{target}.index_key.weight", transform=turns.get(key, same))
            table.add(query, f"{target}.index_query.weight", transform=turns.get(query, same))
        else:
            down[key], up[query] = facts.indexer.dim, facts.indexer.heads * facts.indexer.dim
    table.stack(down, f"{target}.down.weight", transforms=turns)
    if shape.q_lora:
        table.stack(up, f"{target}.up.weight", transforms=turns)
        table.add(f"{source}.q_a_layernorm.weight", f"{target}.query_norm.weight")
    table.add(f"{source}.kv_a_layernorm.weight", f"{target}.latent_norm.weight")
    whole = (facts.heads * (shape.nope + shape.v), shape.kv_lora)
    for parameter, half in (("uk", _key_half), ("uv", _value_half)):
        table.add(
            f"{source}.kv_b_proj.weight",
            f"{target}.{parameter}",
            transform=partial(half, mla=shape, heads=facts.heads),
            shape=whole,
        )
    table.add(f"{source}.o_proj.weight", f"{target}.out.weight")
    # a latent is key and value at once, and the key's scale is its
    table.scales["latent", layer] = tuple(f"{source}.{where}k_scale" for where in LATENT_SCALES)
    table.skips += [re.escape(f"{source}.{where}v_scale") for where in LATENT_SCALES]


def _indexer(table: Table, facts: ModelFacts, source: str, target: str) -> dict[str, Transform]:
    """Adds the indexer's own parameters; returns how the rows of its projections go from halves to pairs."""
    assert facts.indexer is not None and facts.mla is not None
    turns: dict[str, Transform] = {}
    if not facts.indexer.interleaved:
        turns = {
            f"{source}.wk.weight": partial(pairs_from_halves, heads=1, dim=facts.mla.rope),
            f"{source}.wq_b.weight": partial(pairs_from_halves, heads=facts.indexer.heads, dim=facts.mla.rope),
            f"{source}.k_norm.weight": partial(pairs_from_halves, heads=1, dim=facts.mla.rope),
            f"{source}.k_norm.bias": partial(pairs_from_halves, heads=1, dim=facts.mla.rope),
        }
    for kind in ("weight", "bias"):
        name = f"{source}.k_norm.{kind}"
        table.add(name, f"{target}.key_norm.{kind}", transform=turns.get(name, same))
    table.add(f"{source}.weights_proj.weight", f"{target}.weights")
    return turns


def moe(table: Table, moe: Moe, layer: int, into: str = "layers.{}", stacked_shared: bool = False) -> None:
    """Router, experts one by one into their stacks, shared experts as one MLP or behind the routed ones (`Parts.stacked_shared`)."""
    source, target, size = f"model.layers.{layer}.mlp", f"{into.format(layer)}.mlp", moe.intermediate
    table.add(f"{source}.gate.weight", f"{target}.router.weight")
    if moe.method == "noaux_tc":
        table.add(f"{source}.gate.e_score_correction_bias", f"{target}.router.bias")
    for expert in range(moe.experts):
        gate, up, down = (f"{source}.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
        table.stack({gate: size, up: size}, f"{target}.experts.w13", lead=(expert,))
        table.add(down, f"{target}.experts.w2", (expert,))
    if moe.shared and stacked_shared:
        _stack_shared(table, moe, f"{source}.shared_experts", f"{target}.experts")
    elif moe.shared:
        mlp(table, f"{source}.shared_experts", f"{target}.shared", moe.shared * size)


def _stack_shared(table: Table, moe: Moe, source: str, target: str) -> None:
    """A SwiGLU of width s · I is the sum of s SwiGLUs of width I: each becomes an expert of the stack."""
    size = moe.intermediate
    for i in range(moe.shared):
        part, expert = slice(i * size, (i + 1) * size), moe.experts + i
        table.add(f"{source}.gate_proj.weight", f"{target}.w13", (expert, slice(0, size)), take=(part,))
        table.add(f"{source}.up_proj.weight", f"{target}.w13", (expert, slice(size, 2 * size)), take=(part,))
        table.add(f"{source}.down_proj.weight", f"{target}.w2", (expert,), take=(slice(None), part))


def _key_half(kv_b: Tensor, mla: Mla, heads: int) -> Tensor:
    """W_UK [H, nope, r]: the first rows of each head of kv_b."""
    return kv_b.view(heads, mla.nope + mla.v, mla.kv_lora)[:, : mla.nope]


def _value_half(kv_b: Tensor, mla: Mla, heads: int) -> Tensor:
    """W_UV transposed [H, r, v]: the last rows of each head of kv_b."""
    return kv_b.view(heads, mla.nope + mla.v, mla.kv_lora)[:, mla.nope :].transpose(1, 2)
