"""A recording of the last steps of an engine: what it was asked, what it planned, what came of it. `thalweg replay`
runs it again.

In memory it is two segments of at most STEPS steps or BYTES bytes: when the later one is full the earlier one is
forgotten. A step costs two encodings of flat values (0.5 µs and 0.08 µs a row on one core of an EPYC); a segment begins
with the seats, the running requests as the device knows them there, noted as lengths into lists that only grow. All
else is done when it is written.

The file is JSON lines; docs/replay.md describes them. It holds the token ids of users' prompts and answers: its mode is
0600.
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
from typing import NamedTuple

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
BYTES = 16 << 20  # of a segment, its prompts counted too
PACKAGES = ("torch", "numpy", "msgspec", "llguidance", "tokenizers", "triton")

_pack = msgspec.msgpack.Encoder().encode
_plan = msgspec.msgpack.Decoder(StepPlan).decode
_outputs = msgspec.msgpack.Decoder(tuple[Output, ...]).decode


class RecordingHeader(msgspec.Struct, tag_field="kind", tag="head", frozen=True, kw_only=True):
    """The first line. reason: why it was written; error: the traceback that the engine died of, or "". at: time.time().
    first: the first step. whole: this is the engine's first step, so that nothing precedes the recording. model: a
    fingerprint of the checkpoint.
    """

    format: str = FORMAT
    version: int = VERSION
    reason: str
    error: str
    at: float
    versions: dict[str, str]
    config: EngineConfig
    model: str
    first: int
    whole: bool


class RecordedRequest(msgspec.Struct, tag_field="kind", tag="request", frozen=True):
    """A request of the recorded steps. step: the first one that was planned with it."""

    step: int
    request: Submit


class RecordedEnd(msgspec.Struct, tag_field="kind", tag="ended", frozen=True):
    """From this step on nobody reads what is sampled for this sequence: it was aborted, or refused on the way."""

    step: int
    uid: int


class RecordedWeights(msgspec.Struct, tag_field="kind", tag="weights", frozen=True):
    """From this step on the weights that lie in `path` took the place of their like, for good: a folder, as the engine
    saw it.
    """

    step: int
    path: str


class RecordedSlot(msgspec.Struct, tag_field="kind", tag="seat", frozen=True):
    """A request that ran before the first step, as the device knows it then. bind: what puts it there; an end of 0
    means that it is over.
    """

    uid: int
    bind: Bind
    pages: tuple[int, ...]


class RecordedStep(msgspec.Struct, tag_field="kind", tag="step", frozen=True):
    """outputs: None for a step that did not come to its end."""

    plan: StepPlan
    outputs: tuple[Output, ...] | None


class RecordingFooter(msgspec.Struct, tag_field="kind", tag="tail", frozen=True):
    """The last line. lines: before it."""

    lines: int


Line = RecordingHeader | RecordedRequest | RecordedEnd | RecordedWeights | RecordedSlot | RecordedStep | RecordingFooter
_line = msgspec.json.Decoder(Line).decode


class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """A file as it was read. cut: it ends in the middle, so the last steps are missing."""

    head: RecordingHeader
    asked: tuple[RecordedRequest, ...]
    ended: tuple[RecordedEnd, ...]
    changed: tuple[RecordedWeights, ...]
    seats: tuple[RecordedSlot, ...]
    steps: tuple[RecordedStep, ...]
    cut: bool


class _Mark(NamedTuple):
    """A running request at the beginning of a segment: its lists, and how long they are then. computed: tokens that
    have KV.
    """

    request: Request
    slot: int
    out: Sequence[int]
    known: int
    pages: Sequence[int]
    held: int
    computed: int
    over: bool

    def seat(self) -> RecordedSlot:
        r, tokens = self.request, (*self.request.prompt, *self.out[: self.known])
        end = 0 if self.over else r.end
        bind = Bind(
            self.slot, tokens, len(r.prompt), self.computed, end, r.seed, r.stop_ids, r.params, r.salt, r.has_grammar
        )
        return RecordedSlot(r.uid, bind, tuple(self.pages[: self.held]))


@dataclass(slots=True)
class _Segment:
    """first: its first step. outputs[i] belongs to plans[i]; those of the last plans may be missing. asked, ended:
    (step, request or uid). marks: None until the step before the first is committed. size: bytes that came since the
    first step.
    """

    first: int
    plans: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    asked: list[tuple[int, Submit]] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    marks: list[_Mark] | None = None
    size: int = 0

    @property
    def full(self) -> bool:
        return self.marks is not None and (len(self.plans) >= STEPS or self.size >= BYTES)


class StepRecorder:
    """The recorder of an engine. requests: all of them by uid, the scheduler's own. Raises UnsupportedConfig for a
    folder that cannot be written to.
    """

    def __init__(self, config: EngineConfig, requests: Mapping[int, Request]) -> None:
        self.config, self.requests = config, requests
        self.folder = Path(config.crash_dump_folder)
        self._changed: list[
            RecordedWeights
        ] = []  # of the engine's whole life: it has no step that does not depend on them
        self._segments: tuple[_Segment, ...] = (
            _Segment(0, marks=[]),
        )  # replaced as a whole: another thread may be writing it
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnsupportedConfig(
                f"crash_dump_folder {self.folder}: {error.strerror}; name another folder"
            ) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UnsupportedConfig(f"crash_dump_folder {self.folder}: may not be written to; name another folder")

    def add_messages(self, step: int, messages: Sequence[ToEngine], replies: Sequence[FromEngine]) -> None:
        now = self._segments[-1]
        for message in messages:
            if isinstance(message, Submit):
                now.asked.append((step, message))
                now.size += 8 * len(message.prompt)
            elif isinstance(message, Abort):
                now.ended += ((step, uid) for uid in message.uids)
            elif isinstance(message, UpdateWeights):
                self._changed.append(RecordedWeights(step, message.path))
        now.ended += ((step, reply.uid) for reply in replies if isinstance(reply, Rejected))

    def add_plan(self, plan: StepPlan) -> None:
        if self._segments[-1].full:
            self._roll(plan)
        now, packed = self._segments[-1], _pack(plan)
        now.plans.append(packed)
        now.size += len(packed)

    def add_outputs(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        now, packed = self._segments[-1], _pack(outputs)
        of = now if plan.step >= now.first else self._segments[0]
        of.outputs.append(packed)
        of.size += len(packed)
        if now.marks is None and plan.step + 1 == now.first:
            now.marks = self._marks([_plan(packed) for packed in now.plans])

    def _roll(self, plan: StepPlan) -> None:
        """The next segment begins with `plan`; the requests that go on go with it."""
        old, now = self._segments[-1], _Segment(plan.step)
        now.asked = [(step, message) for step, message in old.asked if message.uid in self.requests]
        now.ended = [(step, uid) for step, uid in old.ended if uid in self.requests]
        if len(old.outputs) == len(old.plans):
            now.marks = self._marks([plan])
        self._segments = old, now

    def _marks(self, plans: Sequence[StepPlan]) -> list[_Mark]:
        """The running requests as the device knows them just before the first of `plans`, which are made already; all
        that precedes them is committed.
        """
        bound = {bind.slot for plan in plans for bind in plan.binds}
        start = {row.uid: row.start for plan in reversed(plans) for row in plan.rows}
        marks = []
        for r in self.requests.values():
            if r.is_bound and r.slot >= 0 and r.slot not in bound:
                computed = r.known - 1 if r.known > r.prefill_len else start.get(r.uid, r.computed)
                over = r.exit in (Exit.FINISH, Exit.ABORT)
                marks.append(_Mark(r, r.slot, r.out, len(r.out), r.pages, len(r.pages), computed, over))
        return marks

    # ---- writing

    def save_crash(self, error: Exception) -> None:
        self.save(f"the engine died: {type(error).__name__}: {error}", "".join(traceback.format_exception(error)))

    def save(self, reason: str, error: str = "") -> None:
        """`dump`, for those who have worse troubles than a full disk."""
        try:
            self.dump(reason, error)
        except OSError as failed:
            log.error("the recording could not be written (%s): %s", reason, failed)

    def dump(self, reason: str, error: str = "") -> Path:
        """Writes what is recorded now. Any thread may call it, the loop's or one that watches it. Raises OSError."""
        path = self.folder / f"thalweg-{file_stamp()}.jsonl"
        draft = path.with_suffix(".part")
        count = 0
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for line in self._lines(reason, error):
                file.write(msgspec.json.encode(line) + b"\n")
                count += 1
            file.write(msgspec.json.encode(RecordingFooter(count)) + b"\n")
        draft.rename(path)
        log.warning("recorded the last steps in %s (%s); run them again: thalweg replay %s", path, reason, path)
        return path

    def _lines(self, reason: str, error: str) -> Iterator[Line]:
        segments = self._segments
        first, marks = segments[0].first, segments[0].marks
        assert marks is not None, "a segment is followed by another one only when it has its seats"
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
        for mark in marks:
            yield mark.seat()
        for segment in segments:
            for plan, outputs in zip_longest(segment.plans[:], segment.outputs[:]):
                if plan is not None:
                    yield RecordedStep(_plan(plan), None if outputs is None else tuple(map(_finite, _outputs(outputs))))


