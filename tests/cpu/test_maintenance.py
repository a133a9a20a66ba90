"""Weight updates and profiles on a running server and in the calling thread."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.fakes import DEEPSEEK_V32, FakeFront, eventually, fake_app, serving
from tests.cpu.test_client import SETTINGS, collect, run
from tests.cpu.test_client import eventually as soon
from tests.cpu.test_client import serving as engine_process
from tests.cpu.test_nonsense import at_once
from tests.cpu.test_serve import Served
from thalweg.bench import replay
from thalweg.config.server import ServerOptions
from thalweg.core.errors import CheckpointError, InvalidRequest, UnsupportedConfig
from thalweg.core.messages import StartProfile, UpdateWeights
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.engine.recording import read
from thalweg.llm import LLM
from thalweg.server.app import build

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
ROOT, USER = "sk-root", "sk-user"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = list(range(20, 160))
FP8 = "model.layers.1.mlp.experts.0.up_proj.weight"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def tensors(folder: Path = MODEL) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def save(folder: Path, content: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(content, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of the bundled model's architecture, with other weights."""
    folder = tmp_path_factory.mktemp("other")
    noise = torch.Generator().manual_seed(1)
    plain = (torch.float32, torch.bfloat16)
    changed = {
        name: (tensor * (1 + 0.3 * torch.rand(tensor.shape, generator=noise))).to(tensor.dtype)
        if tensor.dtype in plain and not name.endswith("_scale_inv")
        else tensor
        for name, tensor in tensors().items()
    }
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, folder)
    return save(folder, changed)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tensors of the model: one of them FP8 with its scales, and all norms before attention, which are equal
    here.
    """
    held = tensors()
    chosen = {name: torch.ones_like(value) for name, value in held.items() if name.endswith(".input_layernorm.weight")}
    chosen |= {FP8: held[FP8].float().flip(0).to(held[FP8].dtype), f"{FP8}_scale_inv": held[f"{FP8}_scale_inv"]}
    return save(tmp_path_factory.mktemp("some"), chosen)


def answer(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def tiny() -> LLM:
    """For tests that leave it as it was."""
    return LLM(str(MODEL))


@pytest.fixture(scope="module")
def want(tiny: LLM, other: Path) -> dict[str, list[int]]:
    """What each checkpoint says."""
    return {"tiny": answer(tiny), "other": answer(LLM(str(other)))}


# ---- in the calling thread


def test_replaced_weights_compute_what_their_checkpoint_does(
    other: Path, some: Path, want: dict[str, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tensors, and two tensors: the recorded steps of a CPU follow, on their own thread. A recording of it
    knows.
    """
    llm = LLM(str(MODEL), overlap_schedule=True, crash_dump_folder=str(tmp_path))
    assert answer(llm) == want["tiny"] != want["other"]
    at = llm.engine.loop.scheduler.step
    layers = llm.engine.runner.model.facts.layers
    assert llm.update_weights_from_disk(str(some), flush_cache=False) == f"{layers + 1} of 221 tensors replaced"
    assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens > 0, "the cache was to be kept"
    llm.engine.flush_cache()
    fresh = LocalEngine(msgspec.structs.replace(llm.engine.config, weight_updates=(str(some),)))
    ours, theirs = (dict(one.runner.model.named_parameters()) for one in (llm.engine, fresh))  # type: ignore[attr-defined]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "as an engine that starts with them"
    fresh.submit(PROMPT, GREEDY)
    assert answer(llm) == [token for _ in range(40) if not fresh.idle for d in fresh.step() for token in d.tokens]
    assert llm.update_weights_from_disk(str(other)) == "221 of 221 tensors replaced"
    result = llm.generate([PROMPT], GREEDY)[0]
    assert result.outputs[0].token_ids == want["other"] and result.num_cached_tokens == 0
    recorder: Any = llm.engine.loop.recorder
    path = recorder.dump("test")
    assert [folder for _, folder in read(path).weights] == [str(some), str(other)]
    with pytest.raises(UnsupportedConfig, match=f"replaced at step {at}, from .*--until {at - 1}"):
        replay.main([str(path), "--json"])
    assert replay.main([str(path), "--json", "--until", str(at - 1)]) == 0
    assert json.loads(capsys.readouterr().out)["compared"] == GREEDY.max_tokens


