"""The NextN layer against transformers' generic multi-token-prediction layer, from one checkpoint with both parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.test_models_parity import TOLERANCE, error
from tests.seed import SEED
from thalweg.core.errors import CheckpointError
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.nextn import NextN
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

LENGTH = 90


class Chain:
    """A main model with one more decoder layer behind it, as published, and what transformers computes of it."""

    def __init__(self, family: str, folder: Path) -> None:
        from transformers.modeling_layers import MtpLayer

        print(f"{family}: TEST_SEED={SEED}")
        config: dict[str, Any] = zoo.draw_config(family, SEED)
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        full = zoo.reference(config | {"num_hidden_layers": layers + 1}, SEED)
        self.full, body, generator = full, full.model, torch.Generator().manual_seed(SEED)
        norm = type(body.norm)
        self.mtp = MtpLayer(full.config, type(body.layers[0]), norm, layers).eval()
        self.mtp.mtp_block = body.layers[layers]
        extra = {
            "enorm.weight": self.mtp.enorm.weight,
            "hnorm.weight": self.mtp.hnorm.weight,
            "eh_proj.weight": self.mtp.eh_proj.weight,
            "shared_head.norm.weight": self.mtp.post_norm.weight,
        }
        with torch.no_grad():
            for tensor in extra.values():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.2 + 1 if tensor.dim() == 1 else noise * tensor.shape[1] ** -0.5)
        extra |= {"embed_tokens.weight": body.embed_tokens.weight, "shared_head.head.weight": full.lm_head.weight}
        published = {f"model.layers.{layers}.{name}": tensor.detach().clone() for name, tensor in extra.items()}
        zoo.save(full, config, folder, published)
        full.config.num_hidden_layers = layers  # from now on its last layer is behind the model
        self.folder, self.layers, self.hidden, self.vocab = folder, layers, hidden, config["vocab_size"]

    def main(self, ids: list[int]) -> Tensor:
        """Hidden states after the final norm."""
        with torch.no_grad():
            hidden: Tensor = self.full.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return hidden

    def next(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Hidden states of the NextN layer: ids[i] follows the token that hidden[i] is of."""
        x, positions = self.full.model.embed_tokens(torch.tensor([ids])), torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            rotary = self.full.model.rotary_emb(x, positions)
            out = self.mtp(x, hidden[None], rotary, mask, positions, None)
        return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.fixture(scope="module", params=["v3", "v32"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(request.param, tmp_path_factory.mktemp(request.param))


def build(chain: Chain) -> tuple[zoo.Watched, Any, NextN]:
    watched = zoo.Watched()
    main = zoo.ours(chain.folder, selection=watched)
    nextn = catalog.build_nextn(main)
    with Safetensors(chain.folder) as stream:
        load(nextn, nextn.table(), stream)
    return watched, main, nextn


def prompt(chain: Chain) -> tuple[Any, NextN, list[int], Tensor, Tensor]:
    """A prompt without near-ties, its hidden states and what the NextN layer makes of them."""
    watched, main, nextn = build(chain)
    for attempt in range(20):
        draw, watched.near = random.Random(f"{SEED} {attempt}"), False
        ids = [draw.randrange(chain.vocab) for _ in range(LENGTH + 1)]
        bench = Bench(main, 1, extra=nextn.planes())
        with torch.inference_mode():
            batch = bench.batch([(0, ids[:-1])])
            hidden = main.forward(batch, bench.planes)
            nextn.forward(torch.tensor(ids[1:]), hidden, batch, bench.planes)
        if not watched.near:
            return main, nextn, ids, chain.main(ids[:-1]), chain.next(ids[1:], chain.main(ids[:-1]))
    raise AssertionError(f"20 prompts with near-ties, TEST_SEED={SEED}")


def test_whole_prompt_then_token_by_token(chain: Chain) -> None:
    main, nextn, ids, hidden, want = prompt(chain)
    bench = Bench(main, 2, extra=nextn.planes())
    with torch.inference_mode():
        whole = nextn.forward(torch.tensor(ids[1:]), hidden, bench.batch([(0, ids[:-1])]), bench.planes)
        steps = []
        for at in range(LENGTH):
            steps.append(
                nextn.forward(torch.tensor([ids[at + 1]]), hidden[at : at + 1], bench.batch([(1, [0])]), bench.planes)
            )
            bench.lengths[1] += 1
        assert error(whole, want) < TOLERANCE, f"TEST_SEED={SEED}"
        assert error(torch.cat(steps), want) < TOLERANCE, f"TEST_SEED={SEED}"
        logits = chain.full.lm_head(want)
        assert error(nextn.logits(whole), logits) < TOLERANCE, f"TEST_SEED={SEED}"


def test_write_kv_writes_what_forward_writes(chain: Chain) -> None:
    main, nextn, ids, hidden, want = prompt(chain)
    bench, half = Bench(main, 1, extra=nextn.planes()), LENGTH // 2
    with torch.inference_mode():
        nextn.write_kv(torch.tensor(ids[1 : half + 1]), hidden[:half], bench.batch([(0, ids[:half])]), bench.planes)
        bench.lengths[0] = half
        rest = nextn.forward(
            torch.tensor(ids[half + 1 :]), hidden[half:], bench.batch([(0, ids[half:-1])]), bench.planes
        )
    assert error(rest, want[half:]) < TOLERANCE, f"TEST_SEED={SEED}"


def test_main_model_skips_the_layer_and_still_agrees(chain: Chain) -> None:
    main, _, ids, hidden, _ = prompt(chain)
    got = Bench(main, 1).hidden([(0, ids[:-1])])[0]
    assert error(got, hidden) < TOLERANCE, f"TEST_SEED={SEED}"
    assert len(main.layers) == chain.layers


def test_every_tensor_of_the_layer_is_accounted_for(chain: Chain) -> None:
    main = zoo.ours(chain.folder)
    nextn = catalog.build_nextn(main)
    held = {name for path in chain.folder.glob("*.safetensors") for name in load_file(path)}
    mine = {name for name in held if name.startswith(f"model.layers.{chain.layers}.")}
    assert {rule.source.name for rule in nextn.table().rules} == mine - {
        f"model.layers.{chain.layers}.embed_tokens.weight",
        f"model.layers.{chain.layers}.shared_head.head.weight",
    }


def test_a_checkpoint_without_the_layer_says_so(tmp_path: Path) -> None:
    config = zoo.draw_config("kimi-k2", 1)
    zoo.save(zoo.reference(config, 1), config, tmp_path)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 0"):
        catalog.build_nextn(zoo.ours(tmp_path))
    assert read_facts(tmp_path).nextn == 0
