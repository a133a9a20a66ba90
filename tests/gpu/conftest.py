"""Skips the tests of this folder where there is no CUDA device."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # they import kernels; test_device.py says that there is no GPU
    collect_ignore = [
        "test_attention.py",
        "test_compose.py",
        "test_several_gpus.py",
        "test_nodes.py",
        "test_engine.py",
        "test_graphs.py",
        "test_flashinfer.py",
        "test_gqa.py",
        "test_mla_backends.py",
        "test_models.py",
        "test_moe.py",
        "test_nsa.py",
        "test_paged_steps.py",
        "test_acceptance_rules.py",
        "test_sparse.py",
        "test_sparse_libraries.py",
        "test_start.py",
        "test_sampling.py",
        "test_trees.py",
        "test_deterministic_trees.py",
        "test_eagle_heads.py",
        "test_draft_graphs.py",
        "test_verification.py",
    ]


@pytest.fixture(autouse=True, scope="session")
def cuda() -> torch.device:
    """The device that the tests of this folder run on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda")
