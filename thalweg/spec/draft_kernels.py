"""What lies between a head's computations, in a launch each where the device has kernels for it."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch

from thalweg.kernels.build_inputs import ref as inputs
from thalweg.kernels.build_tree import ref as grow
from thalweg.kernels.draft_state import ref as draft
from thalweg.kernels.launch import supports_triton
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.sample import REFERENCE, Sampler


class DraftKernels(NamedTuple):
    """See `kernels.build_inputs.ref` and `kernels.draft_state.ref`; sampling: what draws a token by kernels."""

    build_inputs: Callable[..., inputs.InputTensors]
    shift_hidden_states: Callable[..., torch.Tensor]
    store_draft: Callable[..., None]
    sampler: Sampler


class TreeBuilder(NamedTuple):
    """See `kernels.build_tree.ref`."""

    top_children: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    expand_level: Callable[..., tuple[grow.TreeLevel, grow.LevelInputs]]
    store_best_tree: Callable[..., None]


PLAIN = DraftKernels(inputs.build_inputs, draft.shift_hidden_states, draft.store_draft, REFERENCE)


def draft_kernels_on(device: torch.device) -> DraftKernels | None:
    """None where there are none: a CPU does with less than `PLAIN`, which is for tests."""
    if not supports_triton(device):
        return None
    from thalweg.kernels.build_inputs import triton as input_kernels
    from thalweg.kernels.draft_state import triton as drafting  # needs Triton

    return DraftKernels(
        input_kernels.build_inputs, drafting.shift_hidden_states, drafting.store_draft, sampler_on(device)
    )


def tree_builder_on(device: torch.device) -> TreeBuilder:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return TreeBuilder(grow.top_children, grow.expand_level, grow.store_best_tree)
    from thalweg.kernels.build_tree import triton as growing  # needs Triton

    return TreeBuilder(growing.top_children, growing.expand_level, growing.store_best_tree)
