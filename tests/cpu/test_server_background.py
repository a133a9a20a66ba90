"""Background responses through the official OpenAI SDK, with a scripted model behind them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.cpu.fakes import FakeFront, eventually, fake_app, serving
from thalweg.config.server import ServerOptions

TEXT = "Rivers flow to the sea."
DONE = ("completed", "failed", "cancelled", "incomplete")


class Server:
    """One server; each test sets the pace of its model anew."""

    def __init__(self, **options: Any) -> None:
        self.front = FakeFront(lambda prompt, choice: f"It is so.</think>{TEXT}" if "<think>" in prompt else TEXT)
        self.app = fake_app(self.front, ServerOptions(**options))

    def client(self, url: str, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[openai.OpenAI, FakeFront]]:
    made = Server()
    with serving(made.app) as url, made.client(url) as client:
        yield client, made.front


def start(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(model="scripted", input="Say something.", background=True, **more)


def poll(client: openai.OpenAI, id: str, until: Callable[[Any], bool] = lambda r: r.status in DONE) -> Any:
    seen: list[Any] = []

    def is_there() -> bool:
        seen[:] = [client.responses.retrieve(id)]
        return until(seen[0])

    eventually(is_there)
    return seen[0]


def test_a_response_is_polled(server: tuple[openai.OpenAI, FakeFront]) -> None:
    client, front = server
    front.gap = 0.2
    first = start(client, metadata={"a": "b"})
    assert first.status == "queued" and first.background is True and not first.output and first.usage is None
    assert poll(client, first.id, lambda r: r.status != "queued").status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still runs"):
        start(client, previous_response_id=first.id)
    front.gap = 0.0
    last = poll(client, first.id)
    assert (last.status, last.output_text, last.metadata, last.id) == ("completed", TEXT, {"a": "b"}, first.id)
    assert last.usage.output_tokens == len(TEXT) + 1 and last.completed_at >= last.created_at
    assert client.responses.cancel(first.id).status == "completed", "what has ended stays"
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == ["Say something."]
    assert poll(client, start(client, previous_response_id=first.id).id).output_text == TEXT
    assert poll(client, start(client, max_output_tokens=3).id).status == "incomplete"


def test_cancel_ends_it_with_what_is_there(server: tuple[openai.OpenAI, FakeFront]) -> None:
    client, front = server
    front.gap = 0.1
    for tokens in (0, 4):
        steps = front.stats.steps + tokens
        first = start(client)
        eventually(lambda least=steps: bool(front.live) and front.stats.steps >= least)
        last = client.responses.cancel(first.id)
        assert last.status == "cancelled" and not front.live and len(last.output_text) < len(TEXT)
        assert TEXT.startswith(last.output_text) and all(item.status == "incomplete" for item in last.output)
        assert client.responses.cancel(first.id) == client.responses.retrieve(first.id) == last
    front.gap = 0.0
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="scripted", input="x").id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_0")


def test_delete_ends_it(server: tuple[openai.OpenAI, FakeFront]) -> None:
    client, front = server
    front.gap = 0.3
    first = start(client)
    eventually(lambda: bool(front.live))
    client.responses.delete(first.id)
    assert not front.live
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    front.gap = 0.0


def test_a_stream_is_taken_up_again_and_outlives_its_client(server: tuple[openai.OpenAI, FakeFront]) -> None:
    client, front = server
    front.gap = 0.1
    more = {"reasoning": {"effort": "high"}, "stream": True}
    begun: list[Any] = []
    with start(client, **more) as stream:
        for event in stream:
            begun.append(event)
            if len(begun) == 9:
                break
    assert [event.type for event in begun[:3]] == ["response.created", "response.queued", "response.in_progress"]
    id = begun[0].response.id
    assert begun[0].response.status == "queued" and front.live
    front.gap = 0.0
    rest = list(client.responses.retrieve(id, stream=True, starting_after=begun[-1].sequence_number))
    assert [event.sequence_number for event in [*begun, *rest]] == list(range(len(begun) + len(rest)))
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == TEXT
    again = list(client.responses.retrieve(id, stream=True))
    assert again == [*begun, *rest], "also when it has ended"
    with client.responses.stream(response_id=id) as helper:
        assert helper.get_final_response().output_text == TEXT
    assert not list(client.responses.retrieve(id, stream=True, starting_after=10_000))
    for plain in (start(client), client.responses.create(model="scripted", input="x")):
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.retrieve(plain.id, stream=True)
        assert bad.value.param == "stream"
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(id, stream=True, starting_after=-2)


def test_followers_see_a_cancel(server: tuple[openai.OpenAI, FakeFront]) -> None:
    client, front = server
    front.gap = 0.1
    events = []
    for event in start(client, stream=True):
        events.append(event)
        if event.type == "response.output_text.delta" and len(events) < 8:
            client.responses.cancel(events[0].response.id)
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled"
    front.gap = 0.0


def test_engine_death_fails_it() -> None:
    made = Server()
    made.front.gap = 0.3
    with serving(made.app) as url, made.client(url) as client:
        first = start(client)
        eventually(lambda: bool(made.front.live))
        made.front.die("the engine process ended with exit code -9")
        last = poll(client, first.id)
        assert last.status == "failed" and "exit code -9" in last.error.message
        made.front.state, made.front.ready = "ready", FakeFront().ready
        with pytest.raises(openai.BadRequestError, match="has failed"):
            start(client, previous_response_id=first.id)


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The access log of responses that were generated."""
    values = [getattr(record, "fields", {}) for record in caplog.records if record.message == "request"]
    return [entry for entry in values if entry["path"] == "/v1/responses" and "output_tokens" in entry]


