"""The config.json of an EAGLE head. No torch.

EAGLE heads are published in two formats: EAGLE-3 (a layer on three residual streams of the target, with a vocabulary of
its own), and that of EAGLE and EAGLE-2, which differ in how drafts are searched for and not in their weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from thalweg.config.model import ModelFacts, Size, facts_of, read_config, record
from thalweg.core.errors import CheckpointError
from thalweg.core.files import check_regular, read_object

WATCHED = 3  # residual streams that an EAGLE-3 head reads where it names none
STREAMS = "eagle_aux_hidden_state_layer_ids"
HEADER = 100 << 20  # bytes of a safetensors header, at most, as that library has it


class WatchedStreams(NamedTuple):
    """Residual streams of the target that a head reads, each by the layer that it enters."""

    layers: tuple[int, ...] = ()
    why: str = ""


class EagleFacts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "target_hidden": "target_hidden_size",
        "draft_vocab": "draft_vocab_size",
        "normed_residual": "norm_before_residual",
    },
):
    """Fields of a head's config.json beside those of `config.model`."""

    facts: ModelFacts  # of the head's layers; its context is the target's
    is_eagle3: bool
    # of EAGLE-3
    target_hidden: Size  # numbers of a stream
    draft_vocab: Size  # tokens that it can draft
    watched: WatchedStreams = WatchedStreams()
    normed_residual: bool = False  # the layer adds to the norm of its state, not to the state
    # of EAGLE and EAGLE-2
    bias: bool = True  # of the projection that joins embedding and hidden state


def read_eagle(folder: Path, target: ModelFacts) -> EagleFacts:
    """Reads `folder`/config.json, and the shapes of the tensors beside it if there are any. Raises CheckpointError when
    it is missing, nonsense, or not of a head for this target.
    """
    given = eagle_of(read_config(folder, "a drafter"), str(folder / "config.json"), target)
    _check_tensors(given, tensor_shapes(folder), folder, target)
    return given


def algorithm_of(folder: Path) -> str:
    """The algorithm of the drafter in `folder`: EAGLE3, EAGLE or, without signs of a head, STANDALONE.

    Heads of the format before EAGLE-3 are often published as plain Llamas. The names of their tensors, where the folder
    has them, tell them apart.
    Raises CheckpointError, also for Medusa's several heads.
    """
    config = read_config(folder, "a drafter")
    if any("medusa" in str(config.get(key)).lower() for key in ("architectures", "model_type")):
        raise CheckpointError(
            f"{folder / 'config.json'} is of a Medusa drafter, which is not here; use an EAGLE head or a smaller model"
            " of the same family"
        )
    if _is_eagle3(config):
        return "EAGLE3"
    if "eagle" in str(config.get("architectures")).lower():
        return "EAGLE"
    return "EAGLE" if {"fc.weight", "model.fc.weight"} & tensor_names(folder) else "STANDALONE"


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in this folder, by its index or their headers. Files that cannot be read are left out."""
    try:
        return frozenset(read_object(folder / "model.safetensors.index.json")["weight_map"])
    except FileNotFoundError:
        pass
    except (CheckpointError, KeyError, TypeError):
        return frozenset()
    return frozenset(tensor_shapes(folder))


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in this folder, by their headers. Files that cannot be read are left out."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            check_regular(path)
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= HEADER else {}
            found |= {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return found
    return found


def _check_tensors(given: EagleFacts, shapes: Mapping[str, tuple[int, ...]], folder: Path, target: ModelFacts) -> None:
    """Raises CheckpointError where the shapes of a head's tensors are for another model."""
    fuse, own = shapes.get("fc.weight", shapes.get("model.fc.weight", ())), given.facts.hidden
    streams = len(given.watched.layers) if given.is_eagle3 else 1
    reads = streams * given.target_hidden + (0 if given.is_eagle3 else own)
    if len(fuse) == 2 and fuse[1] != reads:
        of = (fuse[1] - (0 if given.is_eagle3 else own)) / streams
        raise CheckpointError(
            f"{folder}: fc.weight reads {fuse[1]} numbers: {_streams(streams)} of a model whose hidden_size is {of:g};"
            f" that of the model to draft for is {target.hidden}: this head is another model's"
        )
    if given.is_eagle3 and shapes and own != target.hidden and "embed_tokens.weight" not in shapes:
        raise CheckpointError(
            f"{folder}: its hidden_size is {own} and that of the model to draft for {target.hidden}, whose embedding it"
            " therefore cannot share, and it has none of its own (embed_tokens.weight): this head is another model's"
        )
    if given.is_eagle3 and shapes and given.draft_vocab < target.vocab and "d2t" not in shapes:
        raise CheckpointError(
            f"{folder}: there is no tensor d2t, which says what tokens the {given.draft_vocab} are that the head drafts"
            f" of the model's {target.vocab} (draft_vocab_size and vocab_size in its config.json), so what it drafts"
            " cannot be read; take the file as it was published"
        )


