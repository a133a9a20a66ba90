"""Recordings of a real engine, replayed: whole ones bit for bit, later ones from the middle, altered ones to the exact
token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.configs import changed, config
from thalweg.bench import replay, replayer
from thalweg.bench.replayer import Replayer, ReplayReport, split_pages
from thalweg.cli import main
from thalweg.config.engine import EngineConfig
from thalweg.core.grammar import Grammar
from thalweg.core.plan import Output
from thalweg.core.sampling import SamplingParams
from thalweg.engine import local, recording
from thalweg.engine.build import Rank, build, build_loop
from thalweg.engine.group import ALONE, RankContext
from thalweg.engine.local import LocalChannel, LocalEngine
from thalweg.engine.recording import RecordedStep, Recording, StepRecorder, read

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
SETTINGS = config(
    model_path=str(MODEL),
    context_length=320,
    num_pages=9,
    max_running_requests=4,
    chunked_prefill_size=48,
    max_steps_in_flight=2,
    eos_ids=(1,),
    show_progress=False,
    random_seed=5,
)
SHARED = [0, *range(100, 170)]


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    _, runner, facts, _ = build(SETTINGS, LocalChannel())
    return runner, facts


@pytest.fixture(autouse=True)
def loaded_once(model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has its own scheduler around the same weights; its KV and slots hold garbage at first, so that
    nothing is found in them but what is put there.
    """

    def around(settings: EngineConfig, channel: LocalChannel, context: RankContext = ALONE) -> Rank:
        runner, facts = model
        for tensor in runner.planes.tensors():
            tensor.fill_(5.0)
        for tensor in (runner.slots.tokens_SL, runner.slots.table_SP, runner.slots.ints_SI):
            tensor.fill_(1)
        return Rank(build_loop(settings, facts, runner, channel), runner, facts, settings)

    monkeypatch.setattr(local, "build", around)
    monkeypatch.setattr(replayer, "build", around)


def engine(folder: Path, **changes: Any) -> LocalEngine:
    return LocalEngine(changed(SETTINGS, crash_dump_folder=str(folder), **changes))


def ask(one: LocalEngine) -> None:
    """Prompts in chunks, a shared beginning, n > 1, a grammar, log-probabilities, and outputs for which there are too
    few pages.
    """
    sampled = SamplingParams(temperature=1.0, max_tokens=190, ignore_eos=True)
    one.submit(SHARED, msgspec.structs.replace(sampled, n=2, logprobs=1))
    one.submit([*SHARED, 30, 31], msgspec.structs.replace(sampled, frequency_penalty=1.0))
    one.submit([*SHARED, 40], msgspec.structs.replace(sampled, prompt_logprobs=0, min_tokens=5))
    words = Grammar("regex", "[a-z ]{30,40}")
    one.submit([0, 30, 31], SamplingParams(temperature=1.0, max_tokens=60), grammar=words)
    one.submit([0, *range(200, 330)], SamplingParams(temperature=0.0, max_tokens=20))


def turn(one: LocalEngine, steps: int) -> None:
    """Turns it so often, with an abort on the way, or until it is idle."""
    for i in range(steps):
        if one.idle:
            return
        one.step()
        if i == 60:
            one.abort((1,))


def again(found: Recording, compare: bool = True) -> ReplayReport:
    one = Replayer(found, changed(found.config, max_steps_in_flight=1, crash_dump_folder=""), compare)
    seen = [verdict.steps for verdict in one.run()]
    assert seen == list(range(1, len(seen) + 1))
    return one.report


def ring(one: LocalEngine) -> StepRecorder:
    assert isinstance(one.loop.recorder, StepRecorder)
    return one.loop.recorder


