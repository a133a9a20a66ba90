"""Recording of the last steps of an engine: its requests, plans and outputs. `thalweg replay` runs them again.

In memory a recording is two segments of at most STEPS steps or BYTES bytes; when the later one is full, the earlier one
is dropped. A step costs two encodings of flat values (0.5 µs and 0.08 µs a row on one core of an EPYC). A segment
begins with the running requests as the device knows them then, kept as lengths of lists that only grow.

The file is one JSON object (docs/replay.md). It holds the token ids of prompts and answers, so its mode is 0600, and
that of a new folder 0700.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import platform
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec

from thalweg import __version__
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.messages import Abort, FromEngine, Rejected, Submit, ToEngine, UpdateWeights
from thalweg.core.plan import Bind, Output, StepPlan
from thalweg.core.request import ReleaseReason, Request

log = logging.getLogger("thalweg.recording")
FORMAT, VERSION = "thalweg-recording", 3
STEPS = 1000  # of a segment
BYTES = 16 << 20  # of a segment, prompts included
MAX_FILES, MAX_BYTES = 16, 1 << 30  # of all recordings in the folder; the oldest are removed
PACKAGES = ("torch", "numpy", "msgspec", "llguidance", "tokenizers", "triton")

_pack = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_decode_outputs = msgspec.msgpack.Decoder(tuple[Output, ...]).decode


class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0


class RecordedSlot(msgspec.Struct, frozen=True):
    """A request that ran before the first step, as the device knows it then."""

    uid: int
    bind: Bind  # puts it into its slot; an end of 0: it has ended
    pages: tuple[int, ...]


class RecordedStep(msgspec.Struct, frozen=True):
    """One step."""

    plan: StepPlan
    outputs: tuple[Output, ...] | None  # None: it did not end


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file."""

    format: str = FORMAT
    version: int = VERSION
    reason: str  # why it was written
    error: str  # traceback that ended the engine, or ""
    at: float  # time.time()
    versions: dict[str, str]  # of packages
    config: EngineConfig
    model: str  # fingerprint of the checkpoint
    first: int  # first recorded step; 0: nothing precedes the recording
    requests: tuple[tuple[int, Submit], ...]  # (the first step that was planned with it, request)
    # (step, uid): the sequence was aborted or refused before this step, so nobody reads its tokens from then on
    ended: tuple[tuple[int, int], ...]
    weights: tuple[tuple[int, str], ...]  # (step, folder whose weights replaced others before it)
    slots: tuple[RecordedSlot, ...]
    steps: tuple[RecordedStep, ...]


class _Snapshot(NamedTuple):
    """A running request at the beginning of a segment: its growing lists, and their lengths then."""

    request: Request
    slot: int
    num_out: int
    pages: Sequence[int]
    num_pages: int
    computed: int  # tokens with KV
    has_ended: bool

    def recorded(self) -> RecordedSlot:
        r = self.request
        tokens, end = (*r.prompt, *r.output_ids[: self.num_out]), 0 if self.has_ended else r.end
        bind = r.bind(self.computed)._replace(slot=self.slot, tokens=tokens, end=end)
        return RecordedSlot(r.uid, bind, tuple(self.pages[: self.num_pages]))


@dataclass(slots=True)
class _Segment:
    first: int  # first step
    snapshots: list[_Snapshot] = field(default_factory=list)  # before the first step
    plans: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)  # of `plans` in order; the last ones may be missing
    requests: list[tuple[int, Submit]] = field(default_factory=list)  # (step, request)
    ended: list[tuple[int, int]] = field(default_factory=list)  # (step, uid)
    size: int = 0  # bytes added since the first step


