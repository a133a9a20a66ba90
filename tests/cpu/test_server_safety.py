"""The promises of SECURITY.md: real sockets against one real server with the bundled model."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.cpu.fakes import FakeFront, eventually, fake_app, serving
from tests.cpu.test_serve import Served
from thalweg.config.server import ServerOptions
from thalweg.core.errors import InvalidRequest, Overloaded
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.server import generate, structured_output
from thalweg.server.connection import bounded
from thalweg.server.generation import PromptJob
from thalweg.server.parsing import MAX_DEPTH
from thalweg.server.protocol import GenerateRequest
from thalweg.server.structured_output import GrammarChecker
from thalweg.text.tokenizer import Tokenizer

PATIENCE = 1.5  # seconds that the server waits for a client
SLOTS, QUEUE, CONTEXT = 4, 6, 4096
ROOT, FREE, ALICE, BOB, CAROL = "sk-root", "sk-free", "sk-alice", "sk-bob", "sk-carol"
KEYS = [
    {"name": "alice", "sha256": hashlib.sha256(ALICE.encode()).hexdigest(), "max_concurrency": 2},
    {"name": "bob", "key": BOB, "tokens_per_minute": 400},
    {"name": "carol", "key": CAROL, "private_cache": True},
]
LONG = {"prompt": "Once", "max_tokens": 3000, "stream": True, "ignore_eos": True}
SHORT = {"prompt": "Once", "max_tokens": 2}


class Target(Served):
    """keys: its keys file."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys.json"
        self.keys.write_text(json.dumps(KEYS))
        super().__init__(
            *("--api-key", FREE, "--api-keys-file", str(self.keys), "--admin-api-key", ROOT, "--log-requests"),
            *("--client-timeout", str(PATIENCE)),
            *("--max-running-requests", str(SLOTS), "--max-queued-requests", str(QUEUE)),
        )
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def post(self, path: str, body: Any, key: str = FREE, **headers: str) -> httpx.Response:
        head = {"Authorization": f"Bearer {key}", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=head, timeout=30)

    def get(self, path: str, key: str = FREE) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=30)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/server_info").json()["internal_states"][0]["stats"]
        return found

    def raw(self, data: bytes, wait: float = 10.0) -> tuple[bytes, bool]:
        """What the server answers to these bytes, and whether it has closed the connection within `wait` seconds."""
        with socket.create_connection(self.address, timeout=wait) as sock:
            answer = b""
            try:
                sock.sendall(data)
                while piece := sock.recv(1 << 16):
                    answer += piece
            except TimeoutError:
                return answer, False
            except OSError:  # reset: it closed while there was more to read
                pass
            return answer, True

    @contextmanager
    def streaming(self, body: dict[str, Any] = LONG, key: str = FREE) -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun."""
        head = {"Authorization": f"Bearer {key}"}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, headers=head, timeout=30) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            next(lines)
            yield lines

    def resident(self) -> int:
        """Bytes of the front's process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("safety"))
    yield target
    target.process.kill()
    target.process.wait()


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After whatever a test did, the server serves, and nothing of it is left."""
    yield
    if "server" in request.fixturenames:
        target: Target = request.getfixturevalue("server")
        eventually(
            lambda: target.stats()["running"] + target.stats()["waiting"] + target.stats()["pages_used"] == 0, 10
        )
        assert target.post("/v1/completions", SHORT).status_code == 200


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


# ---- HTTP: what a request is, is not open to interpretation ----

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-free\r\n"
JSON = json.dumps(SHORT).encode()
LENGTH = b"Content-Length: %d\r\n" % len(JSON)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
AMBIGUOUS = {
    "two lengths": LENGTH + b"Content-Length: 3\r\n\r\n",
    "the same length twice": LENGTH + LENGTH + b"\r\n",
    "a list of lengths": LENGTH[:-2] + b", 3\r\n\r\n",
    "length and chunks": LENGTH + CHUNKED + b"\r\n0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunked is not last": b"Transfer-Encoding: chunked, identity\r\n\r\n",
    "negative length": b"Content-Length: -3\r\n\r\n",
    "signed length": b"Content-Length: +3\r\n\r\n",
    "endless length": b"Content-Length: 99999999999999999999\r\n\r\n",
    "space before the colon": b"Content-Length : 3\r\n\r\n",
    "folded line": LENGTH + b"X-A: b\r\n c\r\n\r\n",
    "bare CR": LENGTH + b"X-A: b\rX-B: c\r\n\r\n",
    "NUL": LENGTH + b"X-A: b\0c\r\n\r\n",
    "chunk size that overflows": CHUNKED + b"\r\nffffffffffffffffff\r\n",
}


def test_ambiguous_request_framing_is_refused(server: Target) -> None:
    behind = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for name, rest in AMBIGUOUS.items():
        answer, closed = server.raw(HEAD + rest + JSON + behind)
        assert answer.startswith(b"HTTP/1.1 400 ") and closed and answer.count(b"connection: close") == 1, (
            name,
            answer,
        )


def test_headers_chunks_and_pipelines_are_bounded(server: Target) -> None:
    for flood, status in (
        (b"GET / HTTP/1.1\r\nX-A: " + b"a" * 500_000, b"431"),
        (b"GET /" + b"a" * 500_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 200 + b"\r\n", b"431"),
        (HEAD + CHUNKED + b"\r\n1;" + b"a" * 500_000, b"431"),
        (HEAD + CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"X-A: b\r\n" * 200, b"431"),
    ):
        answer, closed = server.raw(flood)
        assert closed and answer[9:12] in (status, b""), answer[:60]  # "": the reset overtook it
    answer, closed = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3000)
    assert closed and answer.count(b"HTTP/1.1") < 50


def test_a_trailer_is_no_header(server: Target) -> None:
    body = CHUNKED + b"Connection: close\r\n\r\n%x\r\n%s\r\n0\r\nX-Request-Id: trailed\r\n\r\n" % (len(JSON), JSON)
    answer, _ = server.raw(HEAD + body)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"trailed" not in answer


def test_no_path_leads_out_of_the_page(server: Target) -> None:
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/playground/..%2f..%2fgate.py",
        "/playground/../gate.py",
    ):
        ask = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {FREE}\r\nConnection: close\r\n\r\n"
        answer, _ = server.raw(ask.encode())
        assert answer.startswith(b"HTTP/1.1 404 "), answer


def test_compressed_bodies_are_not_unpacked(server: Target) -> None:
    answer = server.post("/v1/completions", b"\x1f\x8b\x08", **{"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "gzip" in error(answer)["message"]


# ---- slow clients ----


def test_a_slow_sender_is_cut_off_and_holds_no_concurrency(server: Target) -> None:
    half = HEAD.replace(b"sk-free", ALICE.encode()) + b'Content-Length: 100\r\n\r\n{"a"'
    slow = [b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost", *[half] * 6]
    with ThreadPoolExecutor(len(slow)) as pool:
        began = time.monotonic()
        tries = [pool.submit(lambda data: (server.raw(data), time.monotonic() - began), data) for data in slow]
        time.sleep(0.3)
        assert server.post("/v1/completions", SHORT, ALICE).status_code == 200, (
            "half a body has taken a place of its key"
        )
        for data, one in zip(slow, tries, strict=True):
            (answer, closed), took = one.result()
            assert closed and answer.startswith(b"HTTP/1.1 408 "), (data, answer)
            assert PATIENCE - 0.1 < took < PATIENCE + 3, (data, took)


def test_a_client_that_never_reads_has_a_bounded_buffer_and_is_cut_off(server: Target) -> None:
    body = json.dumps({**LONG, "max_tokens": 4000, "logprobs": 20, "return_token_ids": True}).encode()
    clients, before, aborted = 3, server.resident(), server.stats()["aborted"]
    with ExitStack() as stack:
        for _ in range(clients):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(server.address)
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: server.stats()["running"] == clients)
        most, deadline = 0, time.monotonic() + 20
        while (now := server.stats())["aborted"] < aborted + clients:
            assert time.monotonic() < deadline, f"they still run: {now}"
            most = max(most, server.resident())
            time.sleep(0.05)
    assert most - before < clients * (6 << 20), f"{(most - before) >> 20} MiB for {clients} who do not read"


def test_a_slow_reader_gets_the_whole_answer() -> None:
    """It takes several times the timeout, but 64 KiB of it within each."""
    options = ServerOptions(client_timeout=0.5)
    with serving(fake_app(FakeFront(), options), http=bounded(options)) as url:
        body = json.dumps({"prompt": "x" * 260_000}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
            sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            sock.settimeout(10)
            sock.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            sock.sendall(body)
            begin, answer = time.monotonic(), b""
            while piece := sock.recv(1 << 13):
                answer += piece
                time.sleep(0.01)
        assert time.monotonic() - begin > 2 * options.client_timeout, "the answer was too short for the test"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["count"] == 260_000


def test_connections_and_the_bytes_of_bodies_are_counted() -> None:
    options = ServerOptions(max_connections=20, max_body_bytes=1000)  # of all bodies 16 times that
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b" " * 990
    with serving(fake_app(FakeFront(), options), bounded(options)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ExitStack() as stack:
            for _ in range(16):
                stack.enter_context(socket.create_connection(address)).sendall(half)
            body = {**SHORT, "user": "x" * 400}
            eventually(lambda: httpx.post(url + "/v1/completions", json=body).status_code == 429)
            answer = httpx.post(url + "/v1/completions", json=body)
            assert error(answer)["code"] == "too_many_bytes" and "Retry-After" in answer.headers
            for _ in range(4):
                stack.enter_context(socket.create_connection(address))
            eventually(lambda: httpx.get(url + "/health").status_code == 503)
        eventually(lambda: httpx.post(url + "/v1/completions", json=body).status_code == 200)


# ---- bodies ----


def test_oversized_json_is_refused_cheaply(server: Target) -> None:
    nest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    for body, param in (
        (b'{"prompt": "x", "user": ' + nest + b"}", None),
        (b'{"prompt": "x", "user": [' + b"[]," * 1_100_000 + b"[]]}", None),
        (b'{"prompt": [' + b"1," * 4_300_000 + b"1]}", None),
        (b'{"prompt": ' + b"9" * 100_000 + b"}", "prompt"),
        (b'{"prompt": "x", "max_tokens": 1e999999}', "max_tokens"),
        (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"\\ud800": NaN, "prompt": "x"}', "\\ud800"),
        (b'{"prompt": "x", "prompt": 3}', "prompt"),
        (b'{"prompt": "x", "n": 1, "n": 129}', "n"),
        (b'{"prompt": "x", "stop": [' + b'"a",' * 100 + b'"a"]}', "stop"),
        (b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d": 1' % i for i in range(1025)) + b"}}", "logit_bias"),
        (b'{"prompt": [5,5,5,5,5], "prompt_logprobs": 64, "n": 1, "logprobs": 65}', "logprobs"),
        (b'{"prompt": "x", "guided_json": ' + b'{"items":' * 100 + b"{}" + b"}" * 100 + b"}", "guided_json"),
        (b'{"prompt": "x", "guided_regex": "' + b"(a?){9}" * 5000 + b'"}', "guided_regex"),
        (json.dumps({"prompt": [[5] * 4000] * 5, "prompt_logprobs": 64}).encode(), "prompt_logprobs"),
        (json.dumps({"model": "m" * 300_000, "prompt": "x"}).encode(), "model"),
    ):
        answer = server.post("/v1/completions", body)
        assert answer.status_code in (400, 404) and error(answer)["param"] == param, (body[:60], answer.text[:300])
        assert len(answer.content) < 3000, "an error does not give the body back"
    ok = b'{"prompt": "x", "max_tokens": 1, "user": ' + nest[1:-1] + b"}"
    assert server.post("/v1/completions", ok).status_code == 200
    many = {"messages": [{"role": "user", "content": "x"}] * 20_000}
    assert error(server.post("/v1/chat/completions", many))["param"] == "messages"


def test_a_text_far_beyond_the_context_is_refused_from_its_beginning(server: Target) -> None:
    text = "It was the best of times. " * 200_000
    for path, body, field in (
        ("/v1/completions", {"prompt": ["x", text]}, "prompt[1]"),
        ("/generate", {"text": text}, "text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/detokenize", {"tokens": [5] * 300_000}, "tokens"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and error(answer)["param"] == field, answer.text[:300]
    assert server.post("/tokenize", {"prompt": "word " * 20_000}).json()["count"] > CONTEXT, "counting may go further"


def test_how_far_a_long_text_is_read() -> None:
    tokenizer = Tokenizer(Path("models/tiny"))
    read: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, add_special: bool = True) -> list[int]:
        read.append(len(text))
        return encode(text, add_special)

    tokenizer.encode = counting  # type: ignore[method-assign]
    assert tokenizer.exceeds("a" * (31 * CONTEXT), CONTEXT) and not read, "no token has 31 bytes"
    assert tokenizer.exceeds("Call me Ishmael. " * 13_000, 3 * CONTEXT) and sum(read) == 8 * 3 * CONTEXT
    for words in (10, 2000, 4000, 8000, 16_000, 30_000):
        text = "over the hills " * words
        assert not tokenizer.exceeds(text, CONTEXT) or len(encode(text)) > CONTEXT


def test_a_prompt_that_fills_the_context_is_scored_if_nothing_is_to_follow(server: Target) -> None:
    for size, tokens, status in ((CONTEXT, 0, 200), (CONTEXT, 1, 400), (CONTEXT + 1, 0, 400), (CONTEXT - 1, 1, 200)):
        answer = server.post("/v1/completions", {"prompt": [5] * size, "max_tokens": tokens})
        assert answer.status_code == status, (size, tokens, answer.text[:200])


def test_many_prompts_are_queued_together_or_refused_together(server: Target) -> None:
    prompts = {"prompt": ["Once", "upon", "a", "time"], "max_tokens": 40, "ignore_eos": True}
    before = server.stats()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", prompts).status_code, range(8)))
    after = server.stats()
    assert set(answers) == {200, 429}, answers
    assert after["aborted"] == before["aborted"], "a refused request had begun"
    assert after["finished"] - before["finished"] == 4 * answers.count(200)
    answer = server.post("/v1/completions", {**prompts, "prompt": ["x"] * (SLOTS + QUEUE + 1)})
    assert answer.status_code == 400 and error(answer)["param"] == "n", "what never fits is told so"


# ---- what is written down ----


def test_client_values_create_no_metric_series(server: Target) -> None:
    def names() -> set[str]:
        return {
            line.rpartition(" ")[0] for line in server.get("/metrics").text.splitlines() if not line.startswith("#")
        }

    server.post("/v1/completions", {"model": "m", **SHORT})
    server.get("/nowhere")
    before = names()
    for i in range(20):
        server.post("/v1/completions", {"model": f'm{i}"}}\n', **SHORT}, **{"X-Request-Id": f"id{i}"})
        server.get(f"/nowhere/{i}%0athalweg_up%200")
    assert names() == before


def test_request_ids_are_plain(server: Target) -> None:
    for bad in (b"a b", b"a\tb", b'a"b', b"a" * 129, b"a\xc3\xa4", b"a%0d%0aSet-Cookie:x"):
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + bad + b"\r\nConnection: close\r\n\r\n"
        answer, _ = server.raw(ask)
        assert answer.startswith(b"HTTP/1.1 200 ") and bad not in answer
    assert (
        server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a.b-c/1\r\nConnection: close\r\n\r\n")[0].count(
            b"a.b-c/1"
        )
        == 1
    )


# ---- browsers ----


def test_other_origins_may_not_send(server: Target) -> None:
    foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    answer = server.post("/v1/completions", SHORT, **foreign)
    assert answer.status_code == 403 and error(answer)["code"] == "cross_site"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = httpx.options(server.url + "/v1/completions", headers={**foreign, "Access-Control-Request-Method": "POST"})
    assert asked.status_code >= 400 and not [name for name in asked.headers if name.startswith("access-control")]
    assert server.post("/v1/completions", SHORT, **{"Sec-Fetch-Site": "same-origin"}).status_code == 200
    for origin in ("http://evil.example", "null", server.url + ".evil.example", server.url.replace(":", ":1", 2)):
        answer = server.post("/v1/completions", SHORT, Origin=origin)  # over plain http there is no Sec-Fetch-Site
        assert answer.status_code == 403 and error(answer)["code"] == "cross_site", origin
    assert server.post("/v1/completions", SHORT, Origin=server.url).status_code == 200
    behind_tls = {"Origin": "https://Models.example", "Host": "models.example"}
    assert server.post("/v1/completions", SHORT, **behind_tls).status_code == 200
    policy = httpx.get(server.url + "/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    with serving(fake_app(FakeFront(), ServerOptions(cors_origins=("https://evil.example",)))) as url:
        assert httpx.post(url + "/v1/completions", json=SHORT, headers=foreign).status_code == 200


# ---- without the server ----


def test_a_killed_server_leaves_no_files() -> None:
    """The socket's folder is gone once the engine serves, and the connection goes on."""
    from tests.cpu import test_client as client

    async def test() -> None:
        async with client.serving() as front:
            assert not Path(front._folder).exists()
            assert await client.collect(front, [20, 21], client.GREEDY)

    client.run(test)