def test_a_whole_recording_is_bit_for_bit_the_run(tmp_path: Path) -> None:
    one = engine(tmp_path)
    ask(one)
    turn(one, 10**6)
    assert one.loop.scheduler.counters.preemptions, "the mix is meant to be short of pages"
    path = ring(one).dump("asked for by the test")
    assert path.stat().st_mode & 0o777 == 0o600
    found = read(path)
    assert found.first == 0 and not found.slots and len(found.requests) == 6
    assert found.config == one.config and found.versions["torch"]
    assert [step.plan.step for step in found.steps] == list(range(one.loop.scheduler.step))
    verdict = again(found)
    tokens = one.loop.scheduler.counters.decode_tokens
    assert verdict.compared >= tokens, "an aborted sequence's last tokens are recorded and nobody's"
    assert (verdict.different, verdict.logprob_gap, verdict.filled, verdict.raised) == (0, 0.0, 0, None)
    assert verdict.logprobs > 200 and verdict.steps == len(found.steps)


def test_what_a_group_recorded_is_run_by_one_process(tmp_path: Path) -> None:
    """It has all experts, none of them twice, and none moves."""
    one = engine(tmp_path)
    one.submit([0, 30, 31], SamplingParams(temperature=0.0, max_tokens=5))
    turn(one, 10**6)
    found = read(ring(one).dump("asked for by the test"))
    group = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "enable_eplb": True}
    of_group = msgspec.structs.replace(
        found, config=changed(found.config, **group, ep_num_redundant_experts=2, moe_a2a_backend="alltoall")
    )
    settings, is_same = replay._settings(of_group, None, None, False)
    assert is_same and settings == replay._settings(found, None, None, False)[0] and settings.processes == 1
    assert build(settings, LocalChannel()).config.ep_size == 1


def test_a_rolled_recording_begins_in_the_middle_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of a few steps begin in prompts, at preemptions, with requests that have just ended and with steps in
    flight.
    """
    monkeypatch.setattr(recording, "STEPS", 7)
    one = engine(tmp_path)
    ask(one)
    found: list[Recording] = []
    while not one.idle:
        turn(one, 37)
        found.append(read(ring(one).dump("test")))
    for each in found:
        assert len(each.steps) <= 2 * recording.STEPS + 1
        verdict = again(each)
        assert (verdict.different, verdict.raised) == (0, None), each.first
    seated, unfinished = sum(len(each.slots) for each in found), sum(each.steps[-1].outputs is None for each in found)
    assert seated > 15 and unfinished > 5


def test_memory_is_bounded_and_what_goes_on_is_carried_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BYTES", 4000)
    one = engine(tmp_path)
    ask(one)
    turn(one, 150)
    before, now = ring(one)._segments
    for segment in (before, now):
        assert sum(map(len, segment.plans + segment.outputs)) < 2 * 4000 and len(segment.plans) < 150
    assert {message.uid for _, message in now.requests} == {0, 2, 3, 4, 5} & set(one.loop.scheduler.requests)
    turn(one, 10**6)


def tampered(found: Recording, at: int) -> Recording:
    """With another token in the first row that has one, from step `at` on."""
    steps = list(found.steps)
    i = next(i for i, step in enumerate(steps) if i >= at and step.outputs and step.outputs[0].tokens)
    outputs = list(steps[i].outputs or ())
    outputs[0] = outputs[0]._replace(tokens=(outputs[0].tokens[0] ^ 1,))
    steps[i] = RecordedStep(steps[i].plan, tuple(outputs))
    return msgspec.structs.replace(found, steps=tuple(steps))


def test_the_first_difference_is_named_and_the_rest_follows_the_recording(tmp_path: Path) -> None:
    one = engine(tmp_path)
    one.submit([0, *range(30, 60)], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    one.submit([0, *range(130, 160)], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    turn(one, 10**6)
    found = read(ring(one).dump("test"))
    wrong = tampered(found, 12)
    step = next(step for step, other in zip(wrong.steps, found.steps, strict=True) if step != other)
    verdict = again(wrong)
    first, row = verdict.differences[0], step.plan.rows[0]
    assert (first.step, first.slot, first.uid) == (step.plan.step, row.slot, row.uid)
    assert first.at == row.start + row.n - 31 and first.recorded == (first.now[0] ^ 1,)
    assert {d.uid for d in verdict.differences} == {row.uid}, "the other sequence is not harmed"


def test_another_model_runs_the_same_steps_and_nothing_is_compared(tmp_path: Path) -> None:
    one = engine(tmp_path)
    ask(one)
    turn(one, 40)
    found = tampered(read(ring(one).dump("test")), 3)
    large = msgspec.structs.replace(one.config, model_path="nowhere")
    found = msgspec.structs.replace(found, config=large, model="another")
    strange = [
        RecordedStep(
            replace(s.plan, binds=tuple(b._replace(tokens=tuple(t + 10**6 for t in b.tokens)) for b in s.plan.binds)),
            s.outputs,
        )
        for s in found.steps
    ]
    found = msgspec.structs.replace(found, steps=tuple(strange))
    again_on = Replayer(found, changed(SETTINGS, max_steps_in_flight=1), False)
    list(again_on.run())
    verdict = again_on.report
    assert (verdict.steps, verdict.compared, verdict.different, verdict.raised) == (len(found.steps), 0, 0, None)


def broken(runner: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner raises in a step whose first row is at position `at`."""
    real = runner.forward

    def forward(plan: Any, agreed: Any = None) -> Any:
        if plan.rows and plan.rows[0].start == at:
            raise RuntimeError("the device is on fire")
        return real(plan)

    monkeypatch.setattr(runner, "forward", forward)