def test_it_counts_for_its_key_until_it_ends(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    keys = tmp_path / "keys.json"
    alice = {"name": "alice", "key": "a", "max_concurrency": 1, "tokens_per_minute": 400}
    keys.write_text(json.dumps([alice, {"name": "bob", "key": "b"}]))
    made = Server(api_keys_file=str(keys), log_requests=True)
    made.front.gap = 0.3
    caplog.set_level(logging.INFO, "thalweg.requests")
    with serving(made.app) as url, made.client(url, "a") as alice_client, made.client(url, "b") as bob:
        first = start(alice_client, max_output_tokens=50)
        with pytest.raises(openai.RateLimitError, match="of this key run"):
            start(alice_client)
        for act in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                act(first.id)
        assert made.front.live
        assert not logged(caplog), "the request goes on"
        made.front.gap = 0.0
        poll(alice_client, first.id)
        eventually(lambda: bool(logged(caplog)))
        ((values),) = logged(caplog)
        assert (values["output_tokens"], values["status"], values["key"]) == (len(TEXT) + 1, 200, "alice")
        assert poll(alice_client, start(alice_client, max_output_tokens=50).id).status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_that_run_keep_their_place(stream: bool) -> None:
    made = Server(max_stored_responses=2)
    made.front.gap = 0.3
    with serving(made.app) as url, made.client(url) as client:
        ids = []
        for _ in range(2):
            first = start(client, stream=stream)
            ids.append(next(iter(first)).response.id if stream else first.id)
        with pytest.raises(openai.RateLimitError) as full:
            start(client)
        assert full.value.code == "stored_responses_full"
        client.responses.create(model="scripted", input="x", max_output_tokens=1)  # is answered and not stored
        made.front.gap = 0.0
        assert all(poll(client, id).status == "completed" for id in ids)
        assert poll(client, start(client).id).status == "completed"
    with serving(Server(max_stored_responses=0).app) as url, made.client(url) as client:
        with pytest.raises(openai.BadRequestError, match="--max-stored-responses"):
            start(client)


def test_events_that_outgrow_the_store_fail_the_response() -> None:
    made = Server(max_stored_response_bytes=80_000)
    made.front.script = lambda prompt, choice: "x" * 2000
    with serving(made.app) as url, made.client(url) as client:
        events = list(start(client, stream=True))
        assert events[-1].type == "response.failed" and "no room" in events[-1].response.error.message
        assert len(events) < 1000 and not made.front.live
        client.responses.create(model="scripted", input="x")


def test_shutdown_fails_what_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Also where nobody follows: its request is logged and its quota closed."""
    made = Server(log_requests=True)
    made.front.gap = 0.3
    caplog.set_level(logging.INFO, "thalweg.requests")
    with serving(made.app) as url, made.client(url) as client:
        start(client)
        eventually(lambda: bool(made.front.live))
    ((values),) = logged(caplog)
    assert values["error"] == "service_unavailable_error" and not made.front.live and made.front.ended == ["closed"]
