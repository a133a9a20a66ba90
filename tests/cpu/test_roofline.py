"""`thalweg roofline`: kernel names to operations, a GPU trace, a CPU profile of the bundled model, and invalid files."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from thalweg.bench import roofline, step_breakdown, timeline, trace
from thalweg.core.errors import UnsupportedConfig
from thalweg.kernels import names
from thalweg.models.catalog import read_facts

TINY = "models/tiny"
MLA_MOE = [
    "_gemv",
    "_mla_absorb",
    "_decode",
    "_merge_up",
    "_gemv",
    "_logits_few",
    "_choose",
    "_up_pairs",
    "_down_tokens",
]
MLA_MLP = ["_gemv", "_mla_absorb", "_decode", "_merge_up", "_gemv", "_gemv", "_gemv"]
P, A, E, M = names.PROJECTIONS, names.ATTENTION, names.EXPERTS, names.MLP


def operations(kernels: Sequence[str]) -> list[str]:
    return names.forward_roles(["_decode", "vectorized_gather_kernel", *kernels, "_rms_norm", "nvjet_tst_64x8"])[2:]


def test_products_are_told_apart_by_their_place() -> None:
    dense, sparse = [P, P, A, P, P, M, M], [P, P, A, P, P, E, E, E, E]
    assert operations([*MLA_MLP, *MLA_MOE, *MLA_MOE]) == [*dense, *sparse, *sparse, names.NORM, names.HEAD]
    assert names.forward_roles(["_decode", *MLA_MOE])[0] == names.PREPARE  # and not attention
    gqa = ["_gemv", "_decode", "_merge", "_gemv", "_rms_norm", "_gemv", "_gemv"]
    assert operations(gqa * 2) == [P, A, A, P, names.NORM, M, M] * 2 + [names.NORM, names.HEAD]


def test_grouped_products_of_a_library_and_split_products_find_their_operation() -> None:
    grouped = [
        "_logits",
        "_choose",
        "_gather",
        "sm90_fp8_gemm_1d2d_impl",
        "_silu_mul_quantize",
        "sm90_fp8_gemm_1d2d_impl",
        "_combine",
    ]
    latent = ["_gemv", "_rms_norm", "_gemv", "_mla_absorb", "flash::device_kernel", "_gemv"]
    found = operations([*latent, *grouped, *latent, *grouped])
    assert found[: len(latent)] == [P, names.NORM, P, P, A, P]
    assert set(found[len(latent) : len(latent) + len(grouped)]) == {E}
    split = [
        "nvjet_a_splitK_TNN",
        "splitKreduce_kernel",
        "_decode",
        "_merge",
        "nvjet_b",
        "nvjet_c",
        "splitKreduce_kernel",
        "_silu_mul",
        "nvjet_d",
    ]
    assert operations(split * 2)[:9] == [P, P, A, A, P, M, M, M, M]


def test_experts_in_two_pieces_behind_a_librarys_logits() -> None:
    attention = ["nvjet_down", "_rms_norm", "_mla_write", "nvjet_up", "flash::device_kernel", "nvjet_out", "_rms_norm"]
    piece = ["_count", "_sum", "_place", "_up", "_down", "_combine"]
    moe = ["nvjet_logits", "_choose", *piece, *piece]
    found = operations([*attention, *moe, *attention, *moe])
    assert found[:7] == [P, names.NORM, names.CACHE, P, A, P, names.NORM]
    assert set(found[7 : 7 + len(moe)]) == {E} and found[-2:] == [names.NORM, names.HEAD]


def test_two_attentions_of_a_mixed_step_are_one_layers() -> None:
    mixed = ["_gemv", "_mla_absorb", "_decode", "_merge_up", "nvjet_up", "flash::device_kernel", "_gemv", *MLA_MOE[5:]]
    assert operations(mixed * 2)[:7] == [P, P, A, P, P, A, P]


def test_what_stands_behind_a_forward_is_sampling_or_drafting() -> None:
    def after(*kernels: str) -> list[str]:
        return names.sampling_roles([names.role_of_kernel(kernel) for kernel in kernels])

    assert after("_adjust", "_choose", "_merge", "_settle", "Memcpy DtoH") == [names.SAMPLING] * 4 + [names.COPIES]
    drafter = [
        "_gemv",
        "_mla_absorb",
        "_decode",
        "_merge_up",
        "_gemv",
        "_logits_few",
        "_choose",
        "_up_pairs",
        "_down_tokens",
        "nvjet_head",
    ]
    assert after("_settle", *drafter, "_settle") == [names.SAMPLING, *[names.DRAFTING] * len(drafter), names.SAMPLING]


def test_every_own_kernel_is_in_the_table() -> None:
    """Those that are launched: `name[grid](…)`."""
    launched = {
        node.value.id
        for path in Path("thalweg/kernels").glob("*/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id.startswith("_")
        and f"def {node.value.id}(" in path.read_text() and "@triton.jit" in path.read_text()
    }  # fmt: skip
    assert len(launched) > 30
    unknown = {name for name in launched if names.role_of_kernel(name) == names.SMALL}
    assert unknown == set()


def test_names_lose_their_templates() -> None:
    assert (
        names.short_name("void at::native::(anonymous namespace)::indexSelectSmallIndex<int, long>(int)")
        == "indexSelectSmallIndex"
    )
    assert (
        names.short_name("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<1>>>(P)")
        == "flash::device_kernel"
    )
    assert (
        names.role_of_kernel(names.short_name("void deep_gemm::sm90_fp8_gemm_1d2d_impl<1u, 7168u>(float*)"))
        == names.PRODUCT
    )
    assert names.role_of_kernel(names.short_name("Memcpy DtoH (Device -> Pinned)")) == names.COPIES


class Recorder:
    """Writes a trace as torch does of a GPU: halves on the engine's thread, launches in them, kernels on the device."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0}]
        self.correlation = 0

    def half(
        self, which: str, step: int, begin: float, kernels: Sequence[tuple[str, float, float]], graph: bool = True
    ) -> None:
        name = f"{which} step {step} rows 2 tokens 2"
        self._add("user_annotation", name, begin, 20.0, {})
        for i, (kernel, at, us) in enumerate(kernels):
            if not graph or i == 0:
                self.correlation += 1
                launch = "cudaGraphLaunch" if graph else "cuLaunchKernelEx"
                self._add(
                    "cuda_runtime" if graph else "cuda_driver",
                    launch,
                    begin + 1 + i,
                    0.5,
                    {"correlation": self.correlation},
                )
            self._add("kernel", kernel, at, us, {"correlation": self.correlation, "stream": 7})

    def _add(self, cat: str, name: str, ts: float, dur: float, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}
        )

    def write(self, path: Path) -> Path:
        text = json.dumps({"traceEvents": self.events, "deviceProperties": [{"id": 0, "name": "A GPU"}]})
        path.write_bytes(gzip.compress(text.encode()))
        return path