def test_the_recorded_error_is_raised_again(
    tmp_path: Path, model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = engine(tmp_path, max_steps_in_flight=1)
    one.submit([0, 30, 31], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    with monkeypatch.context() as patched:
        broken(model[0], 9, patched)
        with pytest.raises(RuntimeError, match="on fire"):
            turn(one, 100)
        (path,) = tmp_path.glob("*.json")
        found = read(path)
        assert "on fire" in found.reason and "in forward" in found.error and found.steps[-1].outputs is None
        assert main(["replay", str(path), "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert (said["raised"]["step"], said["raised"]["error"]) == (7, "RuntimeError: the device is on fire")
        assert said["different"] == 0 and said["compared"] == 7 and not said["equal"]
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "all 7 tokens of 8 steps equal the recorded ones" in said
    assert "what the engine died of did not come again: RuntimeError: the device is on fire" in said
    assert main(["replay", str(path), "--until", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_files_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = engine(tmp_path)
    one.submit([0, 30, 31], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    turn(one, 100)
    path = ring(one).dump("test")
    content = json.loads(path.read_bytes())

    def refused(content: bytes, words: str) -> None:
        (tmp_path / "made").write_bytes(content)
        assert main(["replay", str(tmp_path / "made")]) == 2
        assert words in capsys.readouterr().err

    newer = content | {"version": content["version"] + 1, "new": True}
    refused(json.dumps(newer).encode(), f"a recording of version {newer['version']}; this Thalweg")
    for strange in (b'{"a": 1}', b"\x00\xff", b"", path.read_bytes()[:-40]):
        refused(strange, "no recording")
    refused(json.dumps(content | {"steps": [{}]}).encode(), "is broken: Object missing required field `plan`")
    moved = content | {"config": content["config"] | {"model_path": "nowhere"}}
    refused(json.dumps(moved).encode(), "name the folder of the checkpoint with --model")
    assert main(["replay", str(tmp_path / "none")]) == 2


def test_other_log_probabilities_are_told_though_the_tokens_are_the_same(tmp_path: Path) -> None:
    one = engine(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    one.submit(SHARED, params)
    turn(one, 10**6)
    found = read(ring(one).dump("asked for by the test"))
    for name, moved in (("logprobs", 0.25), ("prompt_logprobs", 0.5)):
        steps = [
            msgspec.structs.replace(step, outputs=tuple(shifted(output, name, moved) for output in step.outputs))
            for step in found.steps
        ]
        verdict = again(msgspec.structs.replace(found, steps=tuple(steps)))
        assert not verdict.different and verdict.logprob_gap == pytest.approx(moved), name


def shifted(output: Output, name: str, moved: float) -> Output:
    return output._replace(**{name: tuple(e._replace(logprob=e.logprob + moved) for e in getattr(output, name))})


def test_pages_that_ranks_shared_become_pages_of_one() -> None:
    assert split_pages((3, 1), 2) == (5, 6, 1, 2) and split_pages((7, 2), 1) == (7, 2)
    assert sorted(split_pages(range(1, 5), 3)) == list(range(1, 13)), "as many as the cache has, without the null page"
