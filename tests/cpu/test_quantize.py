"""`thalweg quantize`: codes are the nearest ones, errors those of the formats, and results load, serve and go on."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu import zoo
from thalweg import LLM, SamplingParams
from thalweg.bench.make_checkpoint import main as make_checkpoint
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import Declared, Stored
from thalweg.quant.scheme import Read, Scheme, TensorSpec
from thalweg.quantize import calibrate, convert, jobs
from thalweg.quantize.calibrate import Calibration
from thalweg.quantize.cli import main
from thalweg.quantize.convert import ShardWriter, Source
from thalweg.quantize.feedback import round_with_feedback, second_moments
from thalweg.quantize.round import encode
from thalweg.quantize.targets import TARGETS, config_of
from thalweg.weights.index import INDEX
from thalweg.weights.stream import Safetensors

TINY = Path(__file__).parents[2] / "models/tiny"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
# root mean squared error of normal weights in groups as written here, by the producers' own rounding
ERRORS = {"int4": 0.111, "w4afp8": 0.117, "nvfp4": 0.0955, "mxfp4": 0.112, "int8": 0.0079, "fp8": 0.0265}
E2M1, INTEGERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6]), torch.arange(-8.0, 8.0)
LEVELS = {"int4": INTEGERS, "w4afp8": INTEGERS, "nvfp4": E2M1, "mxfp4": E2M1}


def scheme_of(name: str) -> Scheme:
    config = config_of(name, None, None, (), has_experts=True, keeps_fp8=False)
    return jobs.written(Declared(config).of(TensorSpec(EXPERT, (64, 256), torch.bfloat16)))


def quantize(*words: str) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("name", TARGETS)
def test_errors_are_those_of_the_format(name: str) -> None:
    torch.manual_seed(3)
    numbers, scheme = torch.randn(256, 1024), scheme_of(name)
    weight = TensorSpec(EXPERT, (256, 1024), torch.bfloat16)
    tensors = encode(scheme, weight, numbers, float(numbers.abs().max()))
    assert [(tuple(t.shape), t.dtype) for t in tensors] == [(s.shape, s.dtype) for s in scheme.stored(weight)]
    error = (scheme.decode(weight, tensors, ()).float() - numbers).square().mean().sqrt()
    assert float(error) == pytest.approx(ERRORS[name], rel=0.02)


@pytest.mark.parametrize("name", LEVELS)
def test_each_code_is_the_nearest_under_its_stored_scale(name: str) -> None:
    """Of all levels that the format has, none is nearer to a number than the one that it decodes to."""
    torch.manual_seed(4)
    numbers, scheme = torch.randn(16, 256) * 0.1, scheme_of(name)
    weight = TensorSpec(EXPERT, (16, 256), torch.bfloat16)
    tensors = encode(scheme, weight, numbers, float(numbers.abs().max()))
    decoded, levels = scheme.decode(weight, tensors, ()).float(), LEVELS[name]
    group = scheme.group  # type: ignore[attr-defined]
    scale = step_of(name, tensors).repeat_interleave(group, 1)
    distance = (numbers[..., None] - scale[..., None] * levels).abs()
    assert torch.allclose((numbers - decoded).abs(), distance.amin(-1), atol=1e-6)


def step_of(name: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """What a code of 1 stands for in each group."""
    _, scale, *more = tensors
    if name == "mxfp4":
        return torch.exp2(scale.float() - 127)
    return scale.float() / more[0] if more else scale.float()


@pytest.mark.parametrize("name", ("nvfp4", "mxfp4"))
def test_halves_go_to_the_even_code_and_zeros_stay(name: str) -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, 0, 0, 0, 0, 0, 6.0])
    rows = torch.cat((halves, torch.zeros(48))).repeat(2, 1)
    scheme, weight = scheme_of(name), TensorSpec(EXPERT, (2, 64), torch.bfloat16)
    decoded = scheme.decode(weight, encode(scheme, weight, rows, 6.0), ())
    assert decoded[0, :11].tolist() == pytest.approx([0, 1, 1, 2, 2, 4, 4, 6, 0, -2, 0]) and not decoded[:, 16:].any()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    for name in TARGETS:
        assert quantize(str(TINY), str(folder / name), "--format", name, "--threads", "2") == 0
    return folder


@pytest.mark.parametrize("name", TARGETS)
def test_the_bundled_model_still_adds(made: Path, name: str) -> None:
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 34), (905, 77), (481, 519))]
    with LLM(str(made / name)) as llm:
        texts = [out.outputs[0].text for out in llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=40))]
    assert texts == ["12 + 34 = 46", "905 + 77 = 982", "481 + 519 = 1000"]


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_rounded_keeps_its_bits(made: Path, name: str) -> None:
    before, after = load_file(TINY / "model.safetensors"), load_file(made / name / "model.safetensors")
    facts = read_facts(made / name)
    with Safetensors(made / name) as stream:
        stored = Stored(stream.specs, facts.quantization_config)
        scheme = stored.of(TensorSpec(EXPERT, (128, 256), torch.bfloat16))
    assert scheme.name == scheme_of(name).name
    plain = [key for key in before if before[key].dtype in (torch.bfloat16, torch.float32) and "scale" not in key]
    assert len(plain) > 30 and all(torch.equal(before[key], after[key]) for key in plain)
    attention = "model.layers.0.self_attn.o_proj.weight"
    same = name != "int8"
    assert (after[attention].view(torch.uint8).equal(before[attention].view(torch.uint8))) == same
    if name == "fp8":
        assert all(before[key].view(torch.uint8).equal(after[key].view(torch.uint8)) for key in before)


def test_names_and_configuration_are_the_producers(made: Path) -> None:
    """Those that compressed-tensors 0.20.0 read: it gave the same numbers for these tensors."""
    config = json.loads((made / "int4/config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == ["pack-quantized", "float-quantized"]
    assert {"lm_head", "model.layers.4.shared_head.head"} <= set(config["ignore"])
    keys = load_file(made / "int4/model.safetensors")
    module = EXPERT.removesuffix(".weight")
    assert keys[f"{module}.weight_shape"].tolist() == [128, 256] and f"{module}.weight" not in keys
    assert keys[f"{module}.weight_packed"].dtype == torch.int32
    assert keys["model.layers.0.self_attn.o_proj.weight_scale"].shape == (2, 2)
    totals = load_file(made / "nvfp4/model.safetensors")
    gate, up = (totals[f"model.layers.1.mlp.experts.3.{half}_proj.weight_global_scale"] for half in ("gate", "up"))
    assert torch.equal(gate, up), "engines join them, and have one scale for both"
    assert sorted(path.name for path in (made / "int4").iterdir()) == sorted(
        {path.name for path in TINY.iterdir()} - {"README.md", "LICENSE", "results.json"}
    )


def test_shards_have_an_index_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--format", "mxfp4", "--shard-size", "0.002")
    assert quantize(str(TINY), str(whole), *flags) == 0
    names = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(names) > 4 and set(json.loads((whole / INDEX).read_text())["weight_map"].values()) == set(names)
    written = ShardWriter.put

    def until(self: ShardWriter, spec: TensorSpec, tensor: Tensor) -> None:
        if self.path.name == names[2]:
            raise KeyboardInterrupt
        written(self, spec, tensor)

    monkeypatch.setattr(ShardWriter, "put", until)
    assert quantize(str(TINY), str(cut), *flags) == 130
    monkeypatch.undo()
    assert {path.name for path in cut.glob("*.safetensors")} == set(names[:2])
    assert quantize(str(TINY), str(cut), "--format", "mxfp4", "--shard-size", "0.003") == 2
    assert quantize(str(TINY), str(cut), "--format", "int4", "--shard-size", "0.002") == 2
    capsys.readouterr()
    assert quantize(str(TINY), str(cut), *flags) == 0
    assert "of which a former run wrote 2" in capsys.readouterr().out
    assert not list(cut.glob("*.part"))
    for path in whole.iterdir():
        assert (cut / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_dense_model_of_plain_weights(tmp_path: Path, family: str) -> None:
    """A source in bf16: all its linear layers are rounded, and what engines keep plain is not."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = plain_model(tmp_path, family, head_dim=32, **sizes)
    for name in ("int4", "int8", "fp8", "nvfp4"):
        assert quantize(str(folder), str(tmp_path / name), "--format", name) == 0
        tensors = load_file(tmp_path / name / "model.safetensors")
        plain = {key for key, value in tensors.items() if value.dtype == torch.bfloat16 and value.dim() == 2}
        assert not any("proj" in key and not key.endswith("scale") for key in plain)
        assert "model.embed_tokens.weight" in plain
    assert quantize(str(folder), str(tmp_path / "w"), "--format", "w4afp8") == 2


