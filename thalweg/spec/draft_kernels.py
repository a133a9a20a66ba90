"""What lies between the computations of a draft head, in one launch each on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from thalweg.kernels.build_inputs.ref import InputTensors
from thalweg.kernels.build_tree.ref import LevelInputs, TreeLevel
from thalweg.kernels.launch import implementation
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.sample import Sampler

ShiftHiddenStates = Callable[..., torch.Tensor]


class DraftKernels(NamedTuple):
    """See `ref.py` of `kernels.build_inputs`, `kernels.draft_state` and `kernels.build_tree`."""

    build_inputs: Callable[..., InputTensors]
    shift_hidden_states: ShiftHiddenStates
    store_draft: Callable[..., None]
    top_children: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    expand_level: Callable[..., tuple[TreeLevel, LevelInputs]]
    store_best_tree: Callable[..., None]
    sampler: Sampler  # draws the most likely token


def draft_kernels_on(device: torch.device) -> DraftKernels:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    state, tree = implementation("draft_state", device), implementation("build_tree", device)
    return DraftKernels(
        implementation("build_inputs", device).build_inputs,
        state.shift_hidden_states,
        state.store_draft,
        tree.top_children,
        tree.expand_level,
        tree.store_best_tree,
        sampler_on(device),
    )