def test_grammars_that_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    go = threading.Event()
    seen: list[str] = []

    def verdict(grammar: Grammar) -> tuple[str, ...]:
        seen.append(grammar.source)
        go.wait(10)
        if grammar.source == "0":
            raise InvalidRequest("grammar", "is wrong")
        return ()

    monkeypatch.setattr(structured_output, "check", verdict)

    async def crowd() -> None:
        desk = GrammarChecker()
        tasks = [
            asyncio.create_task(desk.check(Grammar("regex", str(i % structured_output.WAITING))))
            for i in range(2 * structured_output.WAITING)
        ]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded):
            await desk.check(Grammar("regex", "one more"))
        tasks[3].cancel()  # others wait for the same
        go.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done if one != ()] == [
            InvalidRequest,
            asyncio.CancelledError,
            InvalidRequest,
        ]
        with pytest.raises(InvalidRequest):
            await desk.check(Grammar("regex", "0"))

    asyncio.run(crowd())
    assert len(seen) == structured_output.WAITING, "each is looked at once"


def test_a_long_native_stream_does_not_grow_as_the_square_of_its_length() -> None:
    class Piece:
        text, ids, finish, stop, logprobs, prompt_logprobs, drafted = " a", (5,), None, None, (), (), None
        prompt_tokens = cached_tokens = completion_tokens = 1

    prompt = PromptJob("text", [5], None, SamplingParams(), "r", NO_GRAMMAR)
    job: Any = SimpleNamespace(accounting=SimpleNamespace(began=0.0), warnings=())
    encoder: Any = generate.GenerateChoiceEncoder(FakeFront().tokenizer, GenerateRequest(text="x"), prompt, job, 1)
    entries = events = 0
    for _ in range(50_000):
        encoder.add(Piece)
        if encoder.is_due(Piece):
            events += 1
            entries += len(encoder.event(Piece).output_ids)
    assert generate.SHORT < events < generate.SHORT + 1000
    assert entries < 30_000_000, "an event a token would make 1,250,000,000"