class StepRecorder:
    """Records the steps of an engine. Raises UnsupportedConfig for a folder that cannot be written to."""

    def __init__(self, config: EngineConfig, requests: Mapping[int, Request]) -> None:
        self.config, self.requests = config, requests  # the scheduler's own requests, by uid
        self.folder = Path(config.crash_dump_folder)
        self._weights: list[tuple[int, str]] = []  # (step, folder) since the engine's start: every step depends on them
        # replaced as a whole, because another thread may be writing it
        self._segments: tuple[_Segment, ...] = (_Segment(0),)
        if problem := make_folder(self.folder):
            raise UnsupportedConfig(f"crash_dump_folder {problem}; name another folder")

    def add_messages(self, step: int, messages: Sequence[ToEngine], replies: Sequence[FromEngine]) -> None:
        """Messages that were handled before `step` was planned, and their replies."""
        segment = self._segments[-1]
        for message in messages:
            if isinstance(message, Submit):
                segment.requests.append((step, message))
                segment.size += 8 * len(message.prompt)
            elif isinstance(message, Abort):
                segment.ended += ((step, uid) for uid in message.uids)
            elif isinstance(message, UpdateWeights):
                self._weights.append((step, message.path))
        segment.ended += ((step, reply.uid) for reply in replies if isinstance(reply, Rejected))

    def add_plan(self, plan: StepPlan) -> None:
        """A plan that is about to be launched."""
        self._add(self._segments[-1].plans, plan)

    def add_outputs(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        """The outputs of a committed step."""
        segment = self._segments[-1]
        self._add(segment.outputs, outputs)
        if len(segment.plans) >= STEPS or segment.size >= BYTES:
            self._begin_segment(plan.step + 1)

    def _add(self, packed: list[bytes], value: StepPlan | Sequence[Output]) -> None:
        packed.append(_pack(value))
        self._segments[-1].size += len(packed[-1])

    def _begin_segment(self, first: int) -> None:
        """Begins a segment with step `first`, before which all are committed. What has not ended moves into it."""
        old, new = self._segments[-1], _Segment(first)
        count = len(old.outputs)
        new.plans = old.plans[count:]  # in flight
        new.requests = [(step, message) for step, message in old.requests if message.uid in self.requests]
        new.ended = [(step, uid) for step, uid in old.ended if uid in self.requests]
        new.snapshots = self._snapshots([_decode_plan(packed) for packed in new.plans])
        self._segments = replace(old, plans=old.plans[:count]), new

    def _snapshots(self, plans: Sequence[StepPlan]) -> list[_Snapshot]:
        """The running requests as the device knows them before the first of `plans`, which are in flight."""
        bound = {bind.slot for plan in plans for bind in plan.binds}
        start = {row.uid: row.start for plan in reversed(plans) for row in plan.rows}
        snapshots = []
        for r in self.requests.values():
            if r.is_bound and r.slot >= 0 and r.slot not in bound:
                computed = r.num_tokens - 1 if r.num_tokens > r.prefill_len else start.get(r.uid, r.num_computed_tokens)
                has_ended = r.release_reason in (ReleaseReason.FINISH, ReleaseReason.ABORT)
                snapshots.append(_Snapshot(r, r.slot, len(r.output_ids), r.pages, len(r.pages), computed, has_ended))
        return snapshots

    # ---- writing

    def save_crash(self, error: Exception) -> None:
        """Saves the recording of an engine that ends with `error`."""
        self.save(f"the engine died: {type(error).__name__}: {error}", "".join(traceback.format_exception(error)))

    def save(self, reason: str, error: str = "") -> None:
        """Writes the recording, or logs why that is impossible."""
        try:
            self.dump(reason, error)
        except OSError as failure:
            log.error("the recording could not be written (%s): %s", reason, failure)

    def dump(self, reason: str, error: str = "") -> Path:
        """Writes the recording. Any thread may call it. Raises OSError."""
        path = self.folder / f"thalweg-{file_stamp()}.json"
        part, content = path.with_suffix(".part"), msgspec.json.encode(self._recording(reason, error))
        remove_oldest(self.folder, len(content))
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            part.rename(path)
        except OSError:  # a full disk
            part.unlink(missing_ok=True)
            raise
        log.warning("recorded the last steps in %s (%s); run them again: thalweg replay %s", path, reason, path)
        return path

    def _recording(self, reason: str, error: str) -> Recording:
        segments = self._segments
        requests = {message.uid: (step, message) for segment in segments for step, message in segment.requests[:]}
        plans = [packed for segment in segments for packed in segment.plans[:]]
        outputs = [packed for segment in segments for packed in segment.outputs[:]]
        return Recording(
            reason=reason,
            error=error,
            at=time.time(),
            versions=versions(),
            config=self.config,
            model=fingerprint(Path(self.config.model_path)),
            first=segments[0].first,
            requests=tuple(requests.values()),
            ended=tuple(sorted({entry for segment in segments for entry in segment.ended[:]})),
            weights=tuple(self._weights),
            slots=tuple(snapshot.recorded() for snapshot in segments[0].snapshots),
            steps=tuple(
                RecordedStep(_decode_plan(plan), None if output is None else _decode_finite(output))
                for plan, output in zip_longest(plans, outputs[: len(plans)])
            ),
        )


def _decode_finite(packed: bytes) -> tuple[Output, ...]:
    """JSON has no infinity: log-probabilities with one are left out."""
    outputs = []
    for output in _decode_outputs(packed):
        entries = (*output.logprobs, *output.prompt_logprobs)
        is_finite = all(math.isfinite(p) for entry in entries for p in (entry.logprob, *entry.top_logprobs))
        outputs.append(output if is_finite else output._replace(logprobs=(), prompt_logprobs=()))
    return tuple(outputs)


def make_folder(folder: Path) -> str:
    """Makes a folder that files can be written to. Returns why that is impossible, or ""."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder}: may not be written to"


def remove_oldest(folder: Path, size: int) -> None:
    """Removes the oldest recordings until one of `size` bytes fits the limits. Other engines may write there, too."""
    sizes: dict[Path, int] = {}
    for file in sorted(folder.glob("thalweg-*.json")):  # names begin with the time
        with contextlib.suppress(FileNotFoundError):
            sizes[file] = file.stat().st_size
    while sizes and (len(sizes) >= MAX_FILES or sum(sizes.values()) + size > MAX_BYTES):
        oldest = next(iter(sizes))
        oldest.unlink(missing_ok=True)
        del sizes[oldest]


def file_stamp() -> str:
    """Time and process, for a file name that no other file has."""
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{int(now * 1e6) % 10**6:06}-{os.getpid()}"


def fingerprint(folder: Path) -> str:
    """Identifies a checkpoint by its configuration and the sizes of its files. "" for a missing folder."""
    config = folder / "config.json"
    if not config.is_file():
        return ""
    sizes = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    return hashlib.blake2b(config.read_bytes() + repr(sizes).encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    """Versions that may make a replay differ."""
    versions_by_package = {"thalweg": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions_by_package[name] = metadata.version(name)
    return versions_by_package


def read(path: Path) -> Recording:
    """Raises UnsupportedConfig for a file that is no recording, of another version, or broken."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnsupportedConfig(
            f"{path}: {error.strerror}; give a recording (thalweg-*.json of --crash-dump-folder)"
        ) from error
    try:
        found = msgspec.json.decode(content, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedConfig(f"{path}: no recording, or only a part of one: {error}") from error
    if found.format != FORMAT:
        raise UnsupportedConfig(f"{path}: no recording: it should be a JSON object with the format {FORMAT}")
    if found.version != VERSION:
        raise UnsupportedConfig(
            f"{path}: a recording of version {found.version}; this Thalweg ({__version__}) reads version {VERSION}: use"
            " the one that wrote it"
        )
    try:
        return msgspec.json.decode(content, type=Recording)
    except msgspec.DecodeError as error:
        raise UnsupportedConfig(f"{path} is broken: {error}") from error
