"""`thalweg roofline`: kernels of a graph get their operations from ranges of an eager step, times add up, invalid files
are refused.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from thalweg.bench import roofline, step_profile
from thalweg.bench.in_process import exactly, run_all
from thalweg.bench.step_profile import ATTENTION, COPIES, EXPERTS, HEAD, MLP, NORM, PROJECTIONS, matched
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

TINY = "models/tiny"
P, A, M = PROJECTIONS, ATTENTION, MLP
# a step's forward: kernels with their range, "" for none, and their µs
FORWARD = [("_inputs", "", 2.0), ("_gemv", P, 10.0), ("_absorb", A, 6.0), ("_decode", A, 10.0), ("_gemv", P, 8.0),
           ("_gemv", M, 7.0), ("_gemv", M, 5.0), ("_rms_norm", NORM, 2.0), ("nvjet", HEAD, 28.0)]  # fmt: skip
NAMES = [name for name, _, _ in FORWARD]
OPERATIONS = [operation or "inputs" for _, operation, _ in FORWARD]


def test_a_replay_in_the_eager_order_has_its_operations() -> None:
    assert matched(NAMES, NAMES, OPERATIONS, "inputs") == OPERATIONS


def test_other_kernels_of_a_replay_shift_nothing() -> None:
    more = ["memset", *NAMES[:3], "_split", *NAMES[3:7], *NAMES[8:]]  # two more, and no norm
    expected = ["inputs", *OPERATIONS[:3], A, *OPERATIONS[3:7], *OPERATIONS[8:]]
    assert matched(more, NAMES, OPERATIONS, "inputs") == expected
    assert matched(["x", "_rms_norm", "nvjet", "_gemv"], NAMES[-2:], [NORM, HEAD], "inputs") == [
        "inputs",
        NORM,
        HEAD,
        HEAD,
    ]
    assert matched(["b", "a", "a"], ["a", "b"], [EXPERTS, NORM], "inputs") == [NORM, EXPERTS, EXPERTS]
    layers = NAMES[1:-1] * 20
    assert matched(["x", *layers], layers, OPERATIONS[1:-1] * 20, "inputs") == ["inputs", *OPERATIONS[1:-1] * 20]


def test_names_lose_their_templates() -> None:
    for name, short in (
        ("void at::native::(anonymous namespace)::indexSelect<int, long>(int)", "indexSelect"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<1u, 7168u>(float*)", "sm90_fp8_gemm_1d2d_impl"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
    ):
        assert step_profile.short_name(name) == short


class Recorder:
    """Writes a trace as torch does of a GPU: halves on the engine's thread, launches in them, kernels on the device."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0}]
        self.correlation = 0

    def half(self, which: str, step: int, begin: float, kernels: Sequence[tuple[str, str, float, float]]) -> None:
        """kernels: (name, range, begin on the device, µs); one launch for all without a range, as of a graph."""
        self.add("user_annotation", f"{which} step {step} rows 2 tokens 2", begin, 20.0)
        eager = any(operation for _, operation, _, _ in kernels)
        for i, (kernel, operation, at, us) in enumerate(kernels):
            if eager or i == 0:
                self.correlation += 1
                launch = {"correlation": self.correlation}
                self.add("cuda_driver" if eager else "cuda_runtime", "launch", begin + 1 + i, 0.5, launch)
            if operation:
                self.add("user_annotation", f"operation {operation}", begin + 0.9 + i, 0.8)
            self.add("kernel", kernel, at, us, {"correlation": self.correlation, "stream": 7})

    def add(self, cat: str, name: str, ts: float, dur: float, args: dict[str, Any] | None = None) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args or {}}
        self.events.append(event)

    def write(self, path: Path) -> Path:
        text = json.dumps({"traceEvents": self.events, "deviceProperties": [{"id": 0, "name": "A GPU"}]})
        path.write_bytes(gzip.compress(text.encode()))
        return path


def gpu_trace(path: Path, replays: int = 3, eager: bool = True) -> Path:
    """Steps of 100 µs that overlap their launches: each forward is launched while the device runs the step before it.
    The eager step comes before the replays, which have one more kernel.
    """
    made = Recorder()
    for step in range(0 if eager else 1, replays + 1):
        begin, at, kernels = 100.0 * step, 200 + 100.0 * step, list[tuple[str, str, float, float]]()
        for place, (name, operation, us) in enumerate(FORWARD):
            overlap = 2.0 if place == 2 else 0.0  # the third begins before the second has ended
            kernels.append((name, operation if step == 0 else "", at - overlap, us))
            at += us - overlap + (2.0 if place in (0, 4) else 0.0)
            if step and place == 3:
                kernels.append(("_merge", "", at, 1.0))
                at += 1.0
        made.half("forward", step, begin, kernels)
        made.half("sample", step, begin + 30, [("_best", "", at + 2, 4.0), ("_settle", "", at + 6, 4.0)])
        made.add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 9, 3.0, {"correlation": -1})
    return made.write(path)


