"""Models on several ranks give one rank's results: real linears, schemes, loader slices and residual streams; ranks are
threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.cpu.batches import Bench
from tests.cpu.ranks import layouts, on_ranks
from thalweg.batch.batch import Batch, Group
from thalweg.bench.make_checkpoint import main as make_checkpoint
from thalweg.config.model import MoeFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.layers.linear import Linear, Mlp, PackedShard
from thalweg.layers.reference import ReferenceLayers
from thalweg.layers.residual import ShardedStream
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.decoder import Decoder, StageValue
from thalweg.models.stages import PipelineStage, stage_borders
from thalweg.parallel.axis import SINGLE, share_of
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.eagle import eagle_head
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "v3": V3,
    "v3-fp8": V3 | {"quantization_config": FP8},
    "v3.2": V3 | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64,
        "index_head_dim": 32, "index_topk": 24,
        "index_topk_freq": 2, "index_skip_topk_offset": 2, "num_hidden_layers": 4,
    },
    "v2-lite": V3 | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_attention_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None, "scoring_func": "softmax",
        "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 1001, "hidden_size": 512,
        "intermediate_size": 640,
        "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    "one-key-head": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 997, "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_theta": 1e4,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-dense1": {"tp": 2, "ep": 2, "dense": 1},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2-dp2-ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2-dp2-ep2": {"tp": 2, "dp": 2, "ep": 2},
}
IDS = [(37 * i) % 900 + 3 for i in range(90)]
CLOSE = 2e-3  # of the largest logit: sums are grouped otherwise


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of random weights in the published layout."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    assert make_checkpoint([str(folder / "shape"), str(folder / "out"), "--seed", "3"]) == 0
    return folder / "out"


@pytest.fixture(scope="module", params=list(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp(request.param), SHAPES[request.param])


def loaded(
    folder: Path, layout: Layout = SINGLE_RANK, stage: PipelineStage | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    facts = read_facts(folder)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("cpu"), layout=layout), stage)
    with Safetensors(folder) as stream:
        load(model, model.table(), stream, facts.quantization_config)
    return model


def run(model: Decoder, ids: list[int], padding: int = 0) -> Tensor:
    """Logits of a prompt in two chunks and of four single tokens."""
    bench = Bench(model, 1)
    parts = [ids[:50], ids[50:-4], *([token] for token in ids[-4:])]
    return torch.cat([bench.step([(0, part)], padding)[0] for part in parts])


def same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max() / want.abs().max()) < CLOSE


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "dp2" not in name])
def test_tensor_parallel_ranks_give_one_ranks_logits(checkpoint: Path, name: str) -> None:
    want = run(loaded(checkpoint), IDS)
    ranks = layouts(**LAYOUTS[name])
    got = on_ranks(len(ranks), lambda rank: run(loaded(checkpoint, ranks[rank]), IDS))
    same(got[0], want)
    assert torch.equal(got[0], got[1])  # reductions are bit-equal on all ranks


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("v3.2", {"tp": 2}), ("v3.2", {"tp": 4}), ("v3.2-fp8", {"tp": 2, "dp": 2, "ep": 4}), ("v3.2", {"tp": 2, "cp": 2})],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_ranks_share_the_heads_of_an_indexer(shape: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Each scores by some, of contexts longer than it selects; all select the same."""
    config = (
        SHAPES["v3.2"]
        | {"num_hidden_layers": 2}
        | ({"quantization_config": FP8, "index_head_dim": 128} if "fp8" in shape else {})
    )
    folder, ranks = written(tmp_path, config), layouts(**sizes, shards_indexer=True)
    want, whole = run(loaded(folder), IDS), loaded(folder, ranks[0]).layers[0].attention.indexer
    assert whole.heads == 64 // sizes["tp"] == len(whole.head_weights)
    got = on_ranks(len(ranks), lambda rank: run(loaded(folder, ranks[rank]), IDS))
    same(got[0], want)
    for first in range(0, len(got), sizes["tp"]):
        assert all(torch.equal(got[first], one) for one in got[first : first + sizes["tp"]])
    rendezvous = ranks[0].indexer.rendezvous  # type: ignore[attr-defined]
    assert rendezvous.calls.count("all_reduce") > 0


@pytest.mark.parametrize("shape", ["v3", "v2-lite", "qwen2.5"])
def test_partial_sums_of_a_bf16_model_are_one_ranks(shape: str, tmp_path: Path) -> None:
    """Those of routed experts are float32, those of shared experts and other products bf16."""
    folder, ranks = written(tmp_path, SHAPES[shape]), layouts(tp=2)
    want = run(loaded(folder, dtype=torch.bfloat16), IDS)
    got = on_ranks(2, lambda rank: run(loaded(folder, ranks[rank], dtype=torch.bfloat16), IDS))
    apart = (got[0] - want).norm(dim=1) / want.norm(dim=1)
    assert torch.equal(got[0], got[1]) and float(apart.median()) < 0.05  # rounding sends a few to other experts


