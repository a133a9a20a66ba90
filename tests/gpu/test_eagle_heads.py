"""EAGLE heads on kernels behind targets on kernels, against the same heads in float32 by the reference. `test_models`
explains the bounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu import zoo
from tests.gpu.shapes import KERNELS, Part, batches, pair, published
from thalweg.config.eagle import eagle_of
from thalweg.memory.planes import Planes
from thalweg.models.eagle import Eagle, Eagle3
from thalweg.quant.catalog import Declared

STEPS: dict[str, list[Part]] = {
    "two prompts": [(1, 0, 130), (4, 0, 7)],
    "drafts": [(1, 130, 1), (4, 7, 1)],
    "a verification": [(1, 131, 4), (4, 8, 4)],
    "drafts again": [(1, 135, 1), (4, 12, 1)],
}


def config(shape: str, third: bool) -> dict[str, Any]:
    """A head as the models of these shapes have it."""
    target = published(shape)
    own = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": target["hidden_size"] // 128,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    kept = ("hidden_size", "intermediate_size", "vocab_size")
    return own | {name: target[name] for name in kept} | ({"draft_vocab_size": 512} if third else {})


@pytest.mark.parametrize("third", [True, False], ids=["eagle3", "eagle"])
@pytest.mark.parametrize("shape", ["v2-lite", "qwen2", "v3-dense"])
def test_states_and_what_is_stored_are_the_references(shape: str, third: bool, cuda: torch.device) -> None:
    made, kept, kind = [], [], Eagle3 if third else Eagle
    for main in pair(shape, cuda, KERNELS):
        facts = eagle_of(config(shape, third), shape, main.facts)
        main.watch(facts.watched.layers)
        head = kind(facts, main, (), Declared({}))
        made.append(head)
        kept.append(Planes((*main.planes(), *head.planes()), 16, cuda))
    reference, kernels = made
    zoo.fill(kernels)
    given_by_name = dict(kernels.named_parameters())
    for name, parameter in reference.named_parameters():
        parameter.data.copy_(given_by_name[name])
    generator = torch.Generator().manual_seed(1)
    for name, rows in STEPS.items():
        plain, paged = batches(rows, cuda, generator, 1024)
        with torch.inference_mode():
            states = [
                head.draft_state(head.main[0].forward(batch, planes)).float()
                for head, batch, planes in zip(made, (plain, paged), kept, strict=True)
            ]
            assert error(states[1], states[0]) < 0.03, f"{name}: what the target says"
            # from here on of the same states, so that only the heads differ
            exact = reference.forward(plain.ids_T, states[0], plain, kept[0])
            got = kernels.forward(paged.ids_T, states[0].bfloat16(), paged, kept[1])
            assert error(got, exact) < 0.02, name
            assert error(kernels.logits(got), reference.logits(exact)) < 0.02, name
            kernels.write_kv(paged.ids_T, states[0].bfloat16(), paged, kept[1])
        for spec in kernels.planes():
            here, there = (planes.tokens(spec.name, spec.layer)[paged.write_T] for planes in (kept[1], kept[0]))
            assert error(here, there) < 0.02, f"{name}: {spec.name}"


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())