def test_a_replays_steps_add_up(tmp_path: Path) -> None:
    profile = step_profile.read(gpu_trace(tmp_path / "t.trace.json.gz"))
    assert profile.device == "A GPU" and [step.number for step in profile.steps] == [1, 2, 3]
    ((kind, mine),) = step_profile.steps_by_kind(profile.steps).items()
    assert kind == (2, 2) and len(mine) == 2  # of the last it is not known when it ended
    floors = {"projections": 8e-6, "attention": 4e-6, "head": 21e-6, "index": 1e-6, "mlp": 12e-6}
    split = roofline.break_down(mine, floors)
    us = {part.operation: part.us for part in split.parts}
    assert split.us == pytest.approx(100.0) and sum(us.values()) == pytest.approx(100.0)
    assert us["inputs"] == pytest.approx(2.0) and us[P] == pytest.approx(18.0)
    assert us[A] == pytest.approx(4 + 10 + 1)  # 2 µs lay before the end of the product; with the replay's own kernel
    assert us[M] == pytest.approx(12.0) and us[HEAD] == pytest.approx(28.0) and us[NORM] == pytest.approx(2.0)
    assert us["sampling"] == pytest.approx(8.0) and us[COPIES] == pytest.approx(2.0)  # overlapped by 1
    assert us[roofline.GAPS] == pytest.approx(100 - 2 - 18 - 15 - 12 - 28 - 2 - 8 - 2)
    assert split.floor_us == pytest.approx(46.0)
    attention = next(part for part in split.parts if part.operation == A)
    assert attention.floor_us == pytest.approx(5.0) and attention.lost_us == pytest.approx(10.0)
    told = split.losses()
    assert len(told) == roofline.TOP and told[0].startswith("gaps: 13.0 µs (13% of the step) without a limit, 4 x;")
    assert told[1].startswith(
        "projections: 10.0 µs (10% of the step) above the limit of 8.0 µs: it takes 18.0 µs, 2.2 times as long"
    ) or told[1].startswith("attention: 10.0 µs (10% of the step) above the limit of 5.0 µs")


