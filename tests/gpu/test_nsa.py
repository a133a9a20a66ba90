"""Native sparse attention on a GPU: a model over pages, what is pooled, ties, equal bits, a captured step. Its cases
are in tests/cpu/test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.cpu import nsa_model
from thalweg.kernels.attend.case import to_device
from thalweg.kernels.nsa import case
from thalweg.kernels.nsa import triton as nsa

CASES = list(case.cases(torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (16, 1), (3, 3)])
def test_a_model_over_pages_generates_what_one_forward_does(heads: int, kv_heads: int, cuda: torch.device) -> None:
    with torch.inference_mode():
        nsa_model.check_generation(nsa, heads, kv_heads, cuda)


def test_full_pages_are_pooled(cuda: torch.device) -> None:
    nsa_model.check_pooling(nsa, cuda)


def test_the_first_of_equal_blocks_is_chosen(cuda: torch.device) -> None:
    nsa_model.check_ties(nsa, cuda)


@pytest.mark.parametrize("one", CASES, ids=[one.name for one in CASES])
def test_a_tokens_bits_depend_on_its_own_sequence_alone(one: case.KernelCase, cuda: torch.device) -> None:
    nsa_model.check_bits(nsa, {name: to_device(x, cuda) for name, x in one.inputs.items()})


def test_a_captured_step_reads_its_lengths_on_the_device(cuda: torch.device) -> None:
    """Captured at the longest contexts, replayed at shorter ones."""
    inputs = {name: to_device(x, cuda) for name, x in CASES[9].fresh_inputs().items()}
    case.run(**inputs, kernels=nsa)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = case.run(**inputs, kernels=nsa)
    for name in ("positions_T", "write_T"):
        inputs[name].sub_(1)
    (eager,) = case.run(**inputs, kernels=nsa)
    graph.replay()
    assert torch.equal(captured, eager)
