"""How data-parallel ranks of one host learn each other's next step: a record of 64 bytes for each in shared memory.

A rank writes its record and reads those of the others, once a round. Each rank has two records, which take turns: it
writes its record of round n + 2 once it has read all records of round n + 1, and a rank has written that only after it
had read those of round n. Layout of a record, in words of 8 bytes: the contents, then round and checksum. A
reader takes contents whose checksum fits, so the order in which another core sees the words does not matter.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence

from thalweg.core.agreement import PACKED_BYTES, RankStep
from thalweg.core.errors import RankLost
from thalweg.parallel.shared_memory import SharedMemory, WakePipe

RECORD = 64  # bytes, a line of a cache


class StepRecords:
    """The records of all ranks. wake_pipes, names: of the ranks, in order. timeout: seconds that a rank may take to
    write its record after another has.
    """

    def __init__(self, wake_pipes: Sequence[WakePipe], names: Sequence[str], timeout: float) -> None:
        self.wake_pipes, self.names, self.timeout = list(wake_pipes), list(names), timeout
        self.memory = SharedMemory((2 * len(self.wake_pipes) + 1) * RECORD)

    def mark_lost(self, rank: int) -> None:
        """A process of this rank has ended: those that wait for it stop waiting."""
        self.memory.words[-1] = rank + 1
        for wake_pipe in self.wake_pipes:
            wake_pipe.wake()

    def places(self, ranks: Sequence[int]) -> list[int]:
        """Of all records of some ranks."""
        return [2 * rank + turn for rank in ranks for turn in (0, 1)]

    def get(self, place: int) -> bytes | None:
        """A record of RECORD bytes; None if it is empty or being written."""
        record = bytes(self.memory.bytes[place * RECORD : (place + 1) * RECORD])
        stamp = int.from_bytes(record[-8:], sys.byteorder)
        is_whole = stamp >> 32 and stamp & 0xFFFFFFFF == zlib.crc32(record[:PACKED_BYTES])
        return record if is_whole else None

    def put(self, place: int, record: bytes) -> None:
        """Writes a record that `get` has read on another node."""
        at = place * RECORD
        self.memory.bytes[at : at + PACKED_BYTES] = record[:PACKED_BYTES]
        self.memory.words[(at + RECORD) // 8 - 1] = int.from_bytes(record[-8:], sys.byteorder)

    @property
    def lost(self) -> str:
        """The name of a rank that has ended; "" if none has."""
        rank = self.memory.words[-1]
        return self.names[rank - 1] if rank else ""


class StepExchange:
    """One rank's end of a step_records."""

    def __init__(self, step_records: StepRecords, rank: int) -> None:
        self.step_records, self.rank = step_records, rank
        self.wake_pipe = step_records.wake_pipes[rank]
        self.round = 1  # the next one; 0 is an empty record
        self.others = [other for other in range(len(step_records.wake_pipes)) if other != rank]

    @property
    def is_called(self) -> bool:
        """Another rank has written its record of this round and waits for ours."""
        return any(self._read(other) is not None for other in self.others)

    def exchange(self, own: RankStep) -> list[RankStep]:
        """The records of all ranks in this round. Raises RankLost for one that writes none in time."""
        self.publish(own)
        for other in self.others:
            self.step_records.wake_pipes[other].wake()
        found: dict[int, RankStep] = {self.rank: own}

        def is_complete() -> bool:
            if lost := self.step_records.lost:
                raise RankLost(f"{lost} has ended")
            for other in self.others:
                if other not in found and (record := self._read(other)) is not None:
                    found[other] = record
            return len(found) == len(self.step_records.wake_pipes)

        if not self.wake_pipe.wait(is_complete, time.monotonic() + self.step_records.timeout):
            missing = [self.step_records.names[other] for other in self.others if other not in found]
            raise RankLost(f"{' and '.join(missing)}: no part in step {own.step} for {self.step_records.timeout:g} s")
        self.round += 1
        return [found[rank] for rank in range(len(found))]

    def publish(self, own: RankStep) -> None:
        """Writes the record of this round."""
        data, at = own.pack(), self._place(self.rank)
        self.step_records.memory.bytes[at : at + PACKED_BYTES] = data
        self.step_records.memory.words[(at + RECORD) // 8 - 1] = self._stamp(data)

    def _read(self, rank: int) -> RankStep | None:
        """The record of this round; None if it is not written yet."""
        at = self._place(rank)
        stamp = self.step_records.memory.words[(at + RECORD) // 8 - 1]
        if stamp >> 32 != self.round & 0x7FFFFFFF:
            return None
        data = bytes(self.step_records.memory.bytes[at : at + PACKED_BYTES])
        return RankStep.unpack(data) if stamp == self._stamp(data) else None

    def _place(self, rank: int) -> int:
        return (2 * rank + self.round % 2) * RECORD

    def _stamp(self, data: bytes) -> int:
        return (self.round & 0x7FFFFFFF) << 32 | zlib.crc32(data)
