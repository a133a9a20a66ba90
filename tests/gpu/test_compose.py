"""Every pair of features on a GPU, with the kernels that serve there. Deterministic inference makes equality exact.

The bundled model has no kernels (its heads are too small): it runs by the reference, on the device.
"""

from __future__ import annotations

import json
from functools import partial
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


SMALL = {  # DeepSeek-V3 with NextN, in FP8 blocks, of a size that starts in seconds
    **SHAPES["v3"], "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "q_lora_rank": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> matrix.Make:
    """The maker of its engine."""
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(SMALL))
    return partial(on_kernels, path, cuda_graph_bs=(1, 2, 4, 8, 16))


@pytest.mark.parametrize("case", matrix.CASES, ids=matrix.name)
def test_every_pair_on_kernels_gives_the_plain_engines_tokens(
    case: dict[str, Any], cuda: torch.device, small: matrix.Make
) -> None:
    matrix.check(case, small, most_jumps=0)


@pytest.mark.parametrize("case", matrix.CASES[::4], ids=matrix.name)
def test_the_bundled_model_gives_the_plain_engines_tokens(case: dict[str, Any], cuda: torch.device) -> None:
    matrix.check(case, on_device)


def on_device(**fields: Any) -> LocalEngine:
    return LocalEngine(matrix.settings("cuda", **fields))


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
