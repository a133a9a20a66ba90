"""Whether two models write the same tokens: compared by their tokenizers, since models of one family differ in how far
vocabularies are padded.
"""

from __future__ import annotations

from pathlib import Path

from thalweg.core.errors import CheckpointError
from thalweg.text.tokenizer import vocabulary

SAME = 0.95  # of the ids that both have; reserved ones often have other names


def check_vocabularies(small: Path, drafted: int, model: Path, vocab: int) -> None:
    """small, model: folders of a model that drafts and of the one that it drafts for; drafted, vocab: how many ids each
    has. Raises CheckpointError where the tokens of these ids are others, and where the numbers differ and there are no
    two tokenizers to compare.
    """
    lacks = [str(one) for one in (small, model) if not (one / "tokenizer.json").is_file()]
    if lacks and drafted == vocab:
        return
    if lacks:
        raise CheckpointError(
            f"{small} has a vocabulary of {drafted} ids, and the model to draft for one of {vocab}: whether they are"
            f" the same tokens, and others padding, cannot be told without tokenizer.json in {' and '.join(lacks)}; put"
            " it there, or name a smaller model of the same family"
        )
    own, theirs = ({i: token for token, i in vocabulary(folder).items()} for folder in (small, model))
    both = own.keys() & theirs.keys()
    same = sum(own[i] == theirs[i] for i in both)
    if not both or same < SAME * min(len(own), len(theirs)):
        raise CheckpointError(
            f"{small}: of {min(len(own), len(theirs))} tokens only {same} have the id that they have in {model}: what"
            " one writes means something else to the other. Name a smaller model of the same family"
        )
