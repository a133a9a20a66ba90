"""The corpora of the fuzzers, and a few mutations of them, hold what the fuzzers check; malformed messages on the
wire.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import zmq

from thalweg.core.messages import FlushCache, FromEngine
from thalweg.engine.process import ZmqChannel
from tools.fuzz.__main__ import TARGETS, corpus_of, target_of

MUTATIONS = 20


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_mutations_of_it_hold(name: str) -> None:
    corpus, draw = corpus_of(name), random.Random(11)
    with target_of(name) as target:
        for entry in corpus:
            target.run(entry)
        for _ in range(MUTATIONS):
            target.run(target.mutate(draw.choice(corpus), draw, draw.choice(corpus)))


def test_a_message_that_cannot_be_read_is_refused_and_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context(1)
    front = context.socket(zmq.PAIR)
    front.bind(f"ipc://{tmp_path}/engine")
    channel = ZmqChannel(f"ipc://{tmp_path}/engine")
    submit = {"type": "Submit", "uid": 3, "prompt": [5], "params": {"top_k": "x"}}
    for message in (submit, {"type": "FlushCache", "id": 4, "x": 1}, {"type": "StopProfile", "id": -1, "type ": 0}):
        front.send(msgspec.msgpack.encode(message))
    for data in (b"", b"\xc1", b"\x91" * 5000, b"\x81\xa4type\xa3\xff\xff\xff"):
        front.send(data)
    front.send(msgspec.msgpack.encode(FlushCache(9)))
    received = []
    while FlushCache(9) not in received:
        received += channel.receive(5.0)
    assert FlushCache(4) in received and len(received) == 3, "unknown fields are ignored"
    reply = msgspec.msgpack.decode(front.recv(), type=FromEngine)
    assert (reply.uid, reply.field) == (3, "params.top_k") and not front.poll(0)  # type: ignore[union-attr]
    assert len(caplog.records) == 5 and all("refused a message" in record.getMessage() for record in caplog.records)
    channel.close()
    front.close()
    context.term()
