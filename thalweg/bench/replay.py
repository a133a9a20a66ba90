"""`thalweg replay FILE`: runs the last steps of an engine again, from the recording that it left, and says where they
come out differently.
"""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.bench.command import CommandParser
from thalweg.bench.replayer import Replayer, Verdict
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


def main(argv: Sequence[str] | None = None) -> int:
    """Raises UnsupportedConfig for what is no recording or cannot be run here, CheckpointError for a checkpoint that is
    not there.
    """
    parser = CommandParser(
        "thalweg replay",
        description="Runs the steps of a recording (--crash-dump-folder) again and compares what comes of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--model", metavar="DIR", help="folder of the checkpoint (default: where it was then)")
    parser.add_argument("--device", choices=("cpu",), help="compute there in plain torch, float32 (default: as then)")
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step to run (default: all)")
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object")
    said = parser.parse_args(argv)
    recording = read(said.file)
    if said.until is not None:
        recording = replace(recording, steps=tuple(s for s in recording.steps if s.plan.step <= said.until))
    settings, same = _settings(recording, said.model, said.device, progress=not said.json)
    begin = time.perf_counter()
    verdict = _run(Replayer(recording, settings, same), len(recording.steps), shown=not said.json)
    if said.json:
        result = _result(recording, verdict, same, time.perf_counter() - begin)
        print(json.dumps(result, ensure_ascii=False, indent=1))
    else:
        _tell(Console(highlight=False, soft_wrap=True), recording, verdict, same)
    return 0 if verdict.raised is None and not verdict.different else 1


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


def _run(replayer: Replayer, steps: int, shown: bool) -> Verdict:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("steps", total=steps)
        for verdict in replayer.run():
            bar.update(task, completed=verdict.steps)
    return replayer.verdict


def _result(recording: Recording, verdict: Verdict, same: bool, seconds: float) -> dict[str, object]:
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
        "equal": same and not verdict.different and verdict.raised is None,
        **asdict(verdict),
        "seconds": seconds,
    }


def _others(head: RecordingHeader) -> dict[str, tuple[str, str]]:
    """What was another version then: name → (then, now)."""
    now = versions()
    return {name: (then, now.get(name, "")) for name, then in head.versions.items() if now.get(name, "") != then}


def _tell(console: Console, recording: Recording, verdict: Verdict, same: bool) -> None:
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
    if verdict.filled:
        console.print(f"{verdict.filled} tokens were computed first, for what the first steps found in the device")
    if not same:
        console.print(f"another model: {verdict.steps} steps ran, their outputs are not compared")
    elif not verdict.different:
        console.print(f"all {verdict.compared} tokens of {verdict.steps} steps equal the recorded ones")
    else:
        first = verdict.differences[0]
        console.print(
            f"{verdict.different} of {verdict.rows} rows differ, the first in step {first.step}, slot {first.slot},"
            f" request {first.uid}, output token {first.at}: recorded {list(first.recorded)}, now {list(first.now)}",
            markup=False,
        )
    if verdict.logprobs:
        console.print(f"{verdict.logprobs} log-probabilities differ by at most {verdict.logprob_gap:.3g}")
    if verdict.raised is not None:
        console.print(f"step {verdict.raised.step} raised {verdict.raised.error}\n{verdict.raised.trace}", markup=False)
    elif head.error:
        last = head.error.strip().splitlines()[-1]
        console.print(f"what the engine died of did not come again: {last}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