def test_a_failed_weight_update_is_rolled_back(tmp_path: Path, want: dict[str, list[int]]) -> None:
    """NaN in the pages of one request would reach the next that gets them: a masked place counts 0 times what it
    holds.
    """
    name = "model.layers.0.input_layernorm.weight"
    broken = {name: torch.full_like(tensors()[name], 3e38)}
    llm = LLM(str(MODEL), radix_cache=False, deterministic_inference=True)
    llm.update_weights_from_disk(str(save(tmp_path / "broken", broken)))
    assert answer(llm) != want["tiny"]
    llm.update_weights_from_disk(str(MODEL))
    assert answer(llm) == want["tiny"]


BAD: dict[str, tuple[Change, str]] = {
    "unknown": (lambda t: {**t, "model.layers.0.sinks": torch.zeros(4)}, r"belong nowhere.*model\.layers\.0\.sinks"),
    "shape": (lambda t: {**t, "model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight: shape \(3,\)"),
    "last": (lambda t: {**t, "lm_head.weight": t["lm_head.weight"][:-1].contiguous()}, r"lm_head\.weight: shape"),
    "rearranged": (
        lambda t: {
            k: v[:, :-1].contiguous() if "kv_b_proj.weight" in k and "scale" not in k else v for k, v in t.items()
        },
        r"kv_b_proj\.weight: shape",
    ),
    "scale": (
        lambda t: {k: v for k, v in t.items() if k != f"{FP8}_scale_inv"},
        r"up_proj\.weight is FP8 but .* missing",
    ),
    "scale shape": (lambda t: {**t, f"{FP8}_scale_inv": torch.ones(7, 7)}, r"up_proj\.weight_scale_inv: .*\(7, 7\)"),
    "type": (
        lambda t: {**t, "model.norm.weight": t["model.norm.weight"].long()},
        r"model\.norm\.weight is torch\.int64",
    ),
    "nothing": (lambda t: {"model.rotary_emb.inv_freq": torch.ones(2)}, "holds none"),
}


def test_a_folder_that_does_not_fit_leaves_every_bit_as_it_was(tiny: LLM, tmp_path: Path) -> None:
    """Everything is found before the first write, whichever tensor it is, and the cache stays."""
    llm = tiny
    answer(llm)
    parameters = dict(llm.engine.runner.model.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    cached = llm.engine.loop.scheduler.allocator.tree.num_cached
    changed = {k: v * 2 if v.dtype == torch.float32 and "scale" not in k else v for k, v in tensors().items()}

    def refused(folder: Path, says: str) -> None:
        with pytest.raises(InvalidRequest, match=says) as error:
            llm.update_weights_from_disk(str(folder))
        assert error.value.field == "model_path" and "nothing was changed" in str(error.value)
        assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items()), says
        assert llm.engine.loop.scheduler.allocator.tree.num_cached == cached > 0

    for name, (change, says) in BAD.items():
        refused(save(tmp_path / name, change(changed)), says)
    refused(tmp_path / "nowhere", "is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither")
    cut = save(tmp_path / "cut", changed) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    refused(tmp_path / "cut", "truncated")
    config = json.loads((MODEL / "config.json").read_text())
    elsewhere = save(tmp_path / "elsewhere", changed)
    (elsewhere / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    refused(elsewhere, "of another model: rope differ")
    norms = [name for name in changed if name.endswith(".input_layernorm.weight")]
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = changed | {norms[0]: changed[norms[0]].index_fill(0, torch.tensor(3), value)}
        refused(save(tmp_path / "not finite", broken), f"{norms[0]} holds values that are not finite")
    nan = changed[FP8].view(torch.uint8).clone()
    nan[0, 5] = 0x7F
    refused(save(tmp_path / "nan fp8", changed | {FP8: nan.view(changed[FP8].dtype)}), f"{FP8} holds values")
    scales = torch.full_like(changed[f"{FP8}_scale_inv"], torch.nan)
    refused(save(tmp_path / "nan scale", changed | {f"{FP8}_scale_inv": scales}), "_scale_inv holds values")


def test_a_folder_of_strange_files_is_refused_at_once(tiny: LLM, tmp_path: Path) -> None:
    """Nothing waits for a FIFO, is read without end, or is parsed without bounds."""
    llm = tiny
    before = answer(llm)
    good = save(tmp_path / "good", tensors()) / "model.safetensors"
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")

    def header(change: Callable[[dict[str, Any]], object]) -> bytes:
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    name = "model.norm.weight"
    deep, digits = "[" * 100_000 + "]" * 100_000, "9" * 5000
    contents: dict[str, tuple[str, bytes | Callable[[Path], object]]] = {
        "fifo": ("model.safetensors", os.mkfifo),
        "device": ("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "loop": ("model.safetensors", lambda path: path.symlink_to(path.name)),
        "folder": ("model.safetensors", Path.mkdir),
        "long header": ("model.safetensors", (2**63).to_bytes(8, "little") + data[8:]),
        "deep header": ("model.safetensors", len(deep).to_bytes(8, "little") + deep.encode()),
        "overlap": ("model.safetensors", header(lambda h: h[name].update(data_offsets=[0, 1024]))),
        "beyond": ("model.safetensors", header(lambda h: h[name].update(data_offsets=[2**62, 2**62 + 1024]))),
        "negative": ("model.safetensors", header(lambda h: h[name].update(data_offsets=[-1024, 0]))),
        "huge shape": ("model.safetensors", header(lambda h: h[name].update(shape=[2**62, 2**62]))),
        "dtype": ("model.safetensors", header(lambda h: h[name].update(dtype=["F32"]))),
        "config fifo": ("config.json", os.mkfifo),
        "config deep": ("config.json", deep.encode()),
        "config digits": (
            "config.json",
            f'{{"architectures": ["DeepseekV32ForCausalLM"], "vocab_size": {digits}}}'.encode(),
        ),
        "config nan": (
            "config.json",
            (MODEL / "config.json").read_bytes().replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": NaN'),
        ),
        "index fifo": ("model.safetensors.index.json", os.mkfifo),
        "index deep": ("model.safetensors.index.json", deep.encode()),
        "index digits": ("model.safetensors.index.json", f'{{"weight_map": {digits}}}'.encode()),
    }
    for label, (file, content) in contents.items():
        folder = tmp_path / label
        shutil.copytree(good.parent, folder)
        (folder / file).unlink(missing_ok=True)
        if callable(content):
            content(folder / file)
        else:
            (folder / file).write_bytes(content)
        with at_once(), pytest.raises(InvalidRequest, match=f"{file}.*nothing was changed") as error:
            llm.update_weights_from_disk(str(folder))
        assert error.value.field == "model_path" and "\n" not in str(error.value) and len(str(error.value)) < 1000, (
            label
        )
    assert answer(llm) == before


def test_what_a_profile_needs_and_leaves(tiny: LLM, tmp_path: Path) -> None:
    llm = tiny
    with pytest.raises(InvalidRequest, match="no profile runs"):
        llm.stop_profile()
    with pytest.raises(InvalidRequest, match="no GPU") as error:
        llm.engine.control(StartProfile(0, str(tmp_path), cpu=False))
    assert error.value.field == "activities"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="file") as error:
        llm.start_profile(str(tmp_path / "file"))
    assert error.value.field == "output_dir"
    hands: Any = llm.engine.loop.worker
    runner = hands.runner
    llm.engine.flush_cache()
    llm.start_profile(str(tmp_path), shapes=True, stacks=True)
    first = llm.engine.loop.scheduler.step
    answer(llm)
    names = steps(Path(llm.stop_profile()))
    assert hands.runner is runner, "a step costs what it did before"
    assert names == {
        f"{half} step {step} rows 1 tokens {1 if step > first else len(PROMPT)}"
        for half in ("forward", "sample")
        for step in range(first, first + 16)
    }


def steps(path: Path) -> set[str]:
    """The names of steps in a Chrome trace, each around an operation of torch."""
    assert path.name.endswith(".trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    products = [event for event in events if event["name"].startswith("aten::")]
    named = [event for event in events if " step " in event["name"]]
    for event in named:
        end = event["ts"] + event["dur"]
        assert any(event["ts"] <= one["ts"] <= end and one["tid"] == event["tid"] for one in products), event["name"]
    return {event["name"] for event in named}


# ---- over HTTP


class Target(Served):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            *("--api-key", USER, "--admin-api-key", ROOT, "--profile-folder", str(folder), "--enable-overlap-schedule")
        )

    def post(self, path: str, body: Any = None, key: str = ROOT) -> httpx.Response:
        head = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=head, timeout=60)

    def generate(self, tokens: int = 16) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found: dict[str, Any] = self.post("/generate", {"input_ids": PROMPT, "sampling_params": params}).json()
        return found

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.url + "/server_info", headers={"x-api-key": USER}).json()
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("profiles"))
    yield target
    target.process.kill()
    target.process.wait()


