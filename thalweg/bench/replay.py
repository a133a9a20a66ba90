"""`thalweg replay FILE`: runs the recorded last steps of an engine again, and reports where their output differs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from thalweg.bench.command import CommandParser, add_flags
from thalweg.bench.display import progress_bar
from thalweg.bench.replayer import Replayer, ReplayReport
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.recording import Recording, RecordingHeader, fingerprint, read, versions
from thalweg.models.catalog import read_facts

EPILOG = """\
examples:
  thalweg replay dumps/thalweg-20260101-120000-4242-000017.jsonl
  thalweg replay FILE --model models/tiny      on another checkpoint: the same steps, whose outputs are not compared
  thalweg replay FILE --until 1200 --json      up to this step, as a JSON object

exit status: 0 every output equals the recorded one; 1 one does not, or a step raised something; 2 the file cannot be run."""

FLAGS = """
--model   folder  of the checkpoint; default: the recorded one
--device  device  compute there in plain torch, float32; default: the recorded one
--until   whole   the last step to run; default: all
--json    switch  print the result as a JSON object
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Raises UnsupportedConfig for a file that is no recording or cannot be run here, CheckpointError."""
    parser = CommandParser(
        "thalweg replay",
        description="Runs the steps of a recording (--crash-dump-folder) again and compares what comes of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    add_flags(parser, "", FLAGS, device=("cpu",))
    args = parser.parse_args(argv)
    recording = read(args.file)
    if args.until is not None:
        recording = replace(recording, steps=tuple(s for s in recording.steps if s.plan.step <= args.until))
    settings, same = _settings(recording, args.model, args.device, progress=not args.json)
    begin = time.perf_counter()
    report = _run(Replayer(recording, settings, same), len(recording.steps), shown=not args.json)
    if args.json:
        result = _result(recording, report, same, time.perf_counter() - begin)
        print(json.dumps(result, ensure_ascii=False, indent=1))
    else:
        _print(Console(highlight=False, soft_wrap=True), recording, report, same)
    return 0 if report.raised is None and not report.different else 1


def _settings(recording: Recording, model: str | None, device: str | None, progress: bool) -> tuple[EngineConfig, bool]:
    """The recorded settings on this checkpoint, and whether it is the recorded one. Raises UnsupportedConfig."""
    head = recording.head
    path = Path(model or head.config.model_path)
    if not (path / "config.json").is_file():
        raise UnsupportedConfig(f"{path}: no config.json there; name the folder of the checkpoint with --model")
    longest, holds = max((step.plan.max_kv_len for step in recording.steps), default=0), read_facts(path).context
    if holds < longest:
        raise UnsupportedConfig(f"{path}: the recorded sequences have up to {longest} tokens; this model holds {holds}")
    if head.config.device == "cuda" and device is None and not torch.cuda.is_available():
        raise UnsupportedConfig("recorded on a GPU, and there is none here: use --device cpu")
    here = (
        {
            "device": "cpu",
            "decode_attention_backend": "reference",
            "prefill_attention_backend": "reference",
            "moe_runner_backend": "triton",
            "fp8_gemm_backend": "triton",
            "mla": True,
            "deterministic_inference": False,
            "kv_cache_dtype": "",
            "dtype": "float32",
            "cuda_graph_bs": (),
            "piecewise_cuda_graph_tokens": (),
        }
        if device
        else {}
    )
    same = fingerprint(path) == head.model
    begins, ends = (recording.steps[i].plan.step if recording.steps else 0 for i in (0, -1))
    for change in recording.changed:
        if same and begins < change.step <= ends:
            raise UnsupportedConfig(
                f"the weights were replaced at step {change.step}, from {change.path}: steps from there on cannot be"
                f" run again. --until {change.step - 1} runs those before; --model with another checkpoint runs all,"
                " and does not compare"
            )
    settings = msgspec.structs.replace(
        head.config,
        model_path=str(path),
        weight_updates=(*head.config.weight_updates, *(one.path for one in recording.changed if one.step <= begins))
        if same
        else (),
        overlap_schedule=False,
        crash_dump_folder="",
        watchdog_timeout=0.0,
        show_progress=progress,
        **here,
    )
    return settings, same


def _run(replayer: Replayer, steps: int, shown: bool) -> ReplayReport:
    with progress_bar("steps", steps, shown) as bar:
        for _ in replayer.run():
            bar.advance()
    return replayer.report


def _result(recording: Recording, report: ReplayReport, same: bool, seconds: float) -> dict[str, object]:
    head = recording.head
    return {
        "recording": {
            "reason": head.reason,
            "error": head.error,
            "at": head.at,
            "first_step": head.first,
            "whole": head.whole,
            "cut": recording.cut,
            "requests": len(recording.asked),
            "seats": len(recording.seats),
            "steps": len(recording.steps),
        },
        "same_model": same,
        "other_versions": _others(head),
        "equal": same and not report.different and report.raised is None,
        **asdict(report),
        "seconds": seconds,
    }


def _others(head: RecordingHeader) -> dict[str, tuple[str, str]]:
    """Versions that differ: name → (then, now)."""
    now = versions()
    return {name: (then, now.get(name, "")) for name, then in head.versions.items() if now.get(name, "") != then}


def _print(console: Console, recording: Recording, report: ReplayReport, same: bool) -> None:
    head = recording.head
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(head.at))
    begins = (
        "from the engine's first step"
        if head.whole
        else f"from step {head.first}, {len(recording.seats)} requests running"
    )
    console.print(f"recorded {when} UTC: {head.reason}", markup=False)
    console.print(f"{len(recording.steps)} steps {begins}; {len(recording.asked)} requests")
    if recording.cut:
        console.print("the file ends in the middle: its last steps are missing")
    for name, (then, now) in _others(head).items():
        console.print(f"{name} was {then} then, and is {now or 'not there'} now")
    if report.filled:
        console.print(f"{report.filled} tokens were computed first, for what the first steps found in the device")
    if not same:
        console.print(f"another model: {report.steps} steps ran, their outputs are not compared")
    elif not report.different:
        console.print(f"all {report.compared} tokens of {report.steps} steps equal the recorded ones")
    else:
        first = report.differences[0]
        console.print(
            f"{report.different} of {report.rows} rows differ, the first in step {first.step}, slot {first.slot},"
            f" request {first.uid}, output token {first.at}: recorded {list(first.recorded)}, now {list(first.now)}",
            markup=False,
        )
    if report.logprobs:
        console.print(f"{report.logprobs} log-probabilities differ by at most {report.logprob_gap:.3g}")
    if report.raised is not None:
        console.print(f"step {report.raised.step} raised {report.raised.error}\n{report.raised.trace}", markup=False)
    elif head.error:
        last = head.error.strip().splitlines()[-1]
        console.print(f"what the engine died of did not come again: {last}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
