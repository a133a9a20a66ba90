"""Recording of the last steps of an engine: its requests, plans and outputs. `thalweg replay` runs them again.

In memory a recording is two segments of at most STEPS steps or BYTES bytes; when the later one is full, the earlier one
is dropped. A step costs two encodings of flat values (0.5 µs and 0.08 µs a row on one core of an EPYC). A segment
begins with the running requests as the device knows them then, kept as lengths of lists that only grow.

The file is JSON lines, described in docs/replay.md. It holds the token ids of prompts and answers, so its mode is 0600.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from thalweg import __version__
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.messages import Abort, FromEngine, Rejected, Submit, ToEngine, UpdateWeights
from thalweg.core.plan import Bind, Output, StepPlan
from thalweg.core.request import Exit, Request

log = logging.getLogger("thalweg.recording")
FORMAT, VERSION = "thalweg-recording", 2
STEPS = 1000  # of a segment
BYTES = 16 << 20  # of a segment, prompts included
PACKAGES = ("torch", "numpy", "msgspec", "llguidance", "tokenizers", "triton")

_pack = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_decode_outputs = msgspec.msgpack.Decoder(tuple[Output, ...]).decode


class RecordingLine(msgspec.Struct, tag_field="kind", frozen=True):
    """One line of a file."""


class RecordingHeader(RecordingLine, tag="head", frozen=True, kw_only=True):
    """The first line."""

    format: str = FORMAT
    version: int = VERSION
    reason: str  # why it was written
    error: str  # traceback that ended the engine, or ""
    at: float  # time.time()
    versions: dict[str, str]  # of packages
    config: EngineConfig
    model: str  # fingerprint of the checkpoint
    first: int  # first recorded step
    whole: bool  # it is the engine's first step, so nothing precedes the recording


class RecordedRequest(RecordingLine, tag="request", frozen=True):
    """A request of the recorded steps."""

    step: int  # the first one that was planned with it
    request: Submit


class RecordedEnd(RecordingLine, tag="ended", frozen=True):
    """The sequence was aborted or refused before this step, so nobody reads its tokens from then on."""

    step: int
    uid: int


class RecordedWeights(RecordingLine, tag="weights", frozen=True):
    """The weights in the folder `path` replaced others before this step."""

    step: int
    path: str


class RecordedSlot(RecordingLine, tag="seat", frozen=True):
    """A request that ran before the first step, as the device knows it then."""

    uid: int
    bind: Bind  # puts it into its slot; an end of 0: it has ended
    pages: tuple[int, ...]


class RecordedStep(RecordingLine, tag="step", frozen=True):
    """One step."""

    plan: StepPlan
    outputs: tuple[Output, ...] | None  # None: it did not end


class RecordingFooter(RecordingLine, tag="tail", frozen=True):
    """The last line."""

    lines: int  # before it


Line = RecordingHeader | RecordedRequest | RecordedEnd | RecordedWeights | RecordedSlot | RecordedStep | RecordingFooter
_decode_line = msgspec.json.Decoder(Line).decode
L = TypeVar("L", bound=RecordingLine)


class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """A file that was read."""

    head: RecordingHeader
    asked: tuple[RecordedRequest, ...]
    ended: tuple[RecordedEnd, ...]
    changed: tuple[RecordedWeights, ...]
    seats: tuple[RecordedSlot, ...]
    steps: tuple[RecordedStep, ...]
    cut: bool  # it ends in the middle, so the last steps are missing


class _Snapshot(NamedTuple):
    """A running request at the beginning of a segment: its growing lists, and their lengths then."""

    request: Request
    slot: int
    out: Sequence[int]
    num_out: int
    pages: Sequence[int]
    num_pages: int
    computed: int  # tokens with KV
    has_ended: bool

    def line(self) -> RecordedSlot:
        r, tokens = self.request, (*self.request.prompt, *self.out[: self.num_out])
        end = 0 if self.has_ended else r.end
        bind = Bind(
            self.slot, tokens, len(r.prompt), self.computed, end, r.seed, r.stop_ids, r.params, r.salt, r.has_grammar
        )
        return RecordedSlot(r.uid, bind, tuple(self.pages[: self.num_pages]))


@dataclass(slots=True)
class _Segment:
    first: int  # first step
    plans: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)  # of `plans` in order; the last ones may be missing
    asked: list[tuple[int, Submit]] = field(default_factory=list)  # (step, request)
    ended: list[tuple[int, int]] = field(default_factory=list)  # (step, uid)
    snapshots: list[_Snapshot] | None = None  # None until the step before the first one is committed
    size: int = 0  # bytes added since the first step

    @property
    def is_full(self) -> bool:
        return self.snapshots is not None and (len(self.plans) >= STEPS or self.size >= BYTES)


class StepRecorder:
    """Records the steps of an engine. Raises UnsupportedConfig for a folder that cannot be written to."""

    def __init__(self, config: EngineConfig, requests: Mapping[int, Request]) -> None:
        self.config, self.requests = config, requests  # the scheduler's own requests, by uid
        self.folder = Path(config.crash_dump_folder)
        self._changed: list[RecordedWeights] = []  # since the engine's start: every step depends on them
        # replaced as a whole, because another thread may be writing it
        self._segments: tuple[_Segment, ...] = (_Segment(0, snapshots=[]),)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnsupportedConfig(
                f"crash_dump_folder {self.folder}: {error.strerror}; name another folder"
            ) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UnsupportedConfig(f"crash_dump_folder {self.folder}: may not be written to; name another folder")

    def add_messages(self, step: int, messages: Sequence[ToEngine], replies: Sequence[FromEngine]) -> None:
        """Messages that were handled before `step` was planned, and their replies."""
        segment = self._segments[-1]
        for message in messages:
            if isinstance(message, Submit):
                segment.asked.append((step, message))
                segment.size += 8 * len(message.prompt)
            elif isinstance(message, Abort):
                segment.ended += ((step, uid) for uid in message.uids)
            elif isinstance(message, UpdateWeights):
                self._changed.append(RecordedWeights(step, message.path))
        segment.ended += ((step, reply.uid) for reply in replies if isinstance(reply, Rejected))

    def add_plan(self, plan: StepPlan) -> None:
        """A plan that is about to be launched."""
        if self._segments[-1].is_full:
            self._begin_segment(plan)
        segment, packed = self._segments[-1], _pack(plan)
        segment.plans.append(packed)
        segment.size += len(packed)

    def add_outputs(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        """The outputs of a committed step."""
        latest, packed = self._segments[-1], _pack(outputs)
        segment = latest if plan.step >= latest.first else self._segments[0]
        segment.outputs.append(packed)
        segment.size += len(packed)
        if latest.snapshots is None and plan.step + 1 == latest.first:
            latest.snapshots = self._snapshots([_decode_plan(packed) for packed in latest.plans])

    def _begin_segment(self, plan: StepPlan) -> None:
        """Begins a segment with `plan`. Requests that have not ended move into it."""
        old, new = self._segments[-1], _Segment(plan.step)
        new.asked = [(step, message) for step, message in old.asked if message.uid in self.requests]
        new.ended = [(step, uid) for step, uid in old.ended if uid in self.requests]
        if len(old.outputs) == len(old.plans):
            new.snapshots = self._snapshots([plan])
        self._segments = old, new

    def _snapshots(self, plans: Sequence[StepPlan]) -> list[_Snapshot]:
        """The running requests as the device knows them before the first of `plans`, which exist already. All earlier
        steps are committed.
        """
        bound = {bind.slot for plan in plans for bind in plan.binds}
        start = {row.uid: row.start for plan in reversed(plans) for row in plan.rows}
        snapshots = []
        for r in self.requests.values():
            if r.is_bound and r.slot >= 0 and r.slot not in bound:
                computed = r.known - 1 if r.known > r.prefill_len else start.get(r.uid, r.computed)
                has_ended = r.exit in (Exit.FINISH, Exit.ABORT)
                snapshots.append(_Snapshot(r, r.slot, r.out, len(r.out), r.pages, len(r.pages), computed, has_ended))
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
        path = self.folder / f"thalweg-{file_stamp()}.jsonl"
        part = path.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            lines = list(map(msgspec.json.encode, self._lines(reason, error)))
            file.write(b"\n".join([*lines, msgspec.json.encode(RecordingFooter(len(lines))), b""]))
        part.rename(path)
        log.warning("recorded the last steps in %s (%s); run them again: thalweg replay %s", path, reason, path)
        return path

    def _lines(self, reason: str, error: str) -> Iterator[Line]:
        segments = self._segments
        first, snapshots = segments[0].first, segments[0].snapshots
        assert snapshots is not None, "a segment without snapshots is never followed by another one"
        yield RecordingHeader(
            reason=reason,
            error=error,
            at=time.time(),
            versions=versions(),
            config=self.config,
            model=fingerprint(Path(self.config.model_path)),
            first=first,
            whole=first == 0,
        )
        asked = {message.uid: (step, message) for segment in segments for step, message in segment.asked[:]}
        for step, message in asked.values():
            yield RecordedRequest(step, message)
        for step, uid in sorted({entry for segment in segments for entry in segment.ended[:]}):
            yield RecordedEnd(step, uid)
        yield from self._changed[:]
        for snapshot in snapshots:
            yield snapshot.line()
        for segment in segments:
            for plan, outputs in zip_longest(segment.plans[:], segment.outputs[:]):
                if plan is not None:
                    values = None if outputs is None else tuple(map(_finite, _decode_outputs(outputs)))
                    yield RecordedStep(_decode_plan(plan), values)


def _finite(output: Output) -> Output:
    """JSON has no infinity: log-probabilities with one are left out."""
    entries = (*output.logprobs, *output.scores)
    if all(math.isfinite(p) for entry in entries for p in (entry.logprob, *entry.top_logprobs)):
        return output
    return output._replace(logprobs=(), scores=())


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


# ---- reading


def read(path: Path) -> Recording:
    """Raises UnsupportedConfig for a file that is no recording, of another version, or broken before its last line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UnsupportedConfig(f"{path}: {error.strerror}") from error
    head = _read_header(path, lines[0] if lines else b"")
    entries: list[Line] = []
    is_broken = False
    for number, line in enumerate(lines[1:], 2):
        try:
            entries.append(_decode_line(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                raise UnsupportedConfig(f"{path}: line {number} is broken: {error}") from error
            is_broken = True  # the disk was full, or the machine went down
    footers = _only(entries, RecordingFooter)
    written = footers[0].lines if footers else len(entries) + 1
    present = len(entries) - len(footers) + 1
    if written != present:
        raise UnsupportedConfig(f"{path}: {written} lines were written, {present} are there")
    return Recording(
        head,
        _only(entries, RecordedRequest),
        _only(entries, RecordedEnd),
        _only(entries, RecordedWeights),
        _only(entries, RecordedSlot),
        _only(entries, RecordedStep),
        is_broken or not footers,
    )


def _only(entries: Sequence[RecordingLine], kind: type[L]) -> tuple[L, ...]:
    return tuple(entry for entry in entries if isinstance(entry, kind))


def _read_header(path: Path, line: bytes) -> RecordingHeader:
    try:
        kind = msgspec.json.decode(line, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kind = _Version()
    if kind.format != FORMAT:
        raise UnsupportedConfig(
            f"{path}: no recording: its first line should be a JSON object with the format {FORMAT}"
        )
    if kind.version != VERSION:
        raise UnsupportedConfig(
            f"{path}: a recording of version {kind.version}; this Thalweg ({__version__}) reads version {VERSION}: use"
            " the one that wrote it"
        )
    try:
        head = _decode_line(line)
    except msgspec.DecodeError as error:
        raise UnsupportedConfig(f"{path}: line 1 is broken: {error}") from error
    if not isinstance(head, RecordingHeader):
        raise UnsupportedConfig(f"{path}: line 1 is no head but a {type(head).__name__}")
    return head