def _finite(output: Output) -> Output:
    """JSON has no infinity: log-probabilities among which there is one are left out."""
    every = (*output.logprobs, *output.scores)
    if all(math.isfinite(p) for entry in every for p in (entry.logprob, *entry.top_logprobs)):
        return output
    return output._replace(logprobs=(), scores=())


def file_stamp() -> str:
    """Time and process, for a file name that no other file has."""
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{int(now * 1e6) % 10**6:06}-{os.getpid()}"


def fingerprint(folder: Path) -> str:
    """Tells checkpoints apart by their configuration and the sizes of their weights, wherever they lie. "" for a folder
    that is not there.
    """
    config = folder / "config.json"
    if not config.is_file():
        return ""
    sizes = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    return hashlib.blake2b(config.read_bytes() + repr(sizes).encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    """What a recording was made with, and what may make another one differ."""
    found = {"thalweg": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- reading


def read(path: Path) -> Recording:
    """Raises UnsupportedConfig for a file that is no recording, of another version, or broken before its last line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UnsupportedConfig(f"{path}: {error.strerror}") from error
    head = _head(path, lines[0] if lines else b"")
    found: list[Line] = []
    cut = False
    for number, line in enumerate(lines[1:], 2):
        try:
            found.append(_line(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                raise UnsupportedConfig(f"{path}: line {number} is broken: {error}") from error
            cut = True  # the disk was full, or the machine went down
    tail = next((line for line in found if isinstance(line, RecordingFooter)), None)
    found = [line for line in found if line is not tail]
    if tail is not None and tail.lines != len(found) + 1:
        raise UnsupportedConfig(f"{path}: {tail.lines} lines were written, {len(found) + 1} are there")
    return Recording(
        head,
        tuple(line for line in found if isinstance(line, RecordedRequest)),
        tuple(line for line in found if isinstance(line, RecordedEnd)),
        tuple(line for line in found if isinstance(line, RecordedWeights)),
        tuple(line for line in found if isinstance(line, RecordedSlot)),
        tuple(line for line in found if isinstance(line, RecordedStep)),
        cut or tail is None,
    )


def _head(path: Path, line: bytes) -> RecordingHeader:
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
        head = _line(line)
    except msgspec.DecodeError as error:
        raise UnsupportedConfig(f"{path}: line 1 is broken: {error}") from error
    if not isinstance(head, RecordingHeader):
        raise UnsupportedConfig(f"{path}: line 1 is no head but a {type(head).__name__}")
    return head