def test_heads_and_experts_cannot_be_shared_by_more_ranks_than_there_are() -> None:
    axis = layouts(tp=4)[3].tp
    assert share_of(2, axis, "key heads", may_repeat=True) == range(1, 2)
    for what in ("attention heads", "experts"):
        with pytest.raises(UnsupportedConfig, match=f"2 {what} cannot be shared by 4 ranks: use one of 1, 2"):
            share_of(2, axis, what)


@pytest.mark.parametrize(
    ("shape", "name"),
    [(shape, name) for shape in ("v3-fp8", "v3.2", "v2-lite", "qwen3-moe") for name in ("dp2-ep2", "tp2-dp2-ep4")]
    + [("v3", "tp2-dp2-ep2")],
)
def test_data_parallel_ranks_share_experts(shape: str, name: str, tmp_path: Path) -> None:
    """Each data-parallel rank has a sequence of its own; steps have equally many tokens on all ranks."""
    folder, ranks, tp = written(tmp_path, SHAPES[shape]), layouts(**LAYOUTS[name]), LAYOUTS[name].get("tp", 1)
    whole, texts = loaded(folder), [IDS, IDS[::-1]]
    got = on_ranks(len(ranks), lambda rank: run(loaded(folder, ranks[rank]), texts[rank // tp]))
    for rank, logits in enumerate(got):
        same(logits, run(whole, texts[rank // tp]))


def test_an_idle_rank_computes_padding(tmp_path: Path) -> None:
    """A data-parallel rank without a sequence runs the same steps, and its padding reaches no expert."""
    folder, ranks = written(tmp_path, SHAPES["v3-fp8"]), layouts(dp=2, ep=2)
    want = run(loaded(folder), IDS)

    def idle(model: Decoder) -> None:
        bench = Bench(model, 0, pages=1)
        for tokens in (50, 36, 1, 1, 1, 1):
            nothing = torch.zeros(tokens, dtype=torch.int64)
            table_RP, real_T = torch.zeros(tokens, 1, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool)
            batch = Batch(nothing, nothing, nothing, table_RP, real_T, nothing[:0], (Group(0, tokens, 0, 1, PAGE),))
            model.forward(batch, bench.planes)

    def work(rank: int) -> Tensor | None:
        model = loaded(folder, ranks[rank])
        return run(model, IDS) if rank == 0 else idle(model)

    got = on_ranks(2, work)
    assert got[0] is not None
    same(got[0], want)


def test_a_nextn_layer_on_two_ranks(tmp_path: Path) -> None:
    """eh_proj is cut by its columns, so that the stream begins with a partial sum."""
    folder = written(tmp_path, SHAPES["v3-fp8"] | {"num_hidden_layers": 2})

    def draft(layout: Layout) -> Tensor:
        main = loaded(folder, layout)
        nextn = catalog.build_nextn(main)
        with Safetensors(folder) as stream:
            load(nextn, nextn.table(), stream, main.facts.quantization_config)
        bench = Bench(main, 1, extra=nextn.planes())
        batch = bench.batch([(0, IDS[:-1])])
        hidden = main.forward(batch, bench.planes)
        state = nextn.forward(torch.tensor(IDS[1:]), nextn.draft_state(hidden), batch, bench.planes)
        return nextn.logits(state)

    ranks = layouts(tp=2, ep=2)
    with torch.inference_mode():
        want = draft(SINGLE_RANK)
    for got in on_ranks(2, lambda rank: draft(ranks[rank])):
        same(got, want)


@pytest.mark.parametrize("shape", ["qwen2.5", "one-key-head"])
@pytest.mark.parametrize("third", [True, False])
def test_an_eagle_head_on_two_ranks(third: bool, shape: str, tmp_path: Path) -> None:
    """Its fc is cut by columns; what it watches of the target is settled. Ranks that hold the same key head share
    contexts, but not those of the drafter, whose key heads differ.
    """
    folder = written(tmp_path, SHAPES[shape])
    config = SHAPES[shape] | {
        "num_key_value_heads": 2,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 333,
    }
    if not third:
        config = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))

    def draft(layout: Layout) -> Tensor:
        main = loaded(folder, layout)
        head = eagle_head(main, tmp_path / "head")
        assert isinstance(head, torch.nn.Module)
        load_random(head, head.table(), {}, 5, False)
        bench, parts = Bench(main, 1, extra=AutoregressiveDrafter(head, cast(Any, None)).planes()), list[Tensor]()
        for some in (slice(0, 70), slice(70, 89)):  # what the second part attends to lies behind two pages
            batch = bench.batch([(0, IDS[some])])
            bench.lengths[0] += len(batch.ids_T)
            state = head.draft_state(main.forward(batch, bench.planes))
            following = torch.tensor(IDS[1:][some])
            parts.append(head.logits(head.forward(following, state, batch, bench.planes)))
        return torch.cat(parts)

    ranks = layouts(tp=2, dcp=2 if shape == "one-key-head" else 1)
    with torch.inference_mode():
        want = draft(SINGLE_RANK)
    for got in on_ranks(2, lambda rank: draft(ranks[rank])):
        same(got, want)


@pytest.mark.parametrize("shape", ["v3.2", "qwen2.5"])
def test_pipeline_stages_hand_on_what_the_next_needs(shape: str, tmp_path: Path) -> None:
    """Two stages compute the whole model's hidden states and watched streams; each loads its own layers from the same
    files.
    """
    folder = written(tmp_path, SHAPES[shape])
    facts = read_facts(folder)
    whole, borders = loaded(folder), stage_borders(facts, 2)
    if facts.indexer is not None:
        assert facts.indexer.full[borders[1].first]  # no selection has to cross this border
    cuts = [borders]
    if facts.indexer is not None:
        assert not facts.indexer.full[2]  # layer 2 uses layer 1's selection
        cuts.append((PipelineStage(0, 2, 4), PipelineStage(2, 4, 4)))
    for cut in cuts:
        stages = [loaded(folder, stage=stage) for stage in cut]
        for model in (whole, *stages):
            model.watch([2, 1, facts.layers])
        planes = Planes(tuple(spec for stage in stages for spec in stage.planes()), 9)
        bench = Bench(whole, 1)
        with torch.inference_mode():
            want = whole.forward(bench.batch([(0, IDS)]), bench.planes)
            value = stages[0].run(bench.batch([(0, IDS)]), planes)
            assert isinstance(value, StageValue)
            got = stages[1].run(bench.batch([(0, IDS)]), planes, value)
        assert isinstance(got, Tensor) and torch.equal(got, want)


# ---- planted bugs: each must make the comparison fail


def residual_added_twice(patch: pytest.MonkeyPatch) -> None:
    value = ShardedStream.value

    def twice(self: ShardedStream) -> Tensor:
        pending = self.pending_TH
        x_TH = value(self)
        if pending is not None and self.axis.rank == 0:
            x_TH.add_(pending)
        return x_TH

    patch.setattr(ShardedStream, "value", twice)


def bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    row = ReferenceLayers.row

    def with_bias(
        self: ReferenceLayers, name: str, shape: tuple[int, int], columns: Any = None, has_bias: bool = False
    ) -> Linear:
        made = row(self, name, shape, columns, has_bias)
        if has_bias and made.bias is None:
            made.bias = torch.nn.Parameter(torch.empty(shape[0]), requires_grad=False)
            made.loads("bias", f"{name}.bias", (shape[0],), torch.bfloat16)
        return made

    patch.setattr(ReferenceLayers, "row", with_bias)


def watched_stream_unsettled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "thalweg.models.decoder.settled_copy", lambda h: (h.x_TH if isinstance(h, ShardedStream) else h.value()).clone()
    )


def shared_expert_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    def whole(layers: ReferenceLayers, name: str, moe: MoeFacts, hidden: int) -> Mlp:
        made = layers.mlp(f"{name}.shared_experts", hidden, moe.shared * moe.intermediate, axis=SINGLE)
        made.down.is_partial = True
        return made

    patch.setattr(ReferenceLayers, "shared_experts", whole)


def packed_gate_and_up_cut_across_the_middle(patch: pytest.MonkeyPatch) -> None:
    """Of gate above up, rank 0 takes the first half of the rows, all of gate, and rank 1 the second."""
    packed = ReferenceLayers.packed

    def cut(self: ReferenceLayers, parts: Sequence[PackedShard], inputs: int, has_bias: bool = False) -> Linear:
        if parts[0].here is not None and parts[0].name.endswith("gate_proj"):
            whole, rows = parts[self.layout.tp.rank], parts[0].rows
            parts = [replace(whole, here=here) for here in (range(rows // 2), range(rows // 2, rows))]
        made = packed(self, parts, inputs, has_bias)
        made.weights.skips.append(r".*(gate|up)_proj\..*")
        return made

    patch.setattr(ReferenceLayers, "packed", cut)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "residual added twice": (residual_added_twice, "qwen2.5"),
    "bias added twice": (bias_on_every_rank, "one-key-head"),
    "watched stream unsettled": (watched_stream_unsettled, "qwen2.5"),
    "shared expert added twice": (shared_expert_on_every_rank, "v2-lite"),
    "packed gate and up cut across their middle": (packed_gate_and_up_cut_across_the_middle, "v2-lite"),
}


def watching(folder: Path, layout: Layout) -> Tensor:
    """Hidden states with the streams of two layers behind them."""
    model = loaded(folder, layout)
    model.watch([1, 2])
    bench = Bench(model, 1)
    return model.forward(bench.batch([(0, IDS)]), bench.planes)


@pytest.mark.parametrize("bug", ["", *BUGS])
def test_planted_bugs_are_caught(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in sorted({shape for _, shape in BUGS.values()}) if not bug else [BUGS[bug][1]]:
        (tmp_path / shape).mkdir()
        folder, ranks = written(tmp_path / shape, SHAPES[shape]), layouts(tp=2)
        with torch.inference_mode():
            want = watching(folder, SINGLE_RANK)
        if bug:
            BUGS[bug][0](monkeypatch)
        for got in on_ranks(2, lambda rank, ranks=ranks, folder=folder: watching(folder, ranks[rank])):
            off = float((got - want).abs().max() / want.abs().max())
            assert off < CLOSE if not bug else off > 20 * CLOSE
