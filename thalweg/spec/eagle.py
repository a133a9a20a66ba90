"""EAGLE heads from a folder of their own; see `models.eagle`."""

from __future__ import annotations

from pathlib import Path

from thalweg.config.eagle import read_eagle
from thalweg.core.errors import CheckpointError
from thalweg.models.draft_head import DraftHead
from thalweg.models.eagle import Eagle, Eagle3
from thalweg.models.interface import Target
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import Drafter
from thalweg.weights.stream import Safetensors, schemes_in


def eagle_head(target: Target, folder: Path) -> DraftHead:
    """The empty head of this folder behind the target, which watches for it what it reads. Of the weights only the
    names are looked at; there may be none yet. Raises CheckpointError as `read_eagle`.
    """
    given, names = read_eagle(folder, target.facts), _names(folder)
    schemes = schemes_in(folder, given.facts.quantization_config)
    if not given.is_eagle3:
        return Eagle(given, target, names, schemes)
    target.watch(given.watched.layers)
    return Eagle3(given, target, names, schemes, folder)


def _names(folder: Path) -> frozenset[str]:
    """The folder's tensors; none of one that holds a config.json alone."""
    if not any(folder.glob("*.safetensors*")):
        pickled = next(folder.glob("*.bin"), None)
        if pickled is not None:
            raise CheckpointError(
                f"{pickled} is a pickle, which is not read; save its tensors as {folder / 'model.safetensors'} with"
                " safetensors.torch.save_file"
            )
        return frozenset()
    with Safetensors(folder) as stream:
        return frozenset(stream.specs)


def build(target: Target, folder: Path, draft_sampling: DraftSampling) -> Drafter:
    """Raises CheckpointError as `eagle_head`."""
    return AutoregressiveDrafter(eagle_head(target, folder), draft_sampling, has_own_weights=True)
