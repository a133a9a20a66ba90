"""What a checkpoint's config.json says, as one frozen value: `ModelFacts`. No torch.

Field names follow Thalweg, not the file: every family is read into the same record. Both spellings of the rotary fields
are understood (`rope_scaling` + `rope_theta`, and transformers ≥ 5's `rope_parameters`). Nonsense is a CheckpointError
that names the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Mapping

from thalweg.core.errors import CheckpointError

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Rotary embedding. dim: how many dims of a head rotate; theta: base. kind: "default", "linear", "yarn" or
    "llama3".

    YaRN (arXiv 2309.00071): factor, beta_fast, beta_slow, original (the context of pre-training), mscale and
    mscale_all_dim (0 is absent). attention_factor multiplies cos and sin; 0 is "derive it". llama3: low_freq_factor and
    high_freq_factor.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaFacts:
    """Multi-head latent attention (DeepSeek-V2 §2.1)."""

    q_lora: int  # 0: queries come from the hidden state directly
    kv_lora: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFacts:
    """DSA's lightning indexer."""

    heads: int
    dim: int
    topk: int
    interleaved: bool  # the published weights rotate neighbouring dims (GLM-5), not halves (V3.2)
    full: tuple[bool, ...]  # layers with their own indexer; others use the selection of the last one before


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFacts:
    """Mixture of experts."""

    experts: int
    shared: int
    topk: int
    intermediate: int
    method: str  # "greedy", "group_limited_greedy" (softmax scores) or "noaux_tc" (sigmoid scores and a bias)
    groups: int
    topk_groups: int
    renormalize: bool
    scale: float
    sparse: tuple[bool, ...]  # which layers have experts

    def in_layer(self, layer: int) -> bool:
        """NextN layers, which follow the main ones, have experts."""
        return layer >= len(self.sparse) or self.sparse[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's config.json, under one set of names."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # of dense attention, as `head_dim`
    head_dim: int
    intermediate: int
    norm_eps: float
    context: int  # longest sequence in tokens
    rope: RopeFacts
    tied: bool
    qkv_bias: bool
    attention_bias: bool
    mlp_bias: bool
    mla: MlaFacts | None
    indexer: IndexerFacts | None
    moe: MoeFacts | None
    nextn: int  # NextN layers stored after the main layers
    quantization_config: dict[str, Any]  # as published, see `quant.catalog`; empty: none
    dtype: str  # as published ("bfloat16")
    bos: int | None
    eos: tuple[int, ...]  # ids that end a generation by default


def read_config(folder: Path, whose: str) -> dict[str, Any]:
    """The content of `folder`/config.json. whose: folder it is, for errors. Raises CheckpointError when it is missing
    or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder of {whose} holds config.json beside its *.safetensors"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The name of the class that computes the model. Raises CheckpointError."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{where}: architectures must be a list with a class name first, got {architectures!r}")
    return architectures[0]


def facts_of(
    config: Mapping[str, Any],
    where: str,
    fields: Mapping[str, tuple[str, ...]] = NO_FIELDS,
    defaults: Mapping[str, Any] = NO_FIELDS,
) -> ModelFacts:
    """The facts of a config.json's content. where: names it in errors. fields: other names of fields, by the name that
    is read here. defaults: of fields that are absent. Raises CheckpointError naming the first bad field.
    """
    read = _Reader(config, where, fields, defaults)
    architecture = architecture_of(config, where)
    heads = read.count("num_attention_heads")
    mla = _mla(read)
    head_dim = read.count("head_dim", 0) or read.count("hidden_size") // heads
    facts = ModelFacts(
        architecture=architecture,
        vocab=read.count("vocab_size"),
        hidden=read.count("hidden_size"),
        layers=read.count("num_hidden_layers"),
        heads=heads,
        kv_heads=heads if mla else read.count("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=read.count("intermediate_size"),
        norm_eps=read.number("rms_norm_eps", 1e-6, above=0.0),
        context=read.count("max_position_embeddings"),
        rope=_rope(read, mla.rope if mla else head_dim),
        tied=read.flag("tie_word_embeddings", False),
        qkv_bias=read.flag("qkv_bias", read.flag("attention_bias", False)),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
        mla=mla,
        indexer=_indexer(read),
        moe=_moe(read),
        nextn=read.count("num_nextn_predict_layers", 0),
        quantization_config=_quantization(read),
        dtype=str(read.get("torch_dtype", read.get("dtype", "bfloat16"))).removeprefix("torch."),
        bos=next(iter(read.tokens("bos_token_id")), None),
        eos=read.tokens("eos_token_id"),
    )
    _check(facts, read)
    return facts


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to the fields, with errors that name them. JSON null counts as absent. Fields as of `facts_of`."""

    config: Mapping[str, Any]
    where: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def error(self, field: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {field} {message}")

    def get(self, field: str, default: Any = None) -> Any:
        for name in (field, *self.fields.get(field, ())):
            if self.config.get(name) is not None:
                return self.config[name]
        return self.defaults.get(field, default)

    def count(self, field: str, default: int | None = None) -> int:
        """A non-negative integer; without a default it is required and positive."""
        value = self.get(field, default)
        least, kind = (1, "positive") if default is None else (0, "non-negative")
        if value is None:
            raise self.error(field, "is missing")
        if type(value) is not int or value < least:
            raise self.error(field, f"must be a {kind} integer, got {value!r}")
        return value

    def number(self, field: str, default: float, above: float) -> float:
        value = self.get(field, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
            raise self.error(field, f"must be a number above {above:g}, got {value!r}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r}")
        return value

    def tokens(self, field: str) -> tuple[int, ...]:
        value = self.get(field, [])
        values = value if isinstance(value, list) else [value]
        if any(type(v) is not int or v < 0 for v in values):
            raise self.error(field, f"must be a token id or a list of them, got {value!r}")
        return tuple(values)


def _rope(read: _Reader, dim: int) -> RopeFacts:
    parameters = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise read.error("rope_scaling", f"must be an object, got {parameters!r}")
    where, required = f"{read.where}: rope_scaling", {"factor": 0.0}
    of = _Reader({"rope_theta": read.get("rope_theta"), **parameters}, where, defaults=required)
    kind = of.get("rope_type", of.get("type", "default"))
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise of.error("rope_type", f"{kind!r} is unknown; there is default, linear, yarn, llama3")
    theta = of.number("rope_theta", 10000.0, above=0.0)
    if kind == "default":
        return RopeFacts(dim=dim, theta=theta)
    numbers = {}
    for one in dataclasses.fields(RopeFacts):
        if isinstance(one.default, float):  # those that are off by default may have any value
            numbers[one.name] = of.number(one.name, one.default, 0.0 if one.default else -math.inf)
    original = of.count("original_max_position_embeddings", read.count("max_position_embeddings"))
    truncate = of.flag("truncate", True)
    return RopeFacts(dim=dim, theta=theta, kind=kind, original=original, truncate=truncate, **numbers)


def _mla(read: _Reader) -> MlaFacts | None:
    if read.get("kv_lora_rank") is None:
        return None
    return MlaFacts(
        q_lora=read.count("q_lora_rank", 0),
        kv_lora=read.count("kv_lora_rank"),
        nope=read.count("qk_nope_head_dim"),
        rope=read.count("qk_rope_head_dim"),
        v=read.count("v_head_dim"),
    )


def _indexer(read: _Reader) -> IndexerFacts | None:
    if read.get("index_topk") is None:
        return None
    layers = read.count("num_hidden_layers")
    return IndexerFacts(
        heads=read.count("index_n_heads"),
        dim=read.count("index_head_dim"),
        topk=read.count("index_topk"),
        interleaved=read.flag("indexer_rope_interleave", read.get("model_type") == "glm_moe_dsa"),
        full=_indexer_layers(read, layers),
    )


def _indexer_layers(read: _Reader, layers: int) -> tuple[bool, ...]:
    """IndexCache's schedule (arXiv 2603.12201): an explicit list or pattern, else every `freq`-th layer from `offset`
    on.
    """
    given = read.get("indexer_types") or read.get("index_topk_pattern")
    if given is not None:
        full = tuple(kind in ("full", "F") for kind in given)
        if len(full) != layers or not full[0]:
            raise read.error(
                "indexer_types", f"must name a kind for each of {layers} layers, the first one full, got {given!r}"
            )
        return full
    every, offset = max(read.count("index_topk_freq", 1), 1), read.count("index_skip_topk_offset", 2)
    return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def _moe(read: _Reader) -> MoeFacts | None:
    experts = read.count("n_routed_experts", 0)
    if not experts:
        return None
    softmax = read.get("scoring_func", "softmax" if read.get("model_type") == "deepseek_v2" else "sigmoid") == "softmax"
    method = read.get("topk_method", "greedy" if softmax else "noaux_tc")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc") or softmax == (method == "noaux_tc"):
        raise read.error(
            "topk_method", f"{method!r} with scoring_func {read.get('scoring_func')!r} is not a router of DeepSeek's"
        )
    return MoeFacts(
        experts=experts,
        shared=read.count("n_shared_experts", 0),
        topk=read.count("num_experts_per_tok"),
        intermediate=read.count("moe_intermediate_size"),
        method=method,
        groups=read.count("n_group", 1) or 1,
        topk_groups=read.count("topk_group", 1) or 1,
        renormalize=read.flag("norm_topk_prob", not softmax),
        scale=read.number("routed_scaling_factor", 1.0, above=0.0),
        sparse=_sparse_layers(read),
    )


def _sparse_layers(read: _Reader) -> tuple[bool, ...]:
    """DeepSeek: every `moe_layer_freq`-th layer from `first_k_dense_replace` on, or `mlp_layer_types`. Qwen: every
    `decoder_sparse_step`-th layer, but for `mlp_only_layers`.
    """
    layers = read.count("num_hidden_layers")
    kinds = read.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
            raise read.error("mlp_layer_types", f"must be dense or sparse for each of {layers} layers, got {kinds!r}")
        return tuple(kind == "sparse" for kind in kinds)
    first, every = read.count("first_k_dense_replace", 0), read.count("moe_layer_freq", 1) or 1
    step, dense = read.count("decoder_sparse_step", 1) or 1, read.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise read.error("mlp_only_layers", f"must be a list of layer numbers, got {dense!r}")
    return tuple(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def _quantization(read: _Reader) -> dict[str, Any]:
    config = read.get("quantization_config", {})
    if not isinstance(config, dict):
        raise read.error("quantization_config", f"must be an object, got {config!r}")
    return config


def _check(facts: ModelFacts, read: _Reader) -> None:
    """What must hold between fields."""
    if not facts.kv_heads or facts.heads % facts.kv_heads:
        raise read.error(
            "num_key_value_heads", f"must divide num_attention_heads ({facts.heads}), got {facts.kv_heads}"
        )
    if facts.rope.dim % 2:
        raise read.error(
            "qk_rope_head_dim" if facts.mla else "head_dim", f"must be even to rotate, got {facts.rope.dim}"
        )
    if facts.mla is not None:
        for field in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"):
            if read.count(field, 0) % 2:
                raise read.error(
                    field, f"must be even (pairs of dims rotate in place after it), got {read.count(field, 0)}"
                )
    if read.get("hidden_act", "silu") != "silu":
        raise read.error("hidden_act", f"must be silu, got {read.get('hidden_act')!r}")
    if read.get("use_sliding_window", False):
        raise read.error("use_sliding_window", "true is not supported: attention would need a window")
    if facts.moe is not None:
        _check_moe(facts.moe, read)
    if facts.indexer is not None:
        if facts.mla is None or not facts.mla.q_lora:
            raise read.error("index_topk", "needs MLA with q_lora_rank: the indexer reads the query latent")
        if facts.indexer.dim < facts.mla.rope:
            raise read.error(
                "index_head_dim", f"must be at least qk_rope_head_dim ({facts.mla.rope}), got {facts.indexer.dim}"
            )


def _check_moe(moe: MoeFacts, read: _Reader) -> None:
    if moe.renormalize and moe.method != "noaux_tc" and moe.scale != 1.0:
        # DeepSeek-V2's code would then drop the scaling factor, transformers applies it; no published model asks
        raise read.error("norm_topk_prob", "true with softmax scores and a routed_scaling_factor is ambiguous")
    if moe.experts % moe.groups:
        raise read.error("n_group", f"must divide n_routed_experts ({moe.experts}), got {moe.groups}")
    if moe.topk_groups > moe.groups:
        raise read.error("topk_group", f"must be at most n_group ({moe.groups}), got {moe.topk_groups}")
    reachable = moe.experts // moe.groups * (moe.topk_groups if moe.method != "greedy" else moe.groups)
    if moe.topk > reachable:
        raise read.error(
            "num_experts_per_tok", f"must be at most the {reachable} experts of the chosen groups, got {moe.topk}"
        )
    if moe.method == "noaux_tc" and moe.groups > 1 and moe.experts // moe.groups < 2:
        raise read.error(
            "n_group", f"leaves one expert a group ({moe.experts} experts): a group scores by its best two"
        )