def error(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


def test_admin_routes_need_the_admin_key_and_are_off_by_default(server: Target, other: Path) -> None:
    before = server.generate()["output_ids"]
    for path, body in (
        ("/update_weights_from_disk", {"model_path": str(other)}),
        ("/start_profile", {}),
        ("/stop_profile", None),
    ):
        assert server.post(path, body, USER).status_code == 403 and server.post(path, body, "sk").status_code == 401
    assert server.generate()["output_ids"] == before and not list(server.folder.iterdir())
    with serving(fake_app(FakeFront())) as url:
        for path in ("/update_weights_from_disk", "/start_profile", "/stop_profile"):
            refused = httpx.post(url + path, json={"model_path": "x"})
            assert refused.status_code == 403 and "--admin-api-key" in error(refused)["message"]
    with serving(fake_app(FakeFront(), ServerOptions(admin_api_key=ROOT))) as url:
        for path in ("/start_profile", "/stop_profile"):
            refused = httpx.post(url + path, headers={"Authorization": f"Bearer {ROOT}"})
            assert refused.status_code == 403 and "--profile-folder" in error(refused)["message"]


def test_weights_over_http(server: Target, other: Path, tmp_path: Path, want: dict[str, list[int]]) -> None:
    """A stream that runs goes on, what it computed under the old weights is not found later; a refusal changes
    nothing.
    """
    assert server.generate()["output_ids"] == want["tiny"] and server.generate()["meta_info"]["cached_tokens"] == 128
    (loop := tmp_path / "loop").symlink_to("loop")
    refused = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert refused.status_code == 400 and error(refused)["param"] == "model_path"
    for field, value in (
        ("load_format", "pt"),
        ("keep_pause", True),
        ("model_path", ""),
        ("model_path", str(loop)),
        ("weight_version", "x" * 300),
    ):
        refused = server.post("/update_weights_from_disk", {"model_path": str(other), field: value})
        assert refused.status_code == 400 and error(refused)["param"] == field
    assert server.generate()["output_ids"] == want["tiny"] and server.generate()["meta_info"]["cached_tokens"] == 128
    body = {
        "prompt": PROMPT,
        "max_tokens": 1500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    head = {"Authorization": f"Bearer {USER}"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=head, timeout=60) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        told = server.post(
            "/update_weights_from_disk",
            {"model_path": str(other), "load_format": "auto", "weight_version": "step 7", "torch_empty_cache": True},
        )
        assert told.json() == {"success": True, "message": "221 of 221 tensors replaced", "num_paused_requests": 0}
        last = [json.loads(line) for line in lines][-1]
    assert last["choices"][0]["finish_reason"] == "length"
    fresh = server.generate()
    assert fresh["output_ids"] == want["other"] and fresh["meta_info"]["cached_tokens"] == 0
    assert server.info()["weight_version"] == "step 7"
    kept = server.post("/update_weights_from_disk", {"model_path": str(MODEL), "flush_cache": False})
    assert kept.json()["success"] and server.generate()["meta_info"]["cached_tokens"] == 128
    assert server.info()["weight_version"] == "default"


def test_profiles_over_http(server: Target) -> None:
    assert server.post("/stop_profile").status_code == 400
    outside = ("..", "../x", "/tmp", "a/../../x", "link/x", "a\0b")
    (server.folder / "link").symlink_to("/tmp")
    for folder in outside:
        refused = server.post("/start_profile", {"output_dir": folder})
        assert refused.status_code == 400 and error(refused)["param"] == "output_dir", folder
    for field, value in (("num_steps", 0), ("activities", ["MEM"]), ("profile_by_stage", True)):
        refused = server.post("/start_profile", {field: value})
        assert refused.status_code == 400 and error(refused)["param"].startswith(field)
    started = server.post("/start_profile")
    assert started.json() == {"success": True, "message": f"profiling CPU until /stop_profile, into {server.folder}"}
    twice = server.post("/start_profile", {"num_steps": 3})
    assert twice.status_code == 400 and "runs already" in error(twice)["message"]
    server.generate(3)
    path = Path(server.post("/stop_profile").json()["message"].removeprefix("written: "))
    names = steps(path)
    assert path.parent == server.folder and len(names) >= 6 and any(name.endswith("rows 1 tokens 1") for name in names)
    started = server.post("/start_profile", {"output_dir": "deep/er", "num_steps": 4, "activities": ["CPU", "GPU"]})
    assert started.json()["message"].startswith("profiling CPU for 4 steps")
    server.generate(20)
    deep = server.folder / "deep" / "er"
    eventually(lambda: bool(list(deep.glob("*.gz"))))
    assert server.post("/stop_profile").status_code == 400, "it has ended by itself"
    (path,) = deep.iterdir()
    assert len(steps(path)) == 8


# ---- a new engine


def test_a_restarted_engine_has_the_updated_weights(other: Path, some: Path, want: dict[str, list[int]]) -> None:
    async def test() -> None:
        async with engine_process() as front:
            for folder in (some, other):
                await front.control(UpdateWeights(0, str(folder)))
            assert front.config.weight_updates == (str(other),), "what a whole checkpoint has replaced is forgotten"
            assert front.ready is not None
            os.kill(front.ready.pid, signal.SIGKILL)
            await soon(lambda: front.restarts == 1 and front.state == "ready", 60)
            pieces = await collect(front, PROMPT, GREEDY)
            assert [token for piece in pieces for token in piece.ids] == want["other"]

    run(test)


def test_a_restarted_engine_without_the_updated_weights_has_the_starting_ones(
    other: Path, want: dict[str, list[int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """/health, /server_info, a metric and the log say so, until weights are replaced again."""
    folder = tmp_path / "gone"
    shutil.copytree(other, folder)

    async def test() -> None:
        async with engine_process() as front:
            app = build(front, ServerOptions(), DEEPSEEK_V32, path="models/tiny")
            await front.control(UpdateWeights(0, str(folder), version="step 7"))
            (folder / "model.safetensors").unlink()
            assert front.ready is not None
            os.kill(front.ready.pid, signal.SIGKILL)
            await soon(lambda: front.restarts == 1 and front.state == "ready", 60)
            pieces = await collect(front, PROMPT, GREEDY)
            assert [token for piece in pieces for token in piece.ids] == want["tiny"]
            assert front.config.weight_updates == ()
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as api:
                info, health, metrics = [await api.get(path) for path in ("/server_info", "/health", "/metrics")]
                assert health.status_code == 200 and info.json()["weight_version"] == "default"
                for says in (health.json()["reason"], info.json()["weights_lost"], capfd.readouterr().err):
                    assert f"the starting weights serve: {folder}" in says
                assert 'thalweg_weights_lost{model_name="tiny"} 1.0' in metrics.text
                await front.control(UpdateWeights(0, str(other)))
                assert (await api.get("/health")).json()["reason"] == ""

    run(test)


def test_an_engine_in_the_calling_thread_does_not_start_without_its_updated_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        LocalEngine(msgspec.structs.replace(SETTINGS, weight_updates=(str(tmp_path / "gone"),)))
