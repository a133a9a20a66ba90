"""What the Responses and Anthropic APIs share: any split of the text, disconnects, aborts, concurrency limits."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.cpu.fakes import FakeFront, eventually, fake_app, serving
from tests.cpu.test_server_anthropic import CALLS
from thalweg.config.server import ServerOptions

SAID = "A thought, 世界.</think>" + CALLS
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}}
TALK = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "messages": TALK,
        "max_tokens": 2000,
        "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}],
        "thinking": {"type": "enabled"},
    },
    "/v1/responses": {"input": TALK, "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "high"}},
}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def added_up(route: str, stream: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(kind, text) of each part, by the deltas alone."""
    parts: list[list[str]] = []
    for event in stream:
        kind = event["type"]
        if kind in ("content_block_start", "response.output_item.added"):
            parts.append([(event.get("content_block") or event.get("item"))["type"], ""])
        elif route == "/v1/messages" and kind == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            parts[event["index"]][1] += text
        elif kind.endswith(".delta"):
            parts[event["output_index"]][1] += event["delta"]
    return [(kind, text) for kind, text in parts]


@pytest.mark.parametrize("route", BODIES)
def test_any_cut_gives_the_same_parts(route: str) -> None:
    found = []
    for chunk in (1, 2, 7, 50, 4096):
        with serving(fake_app(FakeFront(lambda prompt, choice: SAID, chunk=chunk))) as url:
            text = httpx.post(url + route, json=BODIES[route] | {"stream": True}).text
        found.append(added_up(route, events(text)))
    assert all(parts == found[0] for parts in found)
    (_, thought), (_, content), (_, first), (_, second) = found[0]
    assert (thought, content) == ("A thought, 世界.", "I will look.")
    assert (json.loads(first), json.loads(second)) == ({"place": "Köln", "days": 2}, {"place": "Ulm"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_client_that_leaves_ends_its_request(route: str, stream: bool) -> None:
    front = FakeFront(gap=0.05)
    with serving(fake_app(front)) as url:
        if stream:
            with httpx.stream("POST", url + route, json=BODIES[route] | {"stream": True}) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + route, json=BODIES[route], timeout=0.3)
        eventually(lambda: not front.live and front.ended == ["closed"])


@pytest.mark.parametrize("route", BODIES)
def test_an_abort_ends_the_answer_with_what_it_has(route: str) -> None:
    front = FakeFront(gap=0.02)
    with serving(fake_app(front)) as url:
        asked = {"json": BODIES[route] | {"stream": True}, "headers": {"X-Request-Id": "mine"}}
        with httpx.stream("POST", url + route, **asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            id = "msg_mine" if route == "/v1/messages" else "mine"
            assert httpx.post(url + "/abort", json={"rid": id}).json() == {"aborted": 1}
            last = events("\n".join(lines))
    if route == "/v1/messages":
        assert last[-1]["type"] == "message_stop" and last[-2]["delta"]["stop_reason"] == "end_turn"
    else:
        assert last[-1]["type"] == "response.incomplete" and last[-1]["response"]["status"] == "cancelled"


@pytest.mark.parametrize("route", BODIES)
def test_typed_requests_count_against_the_limits(route: str) -> None:
    front = FakeFront(gap=0.05)
    with serving(fake_app(front, ServerOptions(max_concurrent_requests=1))) as url:
        with httpx.stream("POST", url + route, json=BODIES[route] | {"stream": True}) as first:
            lines = first.iter_lines()  # held: dropped, it would close the stream
            next(lines)
            second = httpx.post(url + route, json=BODIES[route])
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert f'route="{route}"' in httpx.get(url + "/metrics").text