def gpu_trace(path: Path, steps: int = 3) -> Path:
    """Steps of 100 µs that overlap their launches: each A is launched while the device is at the step before it."""
    made = Recorder()
    for step in range(steps):
        at = 200 + 100.0 * step
        a = [("_decode", at, 2.0), ("_gemv", at + 4, 10.0), ("_mla_absorb", at + 12, 6.0), ("_decode", at + 20, 10.0)]
        a += [
            ("_gemv", at + 30, 8.0),
            ("_gemv", at + 38, 7.0),
            ("_gemv", at + 45, 5.0),
            ("_rms_norm", at + 50, 2.0),
            ("_linear", at + 52, 28.0),
        ]
        made.half("A", step, 100.0 * step, a)
        made.half(
            "B", step, 100.0 * step + 30, [("_best_of_parts", at + 82, 4.0), ("_settle", at + 86, 4.0)], graph=False
        )
        made._add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 89, 3.0, {"correlation": -1})
    return made.write(path)


def test_a_gpus_steps_add_up(tmp_path: Path) -> None:
    profile = trace.read(gpu_trace(tmp_path / "t.trace.json.gz"))
    assert profile.device == "A GPU" and [step.number for step in profile.steps] == [0, 1, 2]
    ((kind, mine),) = step_breakdown.steps_by_kind(profile.steps).items()
    assert kind == (2, 2) and len(mine) == 2  # of the last it is not known when it ended
    split = step_breakdown.break_down(
        mine, {"projections": 8e-6, "attention": 4e-6, "head": 21e-6, "index": 1e-6, "mlp": 12e-6}
    )
    us = {part.operation: part.us for part in split.parts}
    assert split.us == pytest.approx(100.0) and sum(us.values()) + split.gaps.us == pytest.approx(100.0)
    assert us[names.PREPARE] == pytest.approx(2.0)
    assert us[P] == pytest.approx(10 + 4 + 8)  # of the second 4 µs lay behind the end of the first
    assert us[names.HEAD] == pytest.approx(28.0) and us[names.SAMPLING] == pytest.approx(8.0)
    assert us[names.COPIES] == pytest.approx(2.0)  # overlapped by 1 with the last kernel
    assert split.gaps.us == pytest.approx(2 + 2 + 2 + 8) and split.gaps.longest_us == pytest.approx(8.0)
    assert split.floor_us == pytest.approx(46.0)
    attention = next(part for part in split.parts if part.operation == A)
    assert attention.floor_us == pytest.approx(5.0) and attention.lost_us == pytest.approx(5.0)
    told = step_breakdown.words(split)
    assert len(told) == step_breakdown.TOP and told[0].startswith(
        "projections: 14.0 µs (14% of the step) above the floor of 8.0 µs"
    )
    assert told[1].startswith(
        "gaps: nothing runs for 14.0 µs (14% of the step), 4 x, the longest 8.0 µs; most before `the next step` 8.0 µs"
    )


