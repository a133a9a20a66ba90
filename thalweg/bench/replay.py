"""`thalweg replay FILE`: runs the recorded last steps of an engine again, and reports where their output differs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import msgspec
import torch

from thalweg.bench.command import CommandParser, add_flags
from thalweg.bench.display import progress_bar
from thalweg.bench.replayer import Replayer, ReplayReport
from thalweg.config.engine import EngineConfig
from thalweg.config.options import ParallelOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.recording import Recording, fingerprint, read, versions
from thalweg.models.catalog import read_facts

_PARALLEL = {one.name for one in fields(ParallelOptions)}
# settings of an engine that one process is
ONE_PROCESS = {one.name: one.default for one in msgspec.structs.fields(EngineConfig) if one.name in _PARALLEL}
EPILOG = """\
examples:
  thalweg replay dumps/thalweg-20260101-120000-4242-000017.json
  thalweg replay FILE --model models/tiny      on another checkpoint: the same steps, whose outputs are not compared
  thalweg replay FILE --until 1200 --json      up to this step, as a JSON object

exit status: 0 every output equals the recorded one; 1 one does not, or a step raised something; 2 the file cannot be
run."""

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
        recording = msgspec.structs.replace(
            recording, steps=tuple(s for s in recording.steps if s.plan.step <= args.until)
        )
    settings, same = _settings(recording, args.model, args.device, progress=not args.json)
    begin, replayer = time.perf_counter(), Replayer(recording, settings, same)
    with progress_bar("steps", len(recording.steps), not args.json) as bar:
        for _ in replayer.run():
            bar.advance()
    report = replayer.report
    if args.json:
        result = _result(recording, report, same) | {"seconds": time.perf_counter() - begin}
        print(json.dumps(result, ensure_ascii=False, indent=1))
    else:
        print("\n".join(_lines(recording, report, same)))
    return 0 if report.raised is None and not report.different else 1


def _settings(recording: Recording, model: str | None, device: str | None, progress: bool) -> tuple[EngineConfig, bool]:
    """The recorded settings on this checkpoint, and whether it is the recorded one. Raises UnsupportedConfig."""
    path = Path(model or recording.config.model_path)
    if not (path / "config.json").is_file():
        raise UnsupportedConfig(f"{path}: no config.json there; name the folder of the checkpoint with --model")
    longest, holds = max((step.plan.max_kv_len for step in recording.steps), default=0), read_facts(path).context
    if holds < longest:
        raise UnsupportedConfig(f"{path}: the recorded sequences have up to {longest} tokens; this model holds {holds}")
    if recording.config.device == "cuda" and device is None and not torch.cuda.is_available():
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
    same = fingerprint(path) == recording.model
    begins, ends = (recording.steps[i].plan.step if recording.steps else 0 for i in (0, -1))
    for step, folder in recording.weights:
        if same and begins < step <= ends:
            raise UnsupportedConfig(
                f"the weights were replaced at step {step}, from {folder}: steps from there on cannot be"
                f" run again. --until {step - 1} runs those before; --model with another checkpoint runs all,"
                " and does not compare"
            )
    settings = msgspec.structs.replace(
        recording.config,
        model_path=str(path),
        weight_updates=(
            *recording.config.weight_updates,
            *(folder for step, folder in recording.weights if step <= begins),
        )
        if same
        else (),
        overlap_schedule=False,
        **ONE_PROCESS,
        crash_dump_folder="",
        watchdog_timeout=0.0,
        show_progress=progress,
        **here,
    )
    return settings, same


def _result(recording: Recording, report: ReplayReport, same: bool) -> dict[str, object]:
    return {
        "recording": {
            "reason": recording.reason,
            "error": recording.error,
            "at": recording.at,
            "first_step": recording.first,
            "whole": recording.first == 0,
            "requests": len(recording.requests),
            "seats": len(recording.slots),
            "steps": len(recording.steps),
        },
        "same_model": same,
        "other_versions": _others(recording),
        "equal": same and not report.different and report.raised is None,
        **asdict(report),
    }


def _others(recording: Recording) -> dict[str, tuple[str, str]]:
    """Versions that differ: name → (then, now)."""
    now = versions()
    return {name: (then, now.get(name, "")) for name, then in recording.versions.items() if now.get(name, "") != then}


def _lines(recording: Recording, report: ReplayReport, same: bool) -> Iterator[str]:
    """The result in words."""
    when, requests = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(recording.at)), len(recording.requests)
    begins = f"step {recording.first}, {len(recording.slots)} requests running"
    yield f"recorded {when} UTC: {recording.reason}"
    yield f"{len(recording.steps)} steps from {begins if recording.first else 'the first one'}; {requests} requests"
    for name, (then, now) in _others(recording).items():
        yield f"{name} was {then} then, and is {now or 'not there'} now"
    if report.filled:
        yield f"{report.filled} tokens were computed first, for what the first steps found in the device"
    if not same:
        yield f"another model: {report.steps} steps ran, their outputs are not compared"
    elif not report.different:
        yield f"all {report.compared} tokens of {report.steps} steps equal the recorded ones"
    else:
        first = report.differences[0]
        yield (
            f"{report.different} of {report.rows} rows differ, the first in step {first.step}, slot {first.slot},"
            f" request {first.uid}, output token {first.at}: recorded {list(first.recorded)}, now {list(first.now)}"
        )
    if report.logprobs:
        yield f"{report.logprobs} log-probabilities differ by at most {report.logprob_gap:.3g}"
    if report.raised is not None:
        yield f"step {report.raised.step} raised {report.raised.error}\n{report.raised.trace}"
    elif recording.error:
        yield f"what the engine died of did not come again: {recording.error.strip().splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main())
