"""Every pair of features on a GPU: the bundled model by the reference, and every kind of model on kernels, where
deterministic inference makes equality exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compose import deterministic, matrix
from tests.configs import config
from tests.gpu.shapes import SHAPES, folder
from thalweg.core.kernels import KernelConfig
from thalweg.engine.local import LocalEngine

KERNELS = KernelConfig(decode="triton", prefill="triton", deterministic=True)


@pytest.mark.parametrize("case", matrix.CASES, ids=matrix.name)
def test_every_pair_gives_the_plain_engines_tokens(case: dict[str, Any], cuda: torch.device) -> None:
    matrix.check(case, cuda.type)


def on_kernels(path: Path, **fields: Any) -> LocalEngine:
    settings = {
        "kernels": KERNELS,
        "device": "cuda",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "random_seed": 3,
        "context_length": 400,
        "eos_ids": (1,),
        "warmup": False,
    }
    return LocalEngine(config(model_path=str(path), show_progress=False, **(settings | fields)))


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_on_the_sequence_alone(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    path = folder(shape, tmp_path)
    for kind in deterministic.KINDS:
        plain = deterministic.answers(on_kernels(path, **deterministic.PLAIN), kind, alone=True)
        for case in deterministic.CASES.values():
            for graphs in ((), (1, 2, 4, 8, 16)):
                recorded = tuple(rows for rows in graphs if rows <= case["max_running_requests"])
                got = deterministic.answers(on_kernels(path, cuda_graph_bs=recorded, **case), kind, alone=False)
                deterministic.assert_equal_bits(plain, got)


def test_bits_of_sparse_attention_depend_on_the_sequence_alone(cuda: torch.device) -> None:
    def engine(**fields: Any) -> LocalEngine:
        settings = matrix.settings(cuda.type, kernels=KernelConfig(deterministic=True), **fields)
        return LocalEngine(settings)

    plain = deterministic.answers(engine(**deterministic.PLAIN), "seeded", alone=True)
    for case in deterministic.CASES.values():
        deterministic.assert_equal_bits(plain, deterministic.answers(engine(**case), "seeded", alone=False))