def _streams(count: int) -> str:
    return f"{count} residual streams" if count > 1 else "the hidden state"


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    return "draft_vocab_size" in config or "eagle3" in str(config.get("architectures")).lower()


def eagle_of(config: Mapping[str, Any], where: str, target: ModelFacts) -> EagleFacts:
    """The facts of a head's config.json's content. `where` names it in errors. Raises CheckpointError as
    `read_eagle`.
    """
    layer = config.get("transformer_layer_config")  # speculators writes the fields of the layer apart
    layer = layer if isinstance(layer, dict) else {}
    own = {
        **config,
        **layer,
        "architectures": config.get("architectures") or ["LlamaForCausalLM"],
    }
    facts, is_eagle3 = facts_of(own, where), _is_eagle3(config)
    given = {name: value for name, value in config.items() if value is not None}
    given = {
        "target_hidden_size": target.hidden,
        "draft_vocab_size": facts.vocab,
        "norm_before_residual": bool(layer),
        **given,
        "facts": msgspec.structs.replace(facts, context=target.context),
        "is_eagle3": is_eagle3,
        "watched": _watched(config, where, target.layers) if is_eagle3 else WatchedStreams(),
    }
    head = record(EagleFacts, given, where)
    sizes = {"vocab_size": (facts.vocab, target.vocab), "target_hidden_size": (head.target_hidden, target.hidden)}
    if not is_eagle3:
        sizes["hidden_size"] = facts.hidden, target.hidden
    for name, (got, wanted) in sizes.items():
        if got != wanted:
            raise CheckpointError(
                f"{where}: {name} is {got}, and that of the model to draft for {wanted}: this head is another model's"
            )
    if head.draft_vocab > facts.vocab:
        raise CheckpointError(
            f"{where}: draft_vocab_size must be 1 to vocab_size ({facts.vocab}), got {head.draft_vocab}"
        )
    if facts.mla is not None or facts.moe is not None:
        raise CheckpointError(
            f"{where}: a head of Llama's layers is read, and this one has latent attention or experts"
        )
    if is_eagle3 and facts.layers != 1:
        raise CheckpointError(f"{where}: an EAGLE-3 head has one layer; num_hidden_layers is {facts.layers}")
    return head


def _watched(config: Mapping[str, Any], where: str, layers: int) -> WatchedStreams:
    """Published ids are of two kinds: those in `eagle_config` are layers whose OUTPUT is read (SGLang's
    set_eagle3_layers_to_capture adds 1 to each); those beside it are layers whose input is (vLLM, speculators), unless
    they begin with 1, which as an input nobody chooses. An empty list is none.
    """
    eagle = config.get("eagle_config")
    inside = eagle.get(STREAMS) if isinstance(eagle, dict) else None
    beside = config.get(STREAMS)
    named = beside if inside is None or inside == [] else inside
    if named is None or named == []:
        default = tuple(min(max(layer, 0), layers) for layer in (2, layers // 2, layers - WATCHED))
        return WatchedStreams(default, "its config.json names none")
    if not isinstance(named, list) or any(type(one) is not int for one in named):
        raise CheckpointError(f"{where}: {STREAMS} must be a list of layers, got {named!r}")
    nested = named is inside
    outputs = nested or named[0] == 1
    found = tuple(one + outputs for one in named)
    if not all(0 <= layer <= layers for layer in found):
        raise CheckpointError(f"{where}: {STREAMS} {named} are beyond the target's {layers} layers")
    kind = "outputs" if outputs else "inputs"
    place = "eagle_config" if nested else "config.json"
    return WatchedStreams(found, f"{place} names {', '.join(map(str, named))}, which are read as {kind} of layers")