def test_one_time_line_for_engine_and_device(tmp_path: Path) -> None:
    timeline.write(tmp_path / "p.json.gz", trace.read(gpu_trace(tmp_path / "t.trace.json.gz")))
    events = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_lane: dict[str, list[dict[str, Any]]] = {name: [] for name in lanes.values()}
    for event in events:
        if event["ph"] == "X":
            by_lane[lanes[event["pid"], event["tid"]]].append(event)
    assert len(by_lane["A and B"]) == 6 and len(by_lane["kernels"]) == 36 and len(by_lane["steps"]) == 3
    assert [(e["ts"], e["dur"]) for e in by_lane["loop"]] == [(50.0, 50.0), (150.0, 50.0)]
    first = [e for e in by_lane["operations"] if e["ts"] < 300]
    assert [e["name"] for e in first] == [
        "prepare",
        "projections",
        "attention",
        "projections",
        "mlp",
        "norm",
        "head",
        "sampling",
        "copies",
    ]
    for lane in ("operations", "gaps"):  # nothing of one lane overlaps
        ends = [e["ts"] + e["dur"] for e in by_lane[lane]]
        assert all(begin["ts"] >= end - 1e-6 for begin, end in zip(by_lane[lane][1:], ends, strict=False))


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (
        ("a.json", b"{"),
        ("b.json.gz", b"no gzip"),
        ("c.json", b"[]"),
        ("d.json", b'{"traceEvents": 3}'),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnsupportedConfig, match="is no profile"):
            trace.read(tmp_path / name)
    with pytest.raises(UnsupportedConfig, match="is no profile"):
        trace.read(tmp_path / "missing.json")
    (tmp_path / "e.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1}]})
    )
    assert roofline.main(["--trace", str(tmp_path / "e.json")]) == 2
    assert "no steps in it" in capsys.readouterr().err
    assert roofline.main([]) == 2
    assert "give a model" in capsys.readouterr().err


