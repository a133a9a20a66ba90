"""Every pair of features on a GPU, with the kernels that serve there. Deterministic inference makes equality exact.

Of small models with the attention of DeepSeek-V3 and of V3.2, whose contexts are longer than its choice; and of the
bundled model, by the reference and by kernels.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.compose import deterministic, matrix
from tests.configs import config
from tests.gpu.shapes import KERNELS, SHAPES, SPARSE, SPARSE_KERNELS, folder
from thalweg.core.kernels import KernelConfig
from thalweg.engine.local import LocalEngine

FP8_BLOCKS = {"quantization_config": SHAPES["v3"]["quantization_config"], "num_nextn_predict_layers": 1}
SMALL = {  # with NextN, in FP8 blocks, of a size that starts in seconds
    "v3": SHAPES["v3"] | FP8_BLOCKS | {
        "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_attention_heads": 16,
        "q_lora_rank": 512,
    },
    "v32": SPARSE | FP8_BLOCKS | {"index_topk": 64},
}  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> matrix.Make:
    """The maker of its engine."""
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(SMALL[request.param]))
    kernels = SPARSE_KERNELS if request.param == "v32" else KERNELS
    return partial(on_kernels, path, kernels=invariant(kernels), cuda_graph_bs=(1, 2, 4, 8, 16))


def invariant(kernels: KernelConfig) -> KernelConfig:
    return msgspec.structs.replace(kernels, deterministic=True)


@pytest.mark.parametrize("case", matrix.CASES, ids=matrix.name)
def test_every_pair_on_kernels_gives_the_plain_engines_tokens(
    case: dict[str, Any], cuda: torch.device, small: matrix.Make
) -> None:
    matrix.check(case, small, most_jumps=0)


@pytest.mark.parametrize("case", matrix.CASES[::4], ids=matrix.name)
@pytest.mark.parametrize("kernels", [None, invariant(SPARSE_KERNELS)], ids=["reference", "kernels"])
def test_the_bundled_model_gives_the_plain_engines_tokens(
    kernels: KernelConfig | None, case: dict[str, Any], cuda: torch.device
) -> None:
    matrix.check(case, bundled(kernels))


@cache
def bundled(kernels: KernelConfig | None) -> matrix.Make:
    """The maker of its engine."""

    def made(**fields: Any) -> LocalEngine:
        by = {} if kernels is None else {"kernels": kernels, "dtype": "bfloat16"}
        return LocalEngine(matrix.settings("cuda", **by, **fields))

    return made


def on_kernels(path: Path, **fields: Any) -> LocalEngine:
    settings = {
        "kernels": invariant(KERNELS),
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