def test_help_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantize("--help")
    lines = capsys.readouterr().out.splitlines()
    assert {f"  {name:<8}{target.summary}" for name, target in TARGETS.items()} <= set(lines)
    assert "  thalweg quantize models/tiny tiny-int4 --format int4" in lines


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--format", "int5"), "invalid choice"),
        (("--format", "mxfp4", "--group-size", "32"), "groups of its own"),
        (("--format", "int8", "--modules", "experts"), "int8 is of linear"),
        (("--format", "fp8", "--ignore", "mlp.gatee"), "no module is called so; one is model.layers.0"),
        (("--format", "int4", "--ignore", "re:("), "no regular expression"),
        (("--format", "int4", "--device", "cuda"), "no CUDA device"),
        (("--format", "int4", "--calibration-tokens", "9"), "without --calibrate TEXT"),
        (("--format", "int4", "--shard-size", "0"), "expected a number above 0"),
    ],
)
def test_flags_that_contradict(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Any, said: str) -> None:
    try:
        assert quantize(str(TINY), str(tmp_path / "out"), *flags) == 2
    except SystemExit as error:
        assert error.code == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def plain_model(folder: Path, family: str, **more: Any) -> Path:
    """Random weights in bf16."""
    config = zoo.draw_config(family, 5) | {"torch_dtype": "bfloat16"} | more
    (folder / "shape").mkdir()
    (folder / "shape/config.json").write_text(json.dumps(config))
    assert make_checkpoint([str(folder / "shape"), str(folder / "plain")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / "plain" / name)
    return folder / "plain"


def test_a_group_that_does_not_divide_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    folder = plain_model(tmp_path, "llama", intermediate_size=336, **sizes)
    (tmp_path / "text").write_text("word " * 3000)
    for more in ((), ("--calibrate", str(tmp_path / "text"))):
        for name, said in (("int4", "336 columns, which are no whole groups of 128: leave"), ("mxfp4", "groups of 32")):
            assert quantize(str(folder), str(tmp_path / "out"), "--format", name, *more) == 2
            error = capsys.readouterr().err
            assert said in error and "--ignore model.layers.0.mlp.down_proj" in error
            assert not (tmp_path / "out").exists()
    assert quantize(str(folder), str(tmp_path / "out"), "--format", "int4", "--ignore", "down_proj") == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    assert quantize(str(folder), str(tmp_path / "other"), "--format", "int8") == 2
    assert "has other files" in capsys.readouterr().err


def test_zeros_stay_zeros_in_every_format() -> None:
    weight = TensorSpec(EXPERT, (4, 128), torch.bfloat16)
    for name in TARGETS:
        scheme = scheme_of(name)
        assert not scheme.decode(weight, encode(scheme, weight, torch.zeros(4, 128), 0.0), ()).any(), name


def peak_bytes(folder: Path, name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes at most of what was read, decoded and rounded and is still held, while a model is written in a format."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "q_lora_rank": 128}
    sizes |= {"num_hidden_layers": layers, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    folder.mkdir(parents=True)
    source, made, peak = plain_model(folder, "v3", **sizes), list[weakref.ref[Tensor]](), [0]
    copy, numbers, rounded = Safetensors.copy, Source.numbers, convert.rounded

    def counted(tensors: Sequence[Tensor]) -> None:
        made.extend(map(weakref.ref, tensors))
        held = [tensor for ref in made if (tensor := ref()) is not None]
        made[:] = map(weakref.ref, held)
        peak.append(sum({each.data_ptr(): each.untyped_storage().nbytes() for each in held}.values()))

    def after(function: Callable[..., Any], tensors: Callable[[Any], Sequence[Tensor]]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            counted(tensors(result))
            return result

        return call

    monkeypatch.setattr(Safetensors, "copy", after(copy, lambda tensor: [tensor]))
    monkeypatch.setattr(Source, "numbers", after(numbers, lambda tensor: [tensor]))
    monkeypatch.setattr(convert, "rounded", after(rounded, lambda result: result[0]))
    assert quantize(str(source), str(folder / "out"), "--format", name, "--threads", "1") == 0
    monkeypatch.undo()
    return max(peak)


@pytest.mark.parametrize("name", ["nvfp4", "w4afp8"])
def test_memory_does_not_grow_with_layers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvfp4 asks weights for their neighbours' largest values. `benchmarks/quantize_memory.py` measures processes.

    A thread begins a weight when the one before has been written, or earlier: on a busy machine peaks differ by 23 %.
    """
    few, many = (peak_bytes(tmp_path / f"{n}", name, n, monkeypatch) for n in (2, 6))
    assert many < 1.5 * few, (few, many)


@pytest.mark.parametrize("name", ["int4", "fp8", "w4afp8"])
def test_plain_modules_are_listed_by_their_full_names(tmp_path: Path, name: str) -> None:
    """Other engines make a layer of codes for each module that is not listed."""
    more = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "q_lora_rank": 128}
    folder = plain_model(tmp_path, "v32", **more)
    assert quantize(str(folder), str(tmp_path / "out"), "--format", name) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    listed = set(config[{"int4": "ignore", "fp8": "modules_to_not_convert", "w4afp8": "ignored_layers"}[name]])
    tensors = load_file(tmp_path / "out/model.safetensors")
    plain = {
        key.removesuffix(".weight")
        for key, value in tensors.items()
        if value.dtype == torch.bfloat16 and value.dim() == 2
    }
    plain = {
        module for module in plain if not module.endswith(("embed_tokens", "_scale", "_scale_inv", "shared_head.head"))
    }
    assert "lm_head" in plain and plain <= listed, plain - listed
    assert (len(plain) > 20) == (name == "int4")


def test_a_source_in_another_packed_format(tmp_path: Path) -> None:
    """Codes to numbers to codes; FP8 attention stays as it is, whatever the experts were."""
    assert quantize(str(TINY), str(tmp_path / "first"), "--format", "w4afp8") == 0
    assert quantize(str(tmp_path / "first"), str(tmp_path / "second"), "--format", "nvfp4") == 0
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "second/model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8))
    with LLM(str(tmp_path / "second")) as llm:
        asked = [{"role": "user", "content": "What is 12 + 34?"}]
        assert llm.chat(asked, SamplingParams(temperature=0.0))[0].outputs[0].text == "12 + 34 = 46"


def test_experts_of_one_tensor_are_each_read(tmp_path: Path) -> None:
    """The layout of gpt-oss, whose reads are slices."""
    stream = tmp_path / "model.safetensors"
    save_file({"x": torch.arange(24).view(4, 6)}, stream)
    with Safetensors(tmp_path) as source:
        assert source.copy(Read("x", (slice(1, 3),))).tolist() == [[6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
        assert source.copy(Read("x", (slice(2, 3), slice(0, 6, 2)))).tolist() == [[12, 14, 16]]


def test_modules_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        quantize(str(TINY), str(out), "--format", "int4", "--group-size", "32", "--ignore", r"re:.*layers\.1\..*") == 0
    )
    keys = load_file(out / "model.safetensors")
    assert keys["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert keys["model.layers.2.mlp.experts.0.up_proj.weight_scale"].shape == (128, 8)


# --- on a text ---


def test_feedback_makes_outputs_nearer() -> None:
    """Inputs that are correlated, as those of layers are; and without any correlation it is rounding to nearest."""
    torch.manual_seed(5)
    numbers = torch.randn(64, 256)
    inputs = torch.randn(2048, 32) @ torch.randn(32, 256) + 0.3 * torch.randn(2048, 256)
    weight = TensorSpec("model.layers.0.mlp.up_proj.weight", (64, 256), torch.bfloat16)
    for name in ("int4", "nvfp4", "mxfp4", "int8"):
        scheme = jobs.written(Declared(config_of(name, "linear", None, (), False, False)).of(weight))
        largest = float(numbers.abs().max())
        plain = encode(scheme, weight, numbers, largest)
        fed = round_with_feedback(scheme, numbers, second_moments(inputs), largest)  # type: ignore[arg-type]
        assert [(t.shape, t.dtype) for t in fed] == [(t.shape, t.dtype) for t in plain]
        errors = [float(((scheme.decode(weight, t, ()) - numbers) @ inputs.t()).norm()) for t in (plain, fed)]
        assert errors[1] < 0.5 * errors[0]
        same = round_with_feedback(scheme, numbers, torch.eye(256), largest)  # type: ignore[arg-type]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(plain, same, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "v32"])
def test_what_layers_read_is_what_transformers_layers_read(tmp_path: Path, family: str) -> None:
    config = zoo.draw_config(family, 7)
    model = zoo.reference(config, 7)
    zoo.save(model, config, tmp_path / "model")
    facts = read_facts(tmp_path / "model")
    ids = tuple(range(3, 67))
    text, seen = Calibration(ids, 32), dict[str, list[Tensor]]()
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", "q_proj", "q_a_proj")) and hasattr(module, "weight"):
            module.register_forward_pre_hook(
                lambda _, x, name=name: seen.setdefault(name, []).append(x[0].flatten(0, 1))
            )
    with torch.no_grad():
        model(torch.tensor(ids).view(2, 32))
    batch, value, found = text.batch(torch.device("cpu")), None, dict[str, Tensor]()
    for layer in range(facts.layers):
        value, inputs = calibrate._run_layer(
            facts, tmp_path / "model", layer, batch, value, text.pages, torch.device("cpu")
        )
        found |= {name.removesuffix(".weight"): torch.cat(read) for name, read in inputs.of.items()}
    both = seen.keys() & found.keys()
    assert len(both) >= 2 * facts.layers
    for name in both:
        assert torch.allclose(found[name], torch.cat(seen[name]).float(), atol=2e-4, rtol=1e-3), name


def test_a_calibrated_run_is_nearer_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text(" ".join(f"What is {i} + {7 * i}? It is {8 * i}." for i in range(200)))
    flags = ("--format", "int4", "--modules", "linear", "--group-size", "32")
    more = ("--calibrate", str(tmp_path / "text"), "--calibration-tokens", "1500")
    assert quantize(str(TINY), str(tmp_path / "plain"), *flags) == 0
    assert quantize(str(TINY), str(tmp_path / "whole"), *flags, *more) == 0
    assert not (tmp_path / "whole" / convert.SCRATCH).exists()
    sample = "What is 45 + 315? It is 360. What is 46 + 322? It is 368."
    scores = []
    for folder in (TINY, tmp_path / "plain", tmp_path / "whole"):
        with LLM(str(folder)) as llm:
            scores.append(torch.tensor(llm.score(sample, use_tqdm=False)[0]))
    assert (scores[2] - scores[0]).norm() < 0.9 * (scores[1] - scores[0]).norm()

    rounded, calls = calibrate.round_with_feedback, []

    def until(*arguments: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return rounded(*arguments)

    monkeypatch.setattr(calibrate, "round_with_feedback", until)
    assert quantize(str(TINY), str(tmp_path / "cut"), *flags, *more) == 130
    assert quantize(str(TINY), str(tmp_path / "cut"), *flags, "--calibrate", str(tmp_path / "text")) == 2  # more tokens
    done = len(calls)
    assert quantize(str(TINY), str(tmp_path / "cut"), *flags, *more) == 0
    assert done > len(calls) - done, "the layers that were done are not rounded again"
    cut, whole = (list((tmp_path / name / "model.safetensors").read_bytes()) for name in ("cut", "whole"))
    differing = sum(a != b for a, b in zip(cut, whole, strict=True))
    assert differing < len(whole) / 1000, "sums differ in their last bits from run to run"


def test_w4afp8_gets_the_scales_of_its_experts_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 60)
    more = ("--calibrate", str(tmp_path / "text"), "--calibration-tokens", "600")
    assert quantize(str(TINY), str(tmp_path / "out"), "--format", "w4afp8", *more) == 0
    tensors = load_file(tmp_path / "out/model.safetensors")
    where = "model.layers.1.mlp.experts"
    scales = {
        name: [float(tensors[f"{where}.{e}.{name}.input_scale"]) for e in range(16)] for name in ("w1", "w2", "w3")
    }
    assert scales["w1"] == scales["w3"] and all(0 < value < 1 for each in scales.values() for value in each)
    assert len(set(scales["w2"])) > 8
    capsys.readouterr()
    assert quantize(str(tmp_path / "out"), str(tmp_path / "again"), "--format", "w4afp8") == 0
    assert "left out: 192 scales of activations" in capsys.readouterr().out
    with LLM(str(tmp_path / "out")) as llm:
        assert (
            "46"
            in llm.chat([{"role": "user", "content": "What is 12 + 34?"}], SamplingParams(temperature=0))[0]
            .outputs[0]
            .text
        )


def test_a_text_that_changes_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("word " * 3000)
    (tmp_path / "short").write_text("a few words")
    for name, text, said in (
        ("fp8", "text", "nothing that a text"),
        ("int4", "text", "nothing that a text"),
        ("int8", "short", "too short"),
    ):
        assert quantize(str(TINY), str(tmp_path / "out"), "--format", name, "--calibrate", str(tmp_path / text)) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