def test_a_servers_profile_has_forward_and_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = roofline.run([TINY, "--trace", str(gpu_trace(tmp_path / "t.trace.json.gz", eager=False))])
    (split,) = one.steps
    assert split.floor_us is None
    assert {part.operation for part in split.parts} == {"forward", "sampling", COPIES, roofline.GAPS}
    assert "Where most time" in capsys.readouterr().out


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (
        ("a.json", b"{"),
        ("b.json.gz", b"no gzip"),
        ("c.json", b"[]"),
        ("d.json", b'{"traceEvents": 3}'),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnsupportedConfig, match="is no profile"):
            step_profile.read(tmp_path / name)
    with pytest.raises(UnsupportedConfig, match="is no profile"):
        step_profile.read(tmp_path / "missing.json")
    (tmp_path / "e.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1}]})
    )
    assert roofline.main(["--trace", str(tmp_path / "e.json")]) == 2
    assert "no steps in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "ended"), [(KeyboardInterrupt(), 130, "Ctrl-C"), (UnsupportedConfig("full"), 2, "full")]
)
def test_what_was_measured_is_kept_when_the_next_batch_does_not_end(
    error: BaseException,
    status: int,
    ended: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = step_profile.read(gpu_trace(tmp_path / "t.trace.json.gz"))

    def runs() -> Iterator[roofline.RooflineRun]:
        yield roofline.RooflineRun([roofline.break_down(profile.steps[:2], {})], {"batch_size": 1})
        raise error

    monkeypatch.setattr(roofline, "of_model", lambda args, options: ({"model": "tiny"}, {}, runs()))
    assert roofline.main([TINY, "--batch-size", "1", "8", "--result-filename", str(tmp_path / "r.json")]) == status
    told = json.loads((tmp_path / "r.json").read_text())
    assert [one["batch_size"] for one in told["runs"]] == [1] and told["partial"] is True and told["ended"] == ended
    assert "Where most time" in capsys.readouterr().out


def test_a_table_is_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    profile = step_profile.read(gpu_trace(tmp_path / "t.trace.json.gz"))
    roofline.show_steps([roofline.break_down(profile.steps[:2], {})])
    table = capsys.readouterr().out.partition("Where most")[0]
    assert max(map(len, table.splitlines())) <= 110 and "projections" in table and "…" not in table


def test_ranges_change_no_token_and_leave_nothing_behind() -> None:
    config = options_of(model=TINY, device="cpu", speculative_algorithm="NEXTN", context_length=256, threads=1)
    engine = LocalEngine(resolve(config).engine)
    runner, requests = engine.runner, [exactly(list(range(20, 50)), 12) for _ in range(2)]
    runner_model: Any = runner.model
    before = {name: dict(vars(module)) for name, module in runner_model.named_modules()}
    captured = runner.forward_model, runner.graphs
    run_all(engine, requests[:1])
    engine.flush_cache()
    with step_profile.operation_ranges(engine):
        assert runner.forward_model is runner.model and "draft" in vars(runner.drafting)
        run_all(engine, requests[1:])
    assert requests[0].tokens == requests[1].tokens
    assert (runner.forward_model, runner.graphs) == captured and "draft" not in vars(runner.drafting)
    assert {name: vars(module).keys() for name, module in runner_model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


def test_the_bundled_model_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its small decode steps are TorchScript programs, which have no ranges: they get their operations by order."""
    result, line = tmp_path / "r.json", tmp_path / "line.json.gz"
    small = ["--device", "cpu", "--threads", "1", "--context", "96", "--steps", "6", "--batch-size", "1", "3"]
    runs = roofline.run([TINY, *small, "--perfetto", str(line), "--result-filename", str(result)])
    told = json.loads(result.read_text())
    assert told["ended"] == "" and told["partial"] is False
    for one, written in zip(runs, told["runs"], strict=True):
        assert written["unprofiled_decode_ms"] > 0
        assert (written["batch_size"], 96 * written["batch_size"]) in [(step.rows, step.tokens) for step in one.steps]
        for split, row in zip(one.steps, written["steps"], strict=True):
            parts = {part.operation: part for part in split.parts}
            assert {P, A, EXPERTS, M, HEAD, NORM, "sampling"} <= set(parts)
            assert sum(part.us for part in split.parts) == pytest.approx(split.us, rel=1e-6)
            assert all(parts[name].floor_us and parts[name].us > 0 for name in (P, EXPERTS, M, HEAD))
            assert row["us"] == pytest.approx(split.us) and 1 <= len(row["lost"]) <= roofline.TOP
            assert "mm" in {line.name for line in parts[EXPERTS].lines}
            assert "mm" not in {line.name for line in parts[NORM].lines}
    assert told["ceilings"]["read"] > 0 and told["configuration"]["engine"]["device"] == "cpu"
    assert "without a profile" in capsys.readouterr().out
    assert (tmp_path / "b1-line.json.gz").stat().st_size > 1000 and (tmp_path / "b3-line.json.gz").is_file()


def rank(*steps: tuple[int, list[tuple[str, float]]]) -> list[step_profile.ProfiledStep]:
    """Steps of a rank, by number: kernels with their microseconds."""
    made = []
    for number, kernels in steps:
        spans, at = list[step_profile.DeviceSpan](), 0.0
        for name, us in kernels:
            spans.append(step_profile.DeviceSpan(at, at, at + us, name))
            at += us
        made.append(step_profile.ProfiledStep(number, 1, 1, spans))
    return made


def test_ranks_wait_for_the_last_one() -> None:
    nccl = "ncclDevKernel_AllGather_RING_LL"
    first = rank((7, [("_gemv", 50.0), ("_one_shot", 9.0), (nccl, 4.0)]), (8, [("_one_shot", 5.0)]))
    second = rank((7, [("_gemv", 54.0), ("_one_shot", 5.0), (nccl, 10.0)]), (9, [("_one_shot", 5.0)]))
    waits = step_profile.rank_waits([first, second])
    assert waits == step_profile.RankWaits(9.0, (4.0, 6.0)), "step 8 and 9 have one rank each"
    assert step_profile.rank_waits([first, rank((7, [("_gemv", 1.0)]))]) is None


def test_a_profile_of_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU there are no kernels that wait, but the collectives are an operation of their own."""
    out = tmp_path / "roofline.json"
    argv = [TINY, "--tp-size", "2", "--device", "cpu", "--threads", "1", "--context", "40", "--steps", "6"]
    assert roofline.main([*argv, "--output-file", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    decode = next(step for step in run["steps"] if step["tokens"] == 1)
    found = {part["operation"]: part for part in decode["parts"]}
    assert found[step_profile.COMMUNICATION]["count"] > 0 and "collectives_us" not in run
