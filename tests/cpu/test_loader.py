"""Loading: accounting of tensors, slices, FP8, in-place updates, and one-line errors for broken checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu import reference_model, zoo
from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from thalweg.config.model import facts_of
from thalweg.core.errors import CheckpointError
from thalweg.kernels.fp8_block.ref import quantize
from thalweg.models.catalog import read_facts
from thalweg.quant.fp8_block import SUFFIX, Fp8Block
from thalweg.quant.scheme import Read, TensorSpec
from thalweg.weights.index import INDEX
from thalweg.weights.loader import load
from thalweg.weights.stream import SINGLE, Safetensors
from thalweg.weights.table import Transform, WeightRule, WeightTable, unchanged

IDS = list(range(40))
NOT_QUANTISED = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")  # as published


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    config = zoo.draw_config("v32", 5)
    zoo.save(zoo.reference(config, 5), config, folder)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(published, tmp_path / "model"))


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Saves the checkpoint again as one file, with some tensors replaced, added or (None) left out."""
    everything = {name: tensor for name, tensor in (tensors(folder) | change).items() if tensor is not None}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(everything, folder / SINGLE)


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def logits(folder: Path) -> Tensor:
    return Bench(zoo.ours(folder), 1).step([(0, IDS)])[0]


def test_one_file_and_shards_are_the_same(folder: Path) -> None:
    want = logits(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    rewrite(folder, {})
    assert torch.equal(logits(folder), want)


def test_missing_shard(folder: Path) -> None:
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        zoo.ours(folder)


def test_truncated_file(folder: Path) -> None:
    cut = sorted(folder.glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{cut.name} is truncated"):
        zoo.ours(folder)


def test_a_garbage_file_is_refused(folder: Path) -> None:
    rewrite(folder, {})
    (folder / SINGLE).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        zoo.ours(folder)


def test_an_index_with_wrong_entries_is_refused(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="does not hold it"):
        zoo.ours(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_broken_index(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX):
        zoo.ours(folder)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Safetensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_facts(tmp_path)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.mlp.experts.3.up_proj.weight": None})
    with pytest.raises(
        CheckpointError, match=r"1 tensors are missing.*model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"
    ):
        zoo.ours(folder)


def test_unknown_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"belong nowhere.*model\.layers\.0\.self_attn\.sinks"):
        zoo.ours(folder)


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight"],
)
def test_wrong_shape_is_named(folder: Path, name: str) -> None:
    rewrite(folder, {name: tensors(folder)[name][:-1].contiguous()})
    with pytest.raises(CheckpointError, match=rf"{name}: shape"):
        zoo.ours(folder)


def test_transposed_and_wrong_shapes_are_refused(folder: Path) -> None:
    """The right number of elements in the wrong shape is still wrong."""
    name = "model.layers.0.self_attn.o_proj.weight"
    rewrite(folder, {name: tensors(folder)[name].reshape(2, -1)})
    with pytest.raises(CheckpointError, match="o_proj"):
        zoo.ours(folder)


def test_layers_behind_the_model_and_old_buffers_are_skipped_on_purpose(folder: Path) -> None:
    want, layers = logits(folder), read_facts(folder).layers
    rewrite(
        folder,
        {
            f"model.layers.{layers}.enorm.weight": torch.ones(3),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        },
    )
    assert torch.equal(logits(folder), want)
    rewrite(folder, {f"model.layers.{layers + 1}.enorm.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="belong nowhere"):
        zoo.ours(folder)


def test_unknown_architecture_lists_what_there_is(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*DeepseekV32ForCausalLM.*Qwen3ForCausalLM"):
        zoo.ours(folder)


def test_a_parameter_that_no_rule_fills(published: Path) -> None:
    facts = read_facts(published)
    model = reference_model.build(facts, torch.float32)
    table = model.table()
    table.rules = [rule for rule in table.rules if rule.target != "norm.weight"]
    table.skips.append(r"model\.norm\.weight")
    with Safetensors(published) as stream, pytest.raises(CheckpointError, match=r"norm\.weight \(0 of"):
        load(model, table, stream)


def test_progress_counts_every_slice_that_is_read(published: Path) -> None:
    facts, calls = read_facts(published), []
    model = reference_model.build(facts, torch.float32)
    with Safetensors(published) as stream:
        load(model, model.table(), stream, progress=lambda done, total: calls.append((done, total)))
        total = len(calls)
        assert total >= len(stream.specs)
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_partial_update_in_place(published: Path) -> None:
    """Some tensors again, later, from another stream: the same storage, nothing else touched, the same as a checkpoint
    with them.
    """
    model = zoo.ours(published)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    update = {
        "model.layers.1.mlp.experts.2.up_proj.weight": torch.randn_like(
            tensors(published)["model.layers.1.mlp.experts.2.up_proj.weight"]
        ),
        "model.layers.0.self_attn.kv_b_proj.weight": torch.randn_like(
            tensors(published)["model.layers.0.self_attn.kv_b_proj.weight"]
        ),
    }
    load(model, model.table(), InMemory(update), is_partial=True)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name][1])}
    assert changed == {"layers.1.mlp.experts.w13", "layers.0.attention.uk", "layers.0.attention.uv"}
    assert all(p.data_ptr() == before[name][0] for name, p in model.named_parameters())
    w13, old = dict(model.named_parameters())["layers.1.mlp.experts.w13"], before["layers.1.mlp.experts.w13"][1]
    rows = w13.shape[1] // 2
    assert torch.equal(w13[2, rows:], update["model.layers.1.mlp.experts.2.up_proj.weight"]) and torch.equal(
        w13[2, :rows], old[2, :rows]
    )
    fresh = reference_model.build(model.facts, torch.float32)
    load(fresh, fresh.table(), InMemory(tensors(published) | update))
    assert torch.equal(Bench(model, 1).step([(0, IDS)])[0], Bench(fresh, 1).step([(0, IDS)])[0])


def test_only_the_wanted_slice_is_read(published: Path) -> None:
    """A rule with `take` reads those rows; the rest of the tensor stays on disk."""
    reads: list[tuple[slice, ...]] = []

    class Spy(Safetensors):
        def deliver(self, wanted: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
            reads.extend(read.take for read in wanted)
            return super().deliver(wanted, device)

    module = torch.nn.Linear(read_facts(published).hidden, 8, bias=False)
    facts = read_facts(published)
    head = TensorSpec("lm_head.weight", (facts.vocab, facts.hidden), torch.float32)
    table = WeightTable([WeightRule(head, "weight", take=(slice(16, 24),))], [r"model\..*"])
    with Spy(published) as stream:
        load(module, table, stream)
    assert reads == [(slice(16, 24),)]
    assert torch.equal(module.weight, tensors(published)["lm_head.weight"][16:24])


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = zoo.draw_config("qwen2", 3) | {"tie_word_embeddings": True}
    theirs = zoo.reference(config, 3)
    zoo.save(theirs, config, tmp_path)
    model = zoo.ours(tmp_path)
    assert "head.weight" not in dict(model.named_parameters())
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0]
    assert torch.allclose(Bench(model, 1).step([(0, IDS)])[0], want, atol=1e-4)


@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_dummy_weights_are_sane_and_repeatable(family: str) -> None:
    facts = facts_of(zoo.draw_config(family, 7), "config.json")
    model, again = reference_model.build(facts, torch.float32), reference_model.build(facts, torch.float32)
    zoo.fill(model, seed=1)
    zoo.fill(again, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    bench = Bench(model, 1)
    hidden = bench.hidden([(0, [i % facts.vocab for i in range(60)])])[0]
    assert hidden.isfinite().all() and 0.3 < float(hidden.std()) < 3
    got = model.logits(hidden)
    assert got.dtype == torch.float32 and 0.3 < float(got.std()) < 5


def test_bfloat16_computes_the_same_within_its_precision(tmp_path: Path) -> None:
    """Most tokens: at a near-tie another expert is chosen, and that is no rounding error."""
    config = zoo.draw_config("v3", 5)
    zoo.save(zoo.reference(config, 5), config, tmp_path)
    want, model = logits(tmp_path), zoo.ours(tmp_path, torch.bfloat16)
    got = Bench(model, 1).step([(0, IDS)])[0]
    assert got.dtype == torch.float32
    assert float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median()) < 0.05


# FP8


def quantised(folder: Path, block: tuple[int, int], power_of_two: bool) -> None:
    """Rewrites a checkpoint in the published FP8 layout."""
    change: dict[str, Tensor | None] = {}
    for name, tensor in tensors(folder).items():
        if tensor.dim() == 2 and not any(part in name for part in NOT_QUANTISED):
            change[name], change[name + SUFFIX] = quantize(tensor, block, power_of_two)
    rewrite(folder, change)
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    edit_config(folder, quantization_config=fp8 | ({"scale_fmt": "ue8m0"} if power_of_two else {}))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_checkpoint_equals_its_dequantised_copy(folder: Path, power_of_two: bool) -> None:
    block = (16, 24)  # divides no dim of the model evenly
    quantised(folder, block, power_of_two)
    held = tensors(folder)
    assert held["model.layers.0.self_attn.q_b_proj.weight"].dtype == torch.float8_e4m3fn
    got = logits(folder)
    plain: dict[str, Tensor | None] = {}
    for name, tensor in held.items():
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = tensor.shape
            scale = held[name + SUFFIX]
            wide = torch.stack(
                [torch.stack([scale[i // block[0], j // block[1]] for j in range(columns)]) for i in range(rows)]
            )
            plain |= {name: tensor.float() * wide, name + SUFFIX: None}
    rewrite(folder, plain)
    assert torch.equal(got, logits(folder))


def test_fp8_without_scales(folder: Path) -> None:
    quantised(folder, (16, 16), False)
    rewrite(folder, {"model.layers.0.self_attn.o_proj.weight_scale_inv": None})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is FP8 but .*weight_scale_inv is missing"):
        zoo.ours(folder)


def test_fp8_without_a_block_size_in_the_config(folder: Path) -> None:
    quantised(folder, (16, 16), False)
    edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        zoo.ours(folder)


def test_fp8_scales_of_a_wrong_shape(folder: Path) -> None:
    quantised(folder, (16, 16), False)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    rewrite(folder, {name: tensors(folder)[name][:1].contiguous()})
    with pytest.raises(CheckpointError, match="does not cover"):
        zoo.ours(folder)


def test_a_weight_whose_scales_are_there_is_what_is_missing(folder: Path) -> None:
    quantised(folder, (16, 16), False)
    name = "model.layers.0.self_attn.o_proj.weight"
    rewrite(folder, {name: None})
    with pytest.raises(CheckpointError, match=rf"1 weights are missing.*{name}$"):
        zoo.ours(folder)


def test_scales_beside_a_tensor_that_is_not_fp8(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"belong nowhere.*o_proj\.weight_scale_inv"):
        zoo.ours(folder)


def test_dtype_decides_and_not_scale_fmt(folder: Path) -> None:
    """V3.1 and V3.2 say ue8m0 and store float32; a repack may store one byte: both mean the same numbers."""
    quantised(folder, (16, 16), True)
    want = logits(folder)
    bytes_of = {
        name: tensor.to(torch.float8_e8m0fnu) for name, tensor in tensors(folder).items() if name.endswith("scale_inv")
    }
    rewrite(folder, dict(bytes_of))
    assert torch.equal(logits(folder), want)


@pytest.mark.parametrize("first", [(0, 0), (16, 0), (8, 24), (5, 7)])
def test_decoding_a_slice_is_slicing_the_decoded(first: tuple[int, int]) -> None:
    q, scale = quantize(torch.randn(40, 50), (16, 12), False)
    scheme, take = Fp8Block((16, 12)), tuple(slice(start, start + 20) for start in first)
    weight, stored = TensorSpec("w", (40, 50), torch.bfloat16), {"w": q, "w" + SUFFIX: scale}
    whole, part = (
        scheme.decode(weight, [stored[read.name][read.take] for read in scheme.reads(weight, cut)], cut)
        for cut in ((), take)
    )
    assert torch.equal(part, whole[first[0] : first[0] + 20, first[1] : first[1] + 20])


def test_published_scale_shapes() -> None:
    """576 rows are 5 blocks, the last one half full; q_a above kv_a is 17, so fused they stay aligned."""
    kv_a, q_a = torch.randn(576, 256), torch.randn(1536, 256)
    (kv, kv_scale), (q, q_scale) = quantize(kv_a, (128, 128), False), quantize(q_a, (128, 128), False)
    assert kv_scale.shape == (5, 2) and q_scale.shape == (12, 2)
    scheme = Fp8Block((128, 128))
    weight = TensorSpec("w", (0, 256), torch.bfloat16)
    parts = (q, q_scale), (kv, kv_scale), (torch.cat([q, kv]), torch.cat([q_scale, kv_scale]))
    *apart, together = (scheme.decode(weight, part, ()) for part in parts)
    assert torch.equal(together, torch.cat(apart))


class Kept(torch.nn.Module):
    """Two weights below one another that stay FP8, with their multipliers, as a GPU keeps them."""

    def __init__(self) -> None:
        super().__init__()
        codes, scales = torch.zeros(512, 256, dtype=torch.float8_e4m3fn), torch.zeros(4, 2)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)


def fp8_parts(*names: str) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name in names:
        codes, scale = quantize(torch.randn(256, 256), (128, 128), False)
        made |= {name: codes, f"{name}_scale_inv": scale}
    return made


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def held_table(*rules: tuple[str, int, Transform]) -> WeightTable:
    """Rules (source, first row, transform) of weights that memory holds as FP8 in `Held.weight`."""
    scheme = Fp8Block((128, 128))
    return WeightTable(
        [
            WeightRule(
                TensorSpec(name, (256, 256), torch.bfloat16), "weight", (slice(row, row + 256),), (), change, scheme
            )
            for name, row, change in rules
        ]
    )


def test_weights_that_stay_fp8_keep_codes_and_scales_in_their_slices() -> None:
    made, module = fp8_parts("a", "b"), Kept()
    table = held_table(("a", 0, unchanged), ("b", 256, unchanged))
    load(module, table, InMemory(made), FP8)
    assert torch.equal(module.weight.view(torch.uint8), torch.cat([made["a"], made["b"]]).view(torch.uint8))
    assert torch.equal(module.weight_scale, torch.cat([made["a_scale_inv"], made["b_scale_inv"]]))
    fresh = fp8_parts("b")
    load(module, table, InMemory(fresh), FP8, is_partial=True)  # an update writes its own slice only
    assert torch.equal(module.weight_scale, torch.cat([made["a_scale_inv"], fresh["b_scale_inv"]]))


def test_weights_that_cannot_stay_fp8_say_why() -> None:
    made, table = fp8_parts("a"), held_table(("a", 0, unchanged))
    plain = {"a": torch.zeros(256, 256)}
    with pytest.raises(CheckpointError, match=r"a is unquantized, and weight holds fp8_block"):
        load(Kept(), table, InMemory(plain), FP8, is_partial=True)
    with pytest.raises(CheckpointError, match="a_scale_inv is missing"):
        load(Kept(), table, InMemory({"a": made["a"]}), FP8, is_partial=True)
    with pytest.raises(CheckpointError, match="in blocks of"):
        load(Kept(), table, InMemory(made), FP8 | {"weight_block_size": [64, 64]}, is_partial=True)
    scheme = Fp8Block((128, 128))
    assert not scheme.holds((slice(64, 320),), (512, 256), False)  # cuts a block
    assert not scheme.holds((), (256, 256), True)  # its rows are reordered
    assert not scheme.holds((), (256, 200), False)  # its last block of columns is not whole
    assert not Fp8Block((64, 64)).holds((), (256, 256), False)  # no kernel multiplies it
    assert scheme.holds((slice(128, 200),), (200, 256), False)


@pytest.mark.parametrize("place", ["../model.safetensors", "sub/model.safetensors"])
def test_shards_lie_beside_their_index(place: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / place)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(CheckpointError, match="no name of a file beside it"):
        Safetensors(tmp_path)
