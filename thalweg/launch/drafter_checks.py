"""Whether the folder of a drafter holds what its algorithm needs, and was made for this model."""

from __future__ import annotations

from pathlib import Path

from thalweg.config.eagle import read_eagle
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.report import MODEL, Decision
from thalweg.spec.draft_model import draft_model_facts
from thalweg.text.tokenizer import has_tokenizer, vocabulary

SAME = 0.95  # share of the common ids that must be the same tokens; reserved ones often have other names


def inspect_eagle(algorithm: str, folder: Path, facts: ModelFacts, model: Path | None) -> list[Decision]:
    """An EAGLE head. Raises UnsupportedConfig for a head of the other format, CheckpointError as `read_eagle`."""
    eagle = read_eagle(folder, facts)
    if algorithm == "EAGLE3" and not eagle.is_eagle3:
        raise UnsupportedConfig(
            f"speculative_algorithm: {folder} holds a head of the format before EAGLE-3 (its config.json has no"
            " draft_vocab_size); use --speculative-algorithm EAGLE"
        )
    if not eagle.watched.layers:
        return []
    layers, reason = ", ".join(map(str, eagle.watched.layers)), f"inputs of the target's layers: {eagle.watched.why}"
    return [Decision("speculative_eagle_layers", layers, MODEL, reason)]


def inspect_draft_model(algorithm: str, folder: Path, facts: ModelFacts, model: Path | None) -> list[Decision]:
    """A smaller model. Raises CheckpointError where it is none, or has another vocabulary."""
    draft = draft_model_facts(folder, facts)
    if model is not None:
        check_vocabularies(folder, draft.vocab, model, facts.vocab)
    return []


def check_vocabularies(draft: Path, draft_vocab: int, model: Path, vocab: int) -> None:
    """Compares the tokenizers, since models of one family are padded to different sizes. Raises CheckpointError where
    the same ids are other tokens, and where the sizes differ and a tokenizer is missing.
    """
    lacking = [str(folder) for folder in (draft, model) if not has_tokenizer(folder)]
    if lacking and draft_vocab == vocab:
        return
    if lacking:
        raise CheckpointError(
            f"{draft} has a vocabulary of {draft_vocab} ids, and the model to draft for one of {vocab}. Whether they"
            f" are the same tokens cannot be checked without tokenizer.json in {' and '.join(lacking)}. Put it there,"
            " or name a smaller model of the same family"
        )
    own, target = ({i: token for token, i in vocabulary(folder).items()} for folder in (draft, model))
    common, smallest = own.keys() & target.keys(), min(len(own), len(target))
    same = sum(own[i] == target[i] for i in common)
    if not common or same < SAME * smallest:
        raise CheckpointError(
            f"{draft}: of {smallest} tokens only {same} have the id that they have in {model}, so the models do not"
            " write the same tokens. Name a smaller model of the same family"
        )