def test_a_cut_trace_and_a_foreign_device_lose_the_floors_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = roofline.run([TINY, "--trace", str(gpu_trace(tmp_path / "t.trace.json.gz"))])
    assert [split.floor_us for split in one.steps] == [None]
    told = capsys.readouterr()
    assert "without floors: this machine has no A GPU" in told.err and "Where most time" in told.out


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
    profile = trace.read(gpu_trace(tmp_path / "t.trace.json.gz"))

    def runs() -> Iterator[roofline.RooflineRun]:
        yield roofline.RooflineRun([step_breakdown.break_down(profile.steps[:2], {})], profile, {"batch_size": 1})
        raise error

    monkeypatch.setattr(roofline, "of_model", lambda parsed: ({"model": "tiny"}, runs()))
    assert roofline.main([TINY, "--batch-size", "1", "8", "--result-filename", str(tmp_path / "r.json")]) == status
    told = json.loads((tmp_path / "r.json").read_text())
    assert [one["batch_size"] for one in told["runs"]] == [1] and told["partial"] is True and told["ended"] == ended
    assert "Where most time" in capsys.readouterr().out


def test_a_table_is_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    profile = trace.read(gpu_trace(tmp_path / "t.trace.json.gz"))
    roofline.show_steps([step_breakdown.break_down(profile.steps[:2], {})])
    table = capsys.readouterr().out.partition("Where most")[0]
    assert max(map(len, table.splitlines())) <= 110 and "projections" in table and "…" not in table


def test_a_cpus_profile_without_shapes_has_one_floor_for_all_products(tmp_path: Path) -> None:
    made = Recorder()
    for step in range(3):
        made.half("A", step, 100.0 * step, ())
        for i, name in enumerate(("aten::mm", "aten::addmm_", "aten::softmax")):
            made._add("cpu_op", name, 100.0 * step + 5 * i, 4.0, {})
    shapes = roofline.shapes_of(read_facts(Path(TINY)))
    profile = trace.read(made.write(tmp_path / "t.json.gz"), shapes)
    assert [[span.operation for span in step.spans] for step in profile.steps] == [
        [names.PRODUCTS, names.PRODUCTS, A]
    ] * 3
    split = step_breakdown.break_down(
        profile.steps[:2], {"projections": 1e-6, "experts": 2e-6, "head": 3e-6, "attention": 1e-6}
    )
    assert {part.operation: part.floor_us for part in split.parts} == {
        names.PRODUCTS: pytest.approx(6.0),
        A: pytest.approx(1.0),
    }


def test_the_bundled_model_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, line = tmp_path / "r.json", tmp_path / "line.json"
    small = ["--device", "cpu", "--threads", "1", "--context", "96", "--steps", "6", "--batch-size", "1", "3"]
    runs = roofline.run([TINY, *small, "--perfetto", str(line), "--result-filename", str(result)])
    told = json.loads(result.read_text())
    assert told["ended"] == "" and told["partial"] is False
    assert [[(split.rows, split.tokens) for split in one.steps] for one in runs] == [
        [(1, 1), (1, 96)],
        [(3, 3), (3, 288)],
    ]
    for one, written in zip(runs, told["runs"], strict=True):
        assert written["batch_size"] == one.steps[0].rows and written["unprofiled_decode_ms"] > 0
        for split, row in zip(one.steps, written["steps"], strict=True):
            parts = {part.operation: part for part in split.parts}
            assert {P, A, E, M, names.HEAD, names.NORM, names.SAMPLING} <= set(parts)
            assert sum(part.us for part in split.parts) + split.gaps.us == pytest.approx(split.us, rel=1e-6)
            assert all(parts[name].floor_us and parts[name].us > 0 for name in (P, E, M, names.HEAD))
            assert row["us"] == pytest.approx(split.us) and 1 <= len(row["lost"]) <= step_breakdown.TOP
            assert "mm" in {line.name for line in parts[E].lines}
            assert "mm" not in {line.name for name in (A, names.NORM) for line in parts[name].lines}
    assert told["ceilings"]["read"] > 0 and told["configuration"]["engine"]["device"] == "cpu"
    assert "without a profile" in capsys.readouterr().out
    assert (tmp_path / "b1-line.json").stat().st_size > 1000 and (tmp_path / "b3-line.json").is_file()
