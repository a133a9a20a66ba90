"""A channel from the leader of a data-parallel rank to its other processes, in shared memory: a ring of bytes that
each follower reads at its own pace.

Layout, in words of 8 bytes: the position up to which the leader has written, how many messages it has sent, then for
each follower the position up to which it has read, and how many messages it has carried out. A position counts bytes
from the start. Messages follow in the ring, each behind its length. A message that is longer than the ring goes through
it in parts. A position is written after its bytes, which other cores see in this order on x86.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from thalweg.core.errors import RankLost
from thalweg.parallel.shared_memory import SharedMemory, WakePipe

RING = 1 << 20  # bytes: many steps of 256 rows (4 kB), or the prompts of a few binds
WRITTEN, SENT, READ = 0, 1, 8  # words of the leader; first word of the followers, two each
HEADER = 512 * 8  # bytes before the ring
MOST_FOLLOWERS = (HEADER // 8 - READ) // 2
LENGTH = 8  # bytes before a message


class PlanChannel:
    """The shared state. wake_pipes: of the leader, then of each follower. names: of the same, for errors."""

    def __init__(self, wake_pipes: Sequence[WakePipe], names: Sequence[str], ring: int = RING) -> None:
        assert 2 <= len(wake_pipes) <= 1 + MOST_FOLLOWERS and ring % 8 == 0
        self.memory, self.wake_pipes, self.names, self.ring = (
            SharedMemory(HEADER + ring),
            list(wake_pipes),
            list(names),
            ring,
        )

    @property
    def followers(self) -> int:
        return len(self.wake_pipes) - 1

    @property
    def sent(self) -> int:
        """How many messages the leader has sent."""
        return self.memory.words[SENT]

    def carried_out(self, follower: int) -> int:
        """How many messages a follower, numbered from 0, has carried out."""
        return self.memory.words[READ + 2 * follower + 1]


def never() -> bool:
    return False


class PlanWriter:
    """The leader's end."""

    def __init__(self, channel: PlanChannel, timeout: float, is_closed: Callable[[], bool] = never) -> None:
        """timeout: seconds that a follower may take to make room in the ring. is_closed: whether to stop waiting."""
        self.channel, self.timeout, self.written, self.is_closed = channel, timeout, 0, is_closed

    def write(self, message: bytes) -> None:
        """Sends a message to every follower. Raises RankLost if one makes no room in time."""
        self.channel.memory.words[SENT] += 1
        self._put(len(message).to_bytes(LENGTH, "little") + message)

    def has_room(self, length: int) -> bool:
        """Whether a message of so many bytes can be written without waiting for a follower."""
        return self._free() >= LENGTH + length

    def _put(self, data: bytes) -> None:
        channel, sent = self.channel, 0
        ring = channel.memory.bytes[HEADER:]
        while sent < len(data):
            room = self._room(min(len(data) - sent, channel.ring))
            at = self.written % channel.ring
            part = data[sent : sent + min(room, channel.ring - at)]
            ring[at : at + len(part)] = part
            sent += len(part)
            self.written += len(part)
            channel.memory.words[WRITTEN] = self.written  # after the bytes: a follower reads up to here
            for wake_pipe in channel.wake_pipes[1:]:
                wake_pipe.wake()

    def _room(self, wanted: int) -> int:
        """Bytes that every follower has read, at least `wanted` of them or half of the ring."""
        channel, words = self.channel, self.channel.memory.words
        enough = min(wanted, channel.ring // 2)
        has_room = channel.wake_pipes[0].wait(
            lambda: self._free() >= enough or self.is_closed(), time.monotonic() + self.timeout
        )
        if not has_room or self.is_closed():
            slowest = min(range(channel.followers), key=lambda follower: words[READ + 2 * follower])
            raise RankLost(f"{channel.names[1 + slowest]} has taken no step for {self.timeout:g} s")
        return self._free()

    def _free(self) -> int:
        channel, words = self.channel, self.channel.memory.words
        slowest = min(words[READ + 2 * follower] for follower in range(channel.followers))
        return channel.ring - (self.written - slowest)


class PlanReader:
    """A follower's end. follower: its number, from 0."""

    def __init__(self, channel: PlanChannel, follower: int, is_closed: Callable[[], bool] = never) -> None:
        """is_closed: whether to stop waiting for messages."""
        self.channel, self.word, self.at, self.is_closed = channel, READ + 2 * follower, 0, is_closed
        self.wake_pipe = channel.wake_pipes[1 + follower]

    def read(self) -> bytes | None:
        """The next message. Sleeps until there is one. None: closed."""
        length = self._take(LENGTH)
        return None if length is None else self._take(int.from_bytes(length, "little"))

    def done(self) -> None:
        """The last message has been carried out."""
        self.channel.memory.words[self.word + 1] += 1

    def _take(self, count: int) -> bytes | None:
        channel, words, taken = self.channel, self.channel.memory.words, bytearray()
        ring = channel.memory.bytes[HEADER:]
        while len(taken) < count:
            while not self.wake_pipe.wait(
                lambda: words[WRITTEN] > self.at or self.is_closed(), time.monotonic() + 3600
            ):
                pass
            if self.is_closed():
                return None
            at, unread = self.at % channel.ring, words[WRITTEN] - self.at
            n = min(count - len(taken), unread, channel.ring - at)
            taken += ring[at : at + n]
            self.at += n
            words[self.word] = self.at
            if unread > channel.ring // 2:  # the leader may wait for room
                channel.wake_pipes[0].wake()
        return bytes(taken)
