"""The native route, raw bodies, authentication, aborts, disconnects and health: what the SDK tests do not cover."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.cpu.fakes import CONTEXT, EOS, FakeFront, Piece, Script, eventually, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead, InvalidRequest, NumericalError, UnsupportedConfig
from thalweg.core.grammar import Grammar
from thalweg.server.structured_output import GrammarChecker, grammar_of

ADMIN = {"Authorization": "Bearer root"}


@contextmanager
def talk(
    front: FakeFront | None = None, headers: dict[str, str] | None = None, **options: Any
) -> Iterator[httpx.Client]:
    with serving(fake_app(front or FakeFront(), ServerOptions(**options))) as url:
        with httpx.Client(base_url=url, headers=headers, timeout=10) as client:
            yield client


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with talk() as client:
        yield client


def slow(gap: float = 0.02, script: Script = lambda prompt, choice: "word " * 400) -> FakeFront:
    return FakeFront(script, gap=gap)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---- bodies ----

BROKEN = [
    (b"", "prompt"),
    (b"not json", ""),
    (b"[1]", ""),
    (b'{"prompt": "x"', ""),
    (b'{"prompt": "\xff"}', ""),
    (b"[" * 100_000, ""),
    (b'{"prompt": "x", "user": ' + b"[" * 100_000, ""),
    (b"{}", "prompt"),
    (b'{"prompt": null}', "prompt"),
    (b'{"prompt": {"a": 1}}', "prompt"),
    (b'{"prompt": []}', "prompt"),
    (b'{"prompt": [[]]}', "prompt"),
    (b'{"prompt": ""}', "prompt"),
    (b'{"prompt": ["a", 1]}', "prompt[1]"),
    (b'{"prompt": [1, 2.5]}', "prompt[1]"),
    (b'{"prompt": [[1], [1, true]]}', "prompt[1][1]"),
    (b'{"prompt": [-1]}', "prompt"),
    (b'{"prompt": [[1], [99999999999999999999]]}', "prompt[1]"),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": -Infinity}', "temperature"),
    (b'{"prompt": "x", "top_p": 1e999}', "top_p"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    (b'{"prompt": "x", "logit_bias": {"five": 1}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"5": 101}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"99999": 1}}', "logit_bias"),
    (b'{"prompt": "x", "max_tokens": "many"}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    (b'{"prompt": "x", "min_tokens": 99}', "min_tokens"),
    (b'{"prompt": "x", "stream": "yes"}', "stream"),
    (b'{"prompt": "x", "stream_options": {"include_usage": 3}}', "stream_options.include_usage"),
    (b'{"prompt": "x", "stop": [1]}', "stop[0]"),
    (b'{"prompt": "x", "stop": [""]}', "stop"),
    (b'{"prompt": "x", "stop_token_ids": [-3]}', "stop_token_ids"),
    (b'{"prompt": "x", "logprobs": 1000}', "logprobs"),
    (b'{"prompt": "x", "n": 1000}', "n"),
    (b'{"prompt": "x", "seed": 1e40}', "seed"),
    (b'{"prompt": "x", "top_k": 9223372036854775808}', "top_k"),
    (b'{"prompt": "x", "max_tokens": 99999999999999999999}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": null, "min_tokens": 9223372036854775808}', "min_tokens"),
    (b'{"prompt": "x", "stop": "' + b"a" * 5000 + b'"}', "stop"),
    (b'{"prompt": [' + b"[1]," * 20_000 + b"[1]]}", "prompt"),
    (b'{"prompt": [' + b"[1]," * 200 + b'[1]], "n": 100}', "n"),
    (b'{"prompt": "x", "seed": 99999999999999999999}', "seed"),
    (b'{"prompt": "x", "priority": 99999999999}', "priority"),
    (b'{"prompt": "x", "rid": "a b\\n"}', "rid"),
    (b'{"prompt": [1], "suffix": "y"}', "suffix"),
    (b'{"prompt": "x", "guided_json": {"type": "objec"}}', "guided_json"),
]


@pytest.mark.parametrize(("body", "param"), BROKEN, ids=range(len(BROKEN)))
def test_a_wrong_body_is_a_400_that_names_the_field(api: httpx.Client, body: bytes, param: str) -> None:
    answer = api.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["param"] or "") == param and error["type"] == "invalid_request_error" and error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_prompt_beyond_the_context_is_refused(api: httpx.Client) -> None:
    error = api.post("/v1/completions", json={"prompt": "x" * CONTEXT}).json()["error"]
    assert error["param"] == "prompt" and str(CONTEXT) in error["message"]
    long = {"messages": [{"role": "user", "content": "x" * 20_000}]}
    assert api.post("/v1/chat/completions", json=long).json()["error"]["param"] == "messages"
    native = {"input_ids": [[1], [5] * CONTEXT]}
    assert api.post("/generate", json=native).json()["error"]["param"] == "input_ids[1]"


def test_an_output_that_the_context_has_no_room_for_is_refused(api: httpx.Client) -> None:
    """But not where the length is our own default, and not in the native API."""
    messages = {"messages": [{"role": "user", "content": "x"}]}
    for path, field, body in (
        ("/v1/completions", "max_tokens", {"prompt": "x" * 9}),
        ("/v1/completions", "max_tokens", {"prompt": [[1], [2] * 9]}),
        ("/v1/chat/completions", "max_tokens", messages),
        ("/v1/chat/completions", "max_completion_tokens", messages),
        ("/v1/responses", "max_output_tokens", {"input": "x"}),
    ):
        answer = api.post(path, json=body | {field: CONTEXT - 5})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field) and str(CONTEXT) in error["message"], path
        assert api.post(path, json=body | {field: 20}).status_code == 200
    assert api.post("/v1/completions", json={"prompt": "x" * (CONTEXT - 5)}).status_code == 200
    native = {"text": "x" * 9, "sampling_params": {"max_new_tokens": CONTEXT}}
    assert api.post("/generate", json=native).status_code == 200


def test_an_empty_prompt_is_the_token_that_the_tokenizer_adds() -> None:
    front = FakeFront()
    front.tokenizer.encode = lambda text, add_special=True: [1] * add_special + [*text.encode()]  # type: ignore[method-assign]
    with talk(front) as api:
        body = {"prompt": ["x", ""], "return_token_ids": True}
        choices = api.post("/v1/completions", json=body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[1, *b"x"], [1]]
        refused = api.post("/v1/completions", json=body | {"add_special_tokens": False}).json()
        assert refused["error"]["param"] == "prompt[1]"
        assert api.post("/generate", json={"text": ""}).json()["meta_info"]["prompt_tokens"] == 1
        assert api.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [1]


def test_unknown_routes_and_methods(api: httpx.Client) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/generate", 405), ("POST", "/health", 405)):
        answer = api.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_an_internal_error_leaks_no_details() -> None:
    def broken(prompt: str, choice: int) -> str:
        raise RuntimeError("secret detail")

    with talk(FakeFront(broken)) as api:
        answer = api.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text and answer.headers["X-Request-Id"] == "mine"


def test_parameters_reach_the_front() -> None:
    front = FakeFront()
    with talk(front) as api:
        body = {"prompt": [5, 6], "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "n": 2}
        body |= {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1, "min_tokens": 2}
        body |= {"logit_bias": {"5": -100}, "stop": "x", "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 4}
        body |= {"priority": 5, "cache_salt": "tenant", "rid": "r1", "skip_special_tokens": False, "prompt_logprobs": 2}
        api.post("/v1/completions", json=body).raise_for_status()
        api.post("/v1/completions", json={"prompt": [5], "cache_salt": None}).raise_for_status()
        native = {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 8, "no_stop_trim": True, "stop": ["q"]}
        api.post("/generate", json={"text": "x", "sampling_params": native, "extra_key": "tenant"}).raise_for_status()
    prompt, params, rid, priority, salt = front.seen[0]
    assert (prompt, rid, priority) == ([5, 6], "r1", 5)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.n) == (
        0.5,
        0.9,
        7,
        0.1,
        -3,
        2,
    )
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == (((5, -100.0),), ("x",), (9,))
    assert (params.min_tokens, params.max_tokens, params.ignore_eos, params.prompt_logprobs) == (2, 4, True, 2)
    assert params.skip_special_tokens is False
    assert salt > 0 and front.seen[1][4] == 0 and front.seen[2][4] == salt
    params = front.seen[2][1]
    assert (params.max_tokens, params.min_tokens, params.seed, params.include_stop_str_in_output, params.stop) == (
        4,
        1,
        8,
        True,
        ("q",),
    )
    assert front.seen[1][1].max_tokens == 16


def test_prompt_logprobs_and_token_ids(api: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    choice = api.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None and list(choice["prompt_logprobs"][1]) == ["98"]
    assert choice["prompt_logprobs"][2]["99"]["decoded_token"] == "c"
    assert choice["prompt_token_ids"] == [97, 98, 99] and choice["token_ids"] == list(b"An")
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    answer = api.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == list(b"An")
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    chunks = events(api.post("/v1/chat/completions", json=body | {"stream": True}))
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"] and "prompt_logprobs" not in chunks[1]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == list(b"An")


def test_prompt_logprobs_come_with_a_first_token_that_has_no_text() -> None:
    with talk(FakeFront(lambda prompt, choice: "世界")) as api:
        body = {"prompt": "abc", "prompt_logprobs": 1, "stream": True}
        chunks = events(api.post("/v1/completions", json=body))
    found = [chunk["choices"][0]["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk["choices"][0]]
    assert len(found) == 1 and len(found[0]) == 3


def test_partial_characters_are_distinct_in_logprobs() -> None:
    with talk(FakeFront(lambda prompt, choice: "é世")) as api:
        body = {"prompt": "x", "max_tokens": 9, "logprobs": 0}
        choice = api.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == "é世"
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[t] for t in choice["logprobs"]["tokens"]]
        assert choice["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe4"]
        assert choice["logprobs"]["text_offset"][:5] == [0, 0, 1, 1, 1]
        whole = [
            chunk["choices"][0]["text"] for chunk in events(api.post("/v1/completions", json=body | {"stream": True}))
        ]
        assert "".join(whole) == "é世"


# ---- native ----


def test_generate_one(api: httpx.Client) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "rid": "my-id"}
    answer = api.post("/generate", json=body).json()
    assert answer["text"] == "Ans" and answer["output_ids"] == list(b"Ans")
    meta = answer["meta_info"]
    assert (
        meta["id"] == "my-id" and meta["finish_reason"] == {"type": "length", "length": 3} and meta["e2e_latency"] >= 0
    )
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 0)
    end = api.post("/generate", json={"input_ids": [104, 105]}).json()["meta_info"]["finish_reason"]
    assert end == {"type": "stop", "matched": EOS}
    body = {"text": "hi", "sampling_params": {"stop": ["wer"]}}
    assert api.post("/generate", json=body).json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wer"}


@pytest.mark.parametrize("is_shared", [True, False])
def test_generate_reads_the_grammar_of_many_prompts_once(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    calls = []

    def read(*args: Any, **kwargs: Any) -> Grammar:
        calls.append("read")
        return grammar_of(*args, **kwargs)

    async def check(checker: GrammarChecker, grammar: Grammar) -> tuple[str, ...]:
        calls.append("check")
        return ()

    monkeypatch.setattr("thalweg.server.generate.grammar_of", read)
    monkeypatch.setattr(GrammarChecker, "check", check)
    structure = {"json_schema": {"enum": ["aye"]}}
    body = structure if is_shared else {"sampling_params": structure}
    api.post("/generate", json={"text": ["x"] * 50, **body}).raise_for_status()
    assert calls == ["read", "read", "check"]


def test_generate_streams_the_whole_text_so_far(api: httpx.Client) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 4}, "stream": True}
    with api.stream("POST", "/generate", json=body) as response:
        got = events(response)
    assert [event["text"] for event in got] == ["A", "An", "Ans", "Answ"]
    assert [event["meta_info"]["completion_tokens"] for event in got] == [1, 2, 3, 4]
    assert got[-1]["output_ids"] == list(b"Answ") and got[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert got[0]["meta_info"]["finish_reason"] is None


def test_generate_batches(api: httpx.Client) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}]
    body = {"text": ["a", "bb"], "sampling_params": params, "rid": ["x", "y"]}
    answers = api.post("/generate", json=body).json()
    assert [len(a["output_ids"]) for a in answers] == [1, 2, 2] and [a["meta_info"]["id"] for a in answers] == [
        "x",
        "y",
        "y",
    ]
    answers = api.post("/generate", json={"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 2}}).json()
    assert [len(a["output_ids"]) for a in answers] == [2, 2]
    assert isinstance(api.post("/generate", json={"text": ["a"]}).json(), list)
    streamed = events(api.post("/generate", json={**body, "stream": True}))
    assert {event["index"] for event in streamed} == {0, 1, 2}


def test_generate_logprobs(api: httpx.Client) -> None:
    body: dict[str, Any] = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = api.post("/generate", json=body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [] and [entry[1] for entry in meta["output_token_logprobs"]] == list(b"An")
    body |= {"logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = api.post("/generate", json=body).json()["meta_info"]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[98, "b"], [99, "c"]]
    assert [len(tops) for tops in meta["output_top_logprobs"]] == [2, 2] and len(meta["input_top_logprobs"]) == 2
    body["logprob_start_len"] = 0
    meta = api.post("/generate", json=body).json()["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 97, "a"] and meta["input_top_logprobs"][0] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ["x", ""]}, "text[1]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids[1]"),
        ({"input_ids": [999999]}, "input_ids"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": "a"}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"regex": "a("}}, "sampling_params.regex"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": "x", "image_data": ["cat"]}, "image_data"),
        ({"text": "x", "lora_path": "mine"}, "lora_path"),
    ],
    ids=str,
)
def test_generate_refuses_by_name(api: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = api.post("/generate", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


# ---- tokens ----


def test_tokenize_and_back(api: httpx.Client) -> None:
    text = "Grüße"
    tokens = api.post("/tokenize", json={"prompt": text}).json()
    assert tokens == {"tokens": list(text.encode()), "count": 7, "max_model_len": CONTEXT}
    assert api.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["text"] == text
    assert api.post("/tokenize", json={"prompt": ["a", "bc"]}).json()["count"] == [1, 2]
    chat = api.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert bytes(chat).decode().endswith("<｜User｜>hi<｜Assistant｜></think>")
    for body, param in (({}, "prompt"), ({"prompt": "x", "messages": []}, "prompt"), ({"messages": []}, "messages")):
        assert api.post("/tokenize", json=body).json()["error"]["param"] == param
    assert api.post("/detokenize", json={"tokens": [1, -1]}).json()["error"]["param"] == "tokens[1]"


def test_a_long_text_is_tokenized_on_a_thread() -> None:
    front, threads = FakeFront(), []
    encode = front.tokenizer.encode

    def seen(text: str, add_special: bool = True) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, add_special)

    front.tokenizer.encode = seen  # type: ignore[method-assign]
    with talk(front) as api:
        api.post("/tokenize", json={"prompt": "x"})
        api.post("/tokenize", json={"prompt": "x" * 100_000})
    assert len(set(threads)) == 2


# ---- the gate ----


def test_keys() -> None:
    with talk(api_key=("alpha", "beta")) as api:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "alpha"},
            {"Authorization": "Basic alpha"},
        ):
            answer = api.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert api.post("/v1/completions", content=b"nonsense").status_code == 401
        for key in ("alpha", "beta"):
            assert api.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/", "/playground.js", "/playground.css"):
            assert api.get(path).status_code == 200, path
        assert api.get("/server_info").status_code == 401
    with talk(api_key=("alpha",), open_probes=False) as api:
        assert api.get("/health").status_code == 401


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"api_key": ("",)}, {"api_key": ("schlüssel",)}, {"max_body_bytes": 0}, {"log_level": "loud"}):
        with pytest.raises(UnsupportedConfig, match=next(iter(wrong))):
            ServerOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedConfig, match="request_id_header"):
        ServerOptions(request_id_header="X-Id\r\nSet-Cookie: a")


def test_a_body_beyond_the_limit_is_a_413() -> None:
    def trickle() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}'

    with talk(max_body_bytes=5000) as api:
        assert api.post("/v1/completions", json={"prompt": "x" * 1000}).status_code == 200
        for content in (b"x" * 6000, trickle()):
            answer = api.post("/v1/completions", content=content)
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


def test_too_many_requests_are_a_429() -> None:
    front = slow()
    with talk(front, max_concurrent_requests=2, retry_after=7) as api, httpx.Client(base_url=api.base_url) as other:
        body = {"prompt": "x", "max_tokens": 1000, "stream": True}
        with (
            other.stream("POST", "/v1/completions", json=body),
            other.stream("POST", "/generate", json={"text": "x", "stream": True}),
        ):
            eventually(lambda: front.running == 2)
            answer = api.post("/v1/completions", json=body)
            assert answer.status_code == 429 and answer.headers["Retry-After"] == "7"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert api.post("/tokenize", json={"prompt": "x"}).status_code == 429  # long texts are work, too
            assert api.get("/health").status_code == 200
        eventually(lambda: front.running == 0)
        assert api.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        front.full = True
        answer = api.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.status_code == 429 and "queue is full" in answer.json()["error"]["message"]


def test_request_ids() -> None:
    front = FakeFront()
    with talk(front) as api:
        answer = api.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc-1"})
        assert answer.headers["X-Request-Id"] == "abc-1" and answer.json()["id"] == "cmpl-abc-1"
        assert front.seen[-1][2] == "abc-1"
        ids = {api.get("/health").headers["X-Request-Id"] for _ in range(3)}
        assert len(ids) == 3
        for evil in ("a b", "x" * 500, "<script>", "%0d%0aX: y"):
            assert api.get("/health", headers={"X-Request-Id": evil}).headers["X-Request-Id"] != evil
        stream = api.post("/v1/completions", json={"prompt": "x", "stream": True}, headers={"X-Request-Id": "s"})
        assert stream.headers["X-Request-Id"] == "s" and stream.headers["Content-Type"].startswith("text/event-stream")
        assert api.get("/nowhere", headers={"X-Request-Id": "n"}).headers["X-Request-Id"] == "n"
    with talk(request_id_header="X-Trace") as api:
        assert api.get("/health", headers={"X-Trace": "t"}).headers["X-Trace"] == "t"


def test_cors() -> None:
    ask = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with talk(cors_origins=("https://a.example",), api_key=("k",)) as api:
        assert api.options("/v1/completions", headers=ask).headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert (
            "Access-Control-Allow-Origin"
            not in api.options("/v1/completions", headers=ask | {"Origin": "https://b.example"}).headers
        )
        answer = api.get("/v1/models", headers={"Origin": "https://a.example"})
        assert answer.status_code == 401 and answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    with talk() as api:
        assert "Access-Control-Allow-Origin" not in api.get("/health", headers={"Origin": "https://a.example"}).headers


# ---- ends ----


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_goes_away_frees_its_pages(path: str, stream: bool) -> None:
    front = slow()
    with talk(front) as api:
        words = {"prompt": ["x", "y"], "messages": [{"role": "user", "content": "x"}], "text": ["x", "y"]}
        name = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/generate": "text"}[path]
        body = {name: words[name], "stream": stream, "n": 2, "max_tokens": 4000}
        with pytest.raises(httpx.ReadTimeout) if not stream else contextmanager(lambda: iter([None]))():
            with api.stream("POST", path, json=body, timeout=0.3) as response:
                assert front.pages > 0 and front.running > 0
                next(response.iter_bytes())
        eventually(lambda: front.running == 0)
        assert front.pages == 0 and set(front.ended) == {"closed"}
        assert 'thalweg_disconnects_total{model_name="scripted"} 1' in api.get("/metrics").text


def test_a_client_that_goes_away_before_the_first_token() -> None:
    front = slow(gap=0.6)
    with talk(front) as api:
        with pytest.raises(httpx.ReadTimeout):
            api.post("/v1/completions", json={"prompt": "x", "stream": True}, timeout=0.2)
        eventually(lambda: front.running == 0, 0.35)  # before the first token, not because of it
        assert front.ended == ["closed"]


def test_abort() -> None:
    front = slow()
    with talk(front, admin_api_key="root") as api:
        for ident, named in (("one", "one"), ("two", "cmpl-two")):
            with api.stream(
                "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True, "rid": ident}
            ) as response:
                lines = response.iter_lines()
                next(lines)
                assert api.post("/abort", json={"rid": "else"}).json() == {"aborted": 0}
                assert api.post("/abort_request", json={"rid": named}).json() == {"aborted": 1}
                rest = [line for line in lines if line]
            assert '"finish_reason":"abort"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert front.pages == 0
        for body in ({}, {"rid": "x", "abort_all": True}):
            assert api.post("/abort", json=body).json()["error"]["param"] == "rid"
        with api.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
            lines = response.iter_lines()  # kept: when its iterator goes, so does the connection
            next(lines)
            assert api.post("/abort", json={"abort_all": True}, headers=ADMIN).json() == {"aborted": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}),
        ("/generate", {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
    ],
)
def test_a_request_may_be_aborted_before_its_prompt_is_scored(path: str, body: dict[str, Any], stream: bool) -> None:
    front, answers = slow(gap=0.3), []
    with talk(front, admin_api_key="root") as api:
        ask = partial(api.post, path, json=body | {"stream": stream})
        waiter = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
        waiter.start()
        eventually(lambda: front.running == 1)
        assert api.post("/abort", json={"abort_all": True}, headers=ADMIN).json() == {"aborted": 1}
        waiter.join()
    assert answers[0].status_code == 200 and "abort" in answers[0].text


def test_an_engine_that_starts_is_not_dead() -> None:
    front = slow()
    with talk(front, ADMIN, admin_api_key="root") as api:
        front.state, front.reason, front.ready = "starting", "the engine is starting", None
        for path, body in (("/generate", {"text": "x"}), ("/detokenize", {"tokens": [1]})):
            answer = api.post(path, json=body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_starting", path
            assert "the engine is starting" in answer.text and answer.headers["Retry-After"] == "1"


def test_engine_death() -> None:
    front = slow()
    with talk(front, ADMIN, admin_api_key="root") as api:
        with api.stream(
            "POST", "/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 4000, "stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            front.die("out of memory")
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "out of memory" in error["message"] and error["code"] == "engine_dead"
        answer = api.post("/generate", json={"text": "x"})
        assert answer.status_code == 503 and "out of memory" in answer.text and answer.headers["Retry-After"] == "1"
        for path in ("/flush_cache", "/resolved", "/detokenize"):
            answer = api.request("GET" if path == "/resolved" else "POST", path, json={"tokens": [1]})
            assert answer.status_code == 503, path


class Breaking(FakeFront):
    """Whose model computes no numbers behind some tokens."""

    async def stream(self, *args: Any, **options: Any) -> AsyncGenerator[Piece, None]:
        async for piece in super().stream(*args, **options):
            yield piece
            if piece.completion_tokens >= 3:
                raise NumericalError


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/generate", {"text": "x"}),
    ],
)
def test_a_nan_request_gets_its_own_error(path: str, body: dict[str, Any]) -> None:
    with talk(Breaking(lambda prompt, choice: "word " * 400)) as api:
        answer = api.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "nan_output")
        assert "NaN" in error["message"] and "Retry-After" not in answer.headers
        with api.stream("POST", path, json=body | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"] == error and response.status_code == 200
        assert (
            len(lines) > 2
            and 'thalweg_choices_total{finish="error",model_name="scripted"} 2.0' in api.get("/metrics").text
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_what_fails_before_the_first_token_of_a_stream_has_its_own_status(path: str) -> None:
    front = FakeFront()
    with talk(front) as api:
        body = {"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
        if path == "/generate":
            body = {"text": ["x", "y"], "stream": True}
        front.refusal = InvalidRequest("prompt", "does not fit into the pages that there are")
        answer = api.post(path, json=body)
        assert answer.status_code == 400 and "does not fit" in answer.json()["error"]["message"]
        front.refusal = EngineDead("out of memory")
        assert api.post(path, json=body).status_code == 503
        front.refusal = None
        assert events(api.post(path, json=body))


def test_health() -> None:
    front = FakeFront()
    with talk(front) as api:
        for state, health, ready in (
            ("ready", 200, 200),
            ("draining", 200, 503),
            ("restarting", 200, 503),
            ("starting", 503, 503),
            ("hung", 503, 503),
            ("dead", 503, 503),
        ):
            front.state, front.reason = state, f"because {state}"
            assert (api.get("/health").status_code, api.get("/ready").status_code) == (health, ready)
            assert api.get("/health").json() == {"status": state, "reason": f"because {state}"}
        front.state, front.reason = "draining", "the server is shutting down"
        answer = api.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.status_code == 503 and "shutting down" in answer.text, "no new work while it drains"


def test_information() -> None:
    front = FakeFront()
    with talk(front, served_model_name=("big", "alias"), admin_api_key="root") as api:
        for path in ("/server_info", "/get_server_info"):
            info = api.get(path).json()
            assert info["served_model_name"] == "big" and info["context_length"] == CONTEXT
            assert info["default_sampling_params"]["temperature"] == 1.0 and info["reasoning_parser"] == "deepseek-v3"
            assert (
                info["internal_states"][0]["token_usage"] == 0 and info["internal_states"][0]["stats"]["pages"] == 100
            )
        assert api.get("/resolved").json()["attention_backend"]["reason"] == "cpu"
        assert api.post("/flush_cache", headers=ADMIN).json() == {"flushed": True} and front.flushed == 1
        assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["big", "alias"]
        assert api.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
        for asked, shown in ((None, "big"), ("", "big"), ("default", "big"), ("alias", "alias")):
            assert api.post("/v1/completions", json={"prompt": "x", "model": asked}).json()["model"] == shown
        assert api.post("/v1/completions", json={"prompt": "x", "model": "scripted"}).status_code == 404
        assert api.get("/v1/models/alias").json()["id"] == "alias"
        assert api.get("/v1/models/default").json()["id"] == "big"
        for path in ("/v1/models/other", "/v1/models/"):
            answer = api.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("max_tokens", -1, "at least 0 and fit 64 bits"), ("top_k", -2, "-1 or 0 (off)"), ("n", 0, "between 1 and 128")],
)
def test_ranges_are_in_words(api: httpx.Client, field: str, value: int, words: str) -> None:
    answer = api.post("/v1/completions", json={"prompt": "x", field: value})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_hidden_tools_are_counted(api: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] * 1025
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "none"}
    answer = api.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_openapi_describes_every_route(api: httpx.Client) -> None:
    page = api.get("/openapi.json").json()
    paths = page["paths"]
    reference = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = page["components"]["schemas"][reference.rpartition("/")[2]]
    assert "messages" in body["required"] and body["properties"]["stream_options"]["anyOf"]
    optional = {"/abort", "/abort_request", "/generate", "/tokenize"}  # no field is required by itself
    needed = {
        path: one["post"]["requestBody"]["required"]
        for path, one in paths.items()
        if "requestBody" in one.get("post", {})
    }
    assert {path for path in needed if not needed[path]} == {
        *optional,
        "/start_profile",
        "/dump_expert_distribution_record",
    }
    for path in (
        "/v1/completions",
        "/generate",
        "/tokenize",
        "/abort",
        "/v1/models",
        "/health",
        "/metrics",
        "/resolved",
    ):
        assert path in paths
