"""Mistakes that engines have made with DeepSeek V3.2, planted one by one: the parity test must find each."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu import zoo
from tests.cpu.batches import Bench
from thalweg.attention.context import AttentionMetadata
from thalweg.attention.selection import SelectedContexts
from thalweg.kernels.attend.ref import index_scores, rotate_
from thalweg.layers.interface import ResidualStream
from thalweg.models.interface import Model

LENGTH = 60
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20,
    "index_topk": 5,
    "index_head_dim": 32, "index_n_heads": 8, "rope_theta": 10000.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Tensor]:
    folder = tmp_path_factory.mktemp("v32")
    theirs = zoo.reference(CONFIG, 11)
    zoo.save(theirs, CONFIG, folder)
    ids = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return folder, ids.tolist(), theirs(ids[None]).logits[0]


def error(model: Model, ids: list[int], want: Tensor) -> float:
    difference = (Bench(model, 1).step([(0, ids)])[0] - want).abs().nan_to_num(nan=math.inf)
    return float(difference.max() / want.abs().max())


def rotate_halves(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> None:
    width = 2 * cos_sin_T1c.shape[-1]
    part = x_TX.as_strided((len(x_TX), heads, width), (x_TX.stride(0), dim, 1), x_TX.storage_offset() + first)
    turned = torch.complex(part[..., : width // 2], part[..., width // 2 :]) * cos_sin_T1c
    part.copy_(torch.cat([turned.real, turned.imag], -1))


def main_rope_by_halves(patch: pytest.MonkeyPatch) -> None:
    def rotate(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> None:
        turn = rotate_halves if first else rotate_  # the indexer's dims begin at 0
        turn(x_TX, cos_sin_T1c, first, heads, dim)

    patch.setattr("thalweg.layers.mla.rotate_", rotate)


def indexer_rope_by_pairs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("thalweg.layers.index_shards.pairs_from_halves", lambda rows, head_dim, dim: rows)


def indexer_rope_on_the_last_dims(patch: pytest.MonkeyPatch) -> None:
    def rotate_last(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> None:
        if first:
            rotate_(x_TX, cos_sin_T1c, first, heads, dim)
        else:  # of the indexer
            rotate_halves(x_TX, cos_sin_T1c, dim - 2 * cos_sin_T1c.shape[-1], heads, dim)

    indexer_rope_by_pairs(patch)  # keeps the published order of dims
    patch.setattr("thalweg.layers.mla.rotate_", rotate_last)


def key_norm_as_rms(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight + self.bias

    patch.setattr("thalweg.layers.linear.LayerNorm.forward", forward)


def key_norm_without_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "thalweg.layers.linear.LayerNorm.forward",
        lambda self, x: torch.layer_norm(x, x.shape[-1:], self.weight, None, 1e-6),
    )


def index_query_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    from thalweg.layers.mla import Mla

    original = Mla.add_to

    def add_to(
        self: Mla, h: ResidualStream, x_TH: Tensor, step: AttentionMetadata, earlier: SelectedContexts
    ) -> SelectedContexts:
        assert self.indexer is not None and self.up is not None
        select, up = type(self.indexer).select, self.up
        raw = up.split(self.down.split(x_TH)[0].contiguous())[1].contiguous()
        with patch.context() as inner:
            inner.setattr(type(self.indexer), "select", lambda indexer, x, query, step: select(indexer, x, raw, step))
            return original(self, h, x_TH, step, earlier)

    patch.setattr(Mla, "add_to", add_to)


def softmax_scale_without_m(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("thalweg.layers.mla.softmax_scale", lambda dim, rope: dim**-0.5)


def weights_with_bias(patch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.router import ref

    original = ref.choose_experts

    def choose_experts(logits: Tensor, bias: Tensor, rule: ref.RouterConfig) -> tuple[Tensor, Tensor]:
        ids = original(logits, bias, rule)[1]
        weights = (logits.sigmoid() + bias).gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) * rule.scale, ids

    patch.setattr(ref, "choose_experts", choose_experts)


def group_score_by_best_one(patch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.router import ref

    original = ref._within_groups

    def by_best(scores_TE: Tensor, best_TG: Tensor, topk_groups: int) -> Tensor:
        groups = best_TG.shape[1]
        return original(scores_TE, scores_TE.view(len(scores_TE), groups, -1).amax(-1), topk_groups)

    patch.setattr(ref, "_within_groups", by_best)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    from thalweg.layers.moe import Experts

    original = Experts.add_

    def add_(self: Experts, *given: Tensor) -> None:
        gate_up, rest = self._operands[0], self._operands[1:]
        self._operands = ([weight.roll(weight.shape[1] // 2, 1) for weight in gate_up], *rest)
        original(self, *given)
        self._operands = (gate_up, *rest)

    patch.setattr(Experts, "add_", add_)


def choice_before_the_causal_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "thalweg.layers.mla.index_scores",
        lambda q, weights, keys, bias, scale: index_scores(q, weights, keys, torch.zeros_like(bias), scale),
    )


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def hadamard_on_queries_only(patch: pytest.MonkeyPatch) -> None:
    matrix = hadamard(CONFIG["index_head_dim"])
    patch.setattr(
        "thalweg.layers.mla.index_scores",
        lambda q, weights, keys, bias, scale: index_scores(q @ matrix, weights, keys, bias, scale),
    )


def no_relu(patch: pytest.MonkeyPatch) -> None:
    def scores(q: Tensor, weights: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
        return bias + scale * torch.einsum("nh,nhd,sd->ns", weights, q, keys[0])

    patch.setattr("thalweg.layers.mla.index_scores", scores)


PLANTS: list[Plant] = [
    main_rope_by_halves, indexer_rope_by_pairs, indexer_rope_on_the_last_dims, key_norm_as_rms, key_norm_without_bias,
    index_query_before_the_norm, softmax_scale_without_m, weights_with_bias, group_score_by_best_one,
    gate_and_up_swapped,
    choice_before_the_causal_mask, hadamard_on_queries_only, no_relu,
]  # fmt: skip


def test_nothing_planted(checkpoint: tuple[Path, list[int], Tensor]) -> None:
    folder, ids, want = checkpoint
    assert error(zoo.ours(folder), ids, want) < 1e-5


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_mistake_is_seen(
    plant: Plant, checkpoint: tuple[Path, list[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids, want = checkpoint
    plant(monkeypatch)
    assert error(zoo.ours(folder), ids, want) > 1e-2


def test_hadamard_on_both_sides_changes_nothing(
    checkpoint: tuple[Path, list[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Hq)·(Hk) = q·k, which is why the unquantised indexer needs none."""
    folder, ids, want = checkpoint
    matrix = hadamard(CONFIG["index_head_dim"])
    monkeypatch.setattr(
        "thalweg.layers.mla.index_scores",
        lambda q, weights, keys, bias, scale: index_scores(q @ matrix, weights, keys @ matrix, bias, scale),
    )
    assert error(zoo.ours(folder), ids, want) < 1e-5


def test_equal_scores_choose_the_later_token_in_any_shape(checkpoint: tuple[Path, list[int], Tensor]) -> None:
    """With every index weight 0 all scores are equal: the choice is then the last topk tokens, alone or beside longer
    rows, in chunks or not.
    """
    folder, ids, _ = checkpoint
    model = zoo.ours(folder)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
            if name.endswith("indexer.weights"):
                parameter.zero_()
    whole = Bench(model, 1).step([(0, ids)])[0]
    bench, steps = Bench(model, 2), []
    bench.step([(1, [1] * 120)])  # a longer row: more pages than the short one needs
    for token in ids[:-1]:
        steps += bench.step([(0, [token])])
    steps += bench.step([(0, ids[-1:]), (1, [3])])[:1]
    assert float((torch.cat(steps) - whole).abs().max()) < 1e-4
