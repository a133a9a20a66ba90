"""The config.json of a checkpoint as one frozen value: `ModelFacts`. No torch.

The records of this module are the table of the fields that are read: each field has its type, bounds and default, and
the class says its published name. Field names follow Thalweg, not the file: every family is read into the same records.
Both spellings of the rotary fields are understood (`rope_scaling` + `rope_theta`, and transformers ≥ 5's
`rope_parameters`). Nonsense is a CheckpointError that names the field, and so is a field that no record reads and that
may change the mathematics.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.files import read_object

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
# far above every published model, and low enough that no product of sizes overflows
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Units = Annotated[int, Meta(ge=1, le=4096)]  # heads, experts
Layers = Annotated[int, Meta(ge=1, le=512)]
Context = Annotated[int, Meta(ge=1, le=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Place = Annotated[int, Meta(ge=0)]  # beyond the end: nowhere
Positive = Annotated[float, Meta(gt=0, le=1e15)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
Amplitude = Annotated[float, Meta(ge=0, le=100)]
R = TypeVar("R", bound=msgspec.Struct)


class RopeFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"theta": "rope_theta", "kind": "rope_type", "original": "original_max_position_embeddings"},
):
    """Rotary embedding. YaRN: arXiv 2309.00071."""

    dim: int  # dims of a head that rotate
    theta: Annotated[float, Meta(gt=1, le=1e15)] = 10000.0  # base
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: Factor = 1.0
    original: Annotated[int, Meta(ge=0, le=1 << 24)] = 0  # context of pre-training
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: Amplitude = 0.0  # 0: absent
    mscale_all_dim: Amplitude = 0.0
    attention_factor: Amplitude = 0.0  # multiplies cos and sin; 0: derived
    truncate: bool = True
    low_freq_factor: Factor = 1.0  # of llama3
    high_freq_factor: Factor = 4.0


class MlaFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "q_lora": "q_lora_rank",
        "kv_lora": "kv_lora_rank",
        "nope": "qk_nope_head_dim",
        "rope": "qk_rope_head_dim",
        "v": "v_head_dim",
    },
):
    """Multi-head latent attention (DeepSeek-V2 §2.1)."""

    q_lora: Count = 0  # 0: queries come from the hidden state directly
    kv_lora: Size
    nope: Size
    rope: Size
    v: Size


class IndexerFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "heads": "index_n_heads",
        "dim": "index_head_dim",
        "topk": "index_topk",
        "interleaved": "indexer_rope_interleave",
        "hadamard": "index_hadamard",
    },
):
    """DSA's lightning indexer."""

    heads: Units
    dim: Size
    topk: Size
    interleaved: bool  # the published weights rotate neighbouring dims (GLM-5), not halves (V3.2)
    hadamard: bool  # the published code turns queries and keys by a Hadamard matrix before it rounds them to FP8
    full: tuple[bool, ...]  # layers with their own indexer; others use the selection of the last one before
    offset: int  # the first layer that shares at the earliest, where a frequency says which do


class MoeFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "experts": "n_routed_experts",
        "shared": "n_shared_experts",
        "topk": "num_experts_per_tok",
        "intermediate": "moe_intermediate_size",
        "method": "topk_method",
        "groups": "n_group",
        "topk_groups": "topk_group",
        "renormalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
    },
):
    """Mixture of experts."""

    experts: Units
    shared: Annotated[int, Meta(ge=0, le=4096)] = 0
    topk: Units
    intermediate: Size
    method: Literal["greedy", "group_limited_greedy", "noaux_tc"]  # softmax scores; the last: sigmoid and a bias
    groups: Units = 1
    topk_groups: Units = 1
    renormalize: bool
    scale: Positive = 1.0
    sparse: tuple[bool, ...]  # which layers have experts

    def in_layer(self, layer: int) -> bool:
        """NextN layers, which follow the main ones, have experts."""
        return layer >= len(self.sparse) or self.sparse[layer]


class ModelFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "intermediate": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "context": "max_position_embeddings",
        "tied": "tie_word_embeddings",
        "nextn": "num_nextn_predict_layers",
        "dtype": "torch_dtype",
        "bos": "bos_token_id",
        "eos": "eos_token_id",
    },
):
    """A model's config.json, under one set of names."""

    architecture: str
    vocab: Size
    hidden: Size
    layers: Layers
    heads: Units
    kv_heads: Units  # of dense attention, as `head_dim`
    head_dim: Count
    intermediate: Size
    norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    context: Context  # longest sequence in tokens
    rope: RopeFacts
    tied: bool = False
    qkv_bias: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    mla: MlaFacts | None
    indexer: IndexerFacts | None
    moe: MoeFacts | None
    nextn: Annotated[int, Meta(ge=0, le=64)] = 0  # NextN layers stored after the main layers
    quantization_config: dict[str, Any] = {}  # as published, see `quant.catalog`; empty: none
    dtype: str  # as published ("bfloat16")
    bos: Place | None
    eos: tuple[Place, ...]  # ids that end a generation by default
    family_fields: dict[str, Any] = {}  # as published: what the layers of this family alone read

    def kv_replicas(self, ranks: int) -> int:
        """How many of the ranks of an attention hold the same KV: all of latents, else those with the same key head."""
        return ranks if self.mla is not None else max(ranks // self.kv_heads, 1)


class OtherFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that other facts are made of, and fields that have one value here."""

    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: bool = False
    sliding_window: Place = 0
    max_window_layers: Place = 0  # the first layer with a window, without `layer_types`
    layer_types: list[Literal["full_attention", "sliding_attention", "indexed_attention"]] = []
    rope_interleave: bool = True  # of MLA: neighbouring dims rotate, not halves
    model_type: str = ""
    num_hidden_layers: Layers
    scoring_func: str = ""
    # layers with an indexer of their own (IndexCache, arXiv 2603.12201): a list or pattern, else every `freq`-th layer
    # from `offset` on
    indexer_types: list[str] = []
    index_topk_pattern: str = ""
    index_topk_freq: Size = 1
    index_skip_topk_offset: Place = 2
    # layers with experts. DeepSeek: every `freq`-th from `first` on, or a list; Qwen: every `step`-th, without a list
    mlp_layer_types: list[Literal["dense", "sparse"]] = []
    first_k_dense_replace: Place = 0
    moe_layer_freq: Place = 1
    decoder_sparse_step: Place = 1
    mlp_only_layers: list[int] = []


RECORDS = MlaFacts, IndexerFacts, MoeFacts, ModelFacts, OtherFields
OF_ROPE = {*RopeFacts.__struct_encode_fields__, "type"}
READ = {name for kind in RECORDS for name in kind.__struct_encode_fields__} | {
    "architectures", "dtype", "rope_theta", "rope_scaling", "rope_parameters",
}  # fmt: skip
# of training, of `generate`, and what other fields say too
WITHOUT_EFFECT = re.compile(
    r"_.*|.*(_dropout|_pdrop|_loss_coef|_loss_alpha|_version)|unsloth_.*|output_.*|return_dict.*"
    r"|(pad|unk|sep|cls|mask|decoder_start|forced_bos|forced_eos)_token_id|initializer_range|init_std|use_cache|seq_aux"
    r"|pretraining_tp|ep_size|auto_map|qk_head_dim|id2label|label2id|problem_type|tokenizer_class|max_length|do_sample"
    r"|temperature|top_k|top_p|typical_p|num_beams|num_beam_groups|num_return_sequences|(repetition|length)_penalty"
    r"|name_or_path|index_share_for_mtp_iteration|architecture|attn_implementation"
    r"|(model_max|max_seq|seq|max_sequence)_len(gth)?"
)


def read_config(folder: Path, whose: str) -> dict[str, Any]:
    """The content of `folder`/config.json. whose: folder it is, for errors. Raises CheckpointError when it is missing
    or no JSON object.
    """
    path = folder / "config.json"
    try:
        return read_object(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder of {whose} holds config.json beside its *.safetensors"
        ) from None


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The name of the class that computes the model. Raises CheckpointError."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(
            f"{where}: architectures must be a list with a class name first, got {_short(architectures)}"
        )
    return architectures[0]


def facts_of(
    config: Mapping[str, Any],
    where: str,
    fields: Mapping[str, tuple[str, ...]] = NO_FIELDS,
    defaults: Mapping[str, Any] = NO_FIELDS,
) -> ModelFacts:
    """The facts of a config.json's content. JSON null counts as absent. where: names it in errors. fields: other names
    of fields, by the name that is read here. defaults: of fields that are absent. Raises CheckpointError naming the
    first bad field.
    """
    given = {name: value for name, value in config.items() if value is not None}
    for name, others in fields.items():
        for alias in others:
            if alias in given:
                given.setdefault(name, given[alias])
    given = {
        "qkv_bias": given.get("attention_bias", False),
        "torch_dtype": given.get("dtype", "bfloat16"),
        "indexer_rope_interleave": given.get("model_type") == "glm_moe_dsa",
        "index_hadamard": architecture_of(config, where) == "DeepseekV32ForCausalLM",
        "eos_token_id": (),
        **defaults,
        **given,
        "architecture": architecture_of(config, where),
    }
    other = record(OtherFields, given, where)
    mla = record(MlaFacts, given, where) if "kv_lora_rank" in given else None
    heads = given.get("num_attention_heads")
    if type(heads) is int and type(given.get("hidden_size")) is int and heads > 0:
        given["head_dim"] = given.get("head_dim") or given["hidden_size"] // heads
        given["num_key_value_heads"] = heads if mla else given.get("num_key_value_heads", heads)
    bos, eos = given.get("bos_token_id"), given["eos_token_id"]
    given |= {
        "torch_dtype": str(given["torch_dtype"]).removeprefix("torch."),
        "bos_token_id": next(iter(bos), None) if isinstance(bos, list) else bos,
        "eos_token_id": [eos] if isinstance(eos, int) else eos,
        "mla": mla,
        "indexer": _indexer(given, other, where) if "index_topk" in given else None,
        "moe": _moe(given, other, where) if given.get("n_routed_experts") else None,
        "rope": _rope(given, mla.rope if mla else given.get("head_dim", 0), where),
    }
    facts = record(ModelFacts, given, where)
    for is_wrong, field, message in _conditions(facts, other):
        if is_wrong:
            raise CheckpointError(f"{where}: {field} {message}, got {_short(given.get(field))}")
    return facts


def _short(value: Any) -> str:
    """A value in an error, on a part of a line."""
    return reprlib.repr(value)


def check_read(given: Mapping[str, Any], read: set[str], where: str) -> None:
    """Raises CheckpointError for a field that is not in `read`. Empty values switch nothing on."""
    for name, value in given.items():
        is_off = value in (None, False, "", [], {}) or (name, value) == ("partial_rotary_factor", 1.0)
        if name not in read and not WITHOUT_EFFECT.fullmatch(name) and not is_off:
            raise CheckpointError(
                f"{where}: {name} is {_short(value)}, which is not supported and may change what the model computes; if"
                " it does not, delete it from the file"
            )


def record(kind: type[R], given: Mapping[str, Any], where: str) -> R:
    """A record of the fields that it reads. Raises CheckpointError naming the first that is wrong."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        if missing := re.search("missing required field `(.*?)`", str(error)):
            raise CheckpointError(f"{where}: {missing[1]} is missing") from None
        message, _, place = str(error).partition(" - at ")
        name = re.findall(r"\w+", place)[0]
        raise CheckpointError(f"{where}: {name}: {message}; it is {_short(given.get(name))}") from None


def _rope(given: Mapping[str, Any], dim: int, where: str) -> RopeFacts:
    parameters = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{where}: rope_scaling must be an object, got {_short(parameters)}")
    where = f"{where}: rope_scaling"
    parameters = {name: value for name, value in parameters.items() if value is not None}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    check_read(parameters, OF_ROPE, where)
    basis = {"rope_theta": given.get("rope_theta", 10000.0), **parameters, "dim": dim, "rope_type": kind}
    if kind == "default":
        return record(RopeFacts, {name: basis[name] for name in ("dim", "rope_theta")}, where)
    if "factor" not in parameters:
        raise CheckpointError(f"{where}: factor is missing")
    context = {"original_max_position_embeddings": given.get("max_position_embeddings", 0)}
    rope = record(RopeFacts, context | basis, where)
    if kind != "linear" and not rope.original:
        raise CheckpointError(f"{where}: original_max_position_embeddings must be at least 1, got 0")
    return rope


def _indexer(given: Mapping[str, Any], other: OtherFields, where: str) -> IndexerFacts:
    layers, offset = other.num_hidden_layers, other.index_skip_topk_offset
    field, kinds, known = "indexer_types", other.indexer_types, ["full", "shared"]
    if not kinds:
        pattern = other.index_topk_pattern or index_pattern(other.index_topk_freq, layers, offset)
        field, kinds, known = "index_topk_pattern", list(pattern), ["F", "S"]
    if len(kinds) != layers or kinds[0] != known[0] or not {*kinds} <= {*known}:
        raise CheckpointError(
            f"{where}: {field} must have {' or '.join(known)} for each of {layers} layers, the first one {known[0]},"
            f" got {_short(kinds)}"
        )
    return record(IndexerFacts, {**given, "full": [kind == known[0] for kind in kinds], "offset": offset}, where)


def index_pattern(every: int, layers: int, offset: int = 2) -> str:
    """IndexCache's pattern: F for the first `offset` layers and each `every`th from there on, S for the others."""
    return "".join("FS"[max(layer - offset + 1, 0) % every > 0] for layer in range(layers))


def with_index_pattern(facts: ModelFacts, pattern: str) -> ModelFacts:
    """The facts with other layers that select context. pattern: as `EngineConfig.index_topk_pattern`. Raises
    UnsupportedConfig.
    """
    if not pattern:
        return facts
    name, indexer = "index_topk_pattern", facts.indexer
    if indexer is None:
        raise UnsupportedConfig(f"{name}: {facts.architecture} has no sparse attention, all layers see all context")
    if len(pattern) != facts.layers or set(pattern) - {"F", "S"} or pattern[0] != "F":
        raise UnsupportedConfig(
            f"{name}: {pattern} must have an F or S for each of {facts.layers} layers, the first one F"
        )
    full = tuple(kind == "F" for kind in pattern)
    if lacking := [layer for layer, wanted in enumerate(full) if wanted and not indexer.full[layer]]:
        raise UnsupportedConfig(
            f"{name}, index_topk_freq: layer {lacking[0]} of this checkpoint shares a selection: it must be S"
        )
    return msgspec.structs.replace(facts, indexer=msgspec.structs.replace(indexer, full=full))


def _moe(given: Mapping[str, Any], other: OtherFields, where: str) -> MoeFacts:
    """A number of groups may be published as 0."""
    is_v2 = other.model_type == "deepseek_v2"
    is_softmax = (other.scoring_func or ("softmax" if is_v2 else "sigmoid")) == "softmax"
    routing = {
        "topk_method": "greedy" if is_softmax else "noaux_tc",
        "norm_topk_prob": not is_softmax,
        **given,
        "n_group": given.get("n_group") or 1,
        "topk_group": given.get("topk_group") or 1,
        "sparse": _sparse_layers(other, where),
    }
    moe = record(MoeFacts, routing, where)
    if is_softmax == (moe.method == "noaux_tc"):
        raise CheckpointError(
            f"{where}: topk_method {moe.method!r} with scoring_func {other.scoring_func!r} is not a router of"
            " DeepSeek's"
        )
    return moe


def _sparse_layers(other: OtherFields, where: str) -> list[bool]:
    layers, kinds = other.num_hidden_layers, other.mlp_layer_types
    if kinds:
        if len(kinds) != layers:
            raise CheckpointError(
                f"{where}: mlp_layer_types must have a kind for each of {layers} layers, got {_short(kinds)}"
            )
        return [kind == "sparse" for kind in kinds]
    every, step = other.moe_layer_freq or 1, other.decoder_sparse_step or 1
    return [
        layer >= other.first_k_dense_replace
        and layer % every == 0
        and (layer + 1) % step == 0
        and layer not in other.mlp_only_layers
        for layer in range(layers)
    ]


def _conditions(facts: ModelFacts, other: OtherFields) -> Iterator[tuple[object, str, str]]:
    """Constraints between fields: (whether one is violated, the wrong field, the rule)."""
    mla, moe, indexer = facts.mla, facts.moe, facts.indexer
    for field, ids in {"eos_token_id": facts.eos, "bos_token_id": () if facts.bos is None else (facts.bos,)}.items():
        yield max(ids, default=0) >= facts.vocab, field, f"must be below vocab_size ({facts.vocab})"
    yield facts.heads % facts.kv_heads, "num_key_value_heads", f"must divide num_attention_heads ({facts.heads})"
    yield mla is None and not facts.head_dim, "head_dim", "must be at least 1: num_attention_heads is above hidden_size"
    yield facts.rope.dim % 2, "qk_rope_head_dim" if mla else "head_dim", "must be even to rotate"
    is_bare = facts.rope.kind in ("yarn", "llama3") and not facts.rope.original
    yield is_bare, "original_max_position_embeddings", f"must be at least 1 with {facts.rope.kind}"
    has_ramp = facts.rope.low_freq_factor < facts.rope.high_freq_factor
    yield facts.rope.kind == "llama3" and not has_ramp, "high_freq_factor", "must be above low_freq_factor"
    has_window = other.use_sliding_window and 0 < other.sliding_window < facts.context
    kinds = "sliding_attention" in other.layer_types if other.layer_types else other.max_window_layers < facts.layers
    rule = f"is not supported: a layer uses it, and the context is {facts.context}"
    yield has_window and kinds, "sliding_window", rule
    if mla is not None:
        yield facts.attention_bias, "attention_bias", "is not supported with MLA"
        yield not other.rope_interleave, "rope_interleave", "must be true: neighbouring dims of MLA rotate"
        ranks = {"q_lora_rank": mla.q_lora, "kv_lora_rank": mla.kv_lora, "qk_nope_head_dim": mla.nope}
        for field, rank in ranks.items():
            yield rank % 2, field, "must be even (pairs of dims rotate in place after it)"
    if indexer is not None:
        no_latent = mla is None or not mla.q_lora
        yield no_latent, "index_topk", "needs MLA with q_lora_rank: the indexer reads the query latent"
        rope = 0 if mla is None else mla.rope
        yield indexer.dim < rope, "index_head_dim", f"must be at least qk_rope_head_dim ({rope})"
    if moe is None:
        return
    # DeepSeek-V2's code would then drop the scaling factor, transformers applies it; no published model asks
    is_ambiguous = moe.renormalize and moe.method != "noaux_tc" and moe.scale != 1.0
    yield is_ambiguous, "norm_topk_prob", "with softmax scores and a routed_scaling_factor is ambiguous"
    yield moe.experts % moe.groups, "n_group", f"must divide n_routed_experts ({moe.experts})"
    yield moe.topk_groups > moe.groups, "topk_group", f"must be at most n_group ({moe.groups})"
    each = moe.experts // moe.groups
    reachable = each * (moe.groups if moe.method == "greedy" else moe.topk_groups)
    rule = f"must be at most the {reachable} experts of the chosen groups"
    yield moe.topk > reachable, "num_experts_per_tok", rule
    is_single = moe.method == "noaux_tc" and moe.groups > 1 and each < 2
    yield is_single, "n_group", f"leaves one expert a group ({moe.experts} experts): a group scores by its best two"
