"""Fields and answers that clients of vLLM, SGLang and OpenAI expect by habit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.cpu.fakes import CONTEXT, EOS, MARKS, FakeFront, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Assembler
from thalweg.text.detokenize import ByteDetokenizer
from thalweg.text.stop_regex import RegexStops, check

MESSAGES = [{"role": "user", "content": "Hi"}]
THINKS = {"chat_template_kwargs": {"thinking": True}}
FRONT = FakeFront(lambda prompt, choice: "I muse</think>Well" if prompt.endswith("<think>") else "Well")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with serving(fake_app(FRONT)) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


def post(api: httpx.Client, path: str, **body: Any) -> Any:
    answer = api.post(path, json=({"messages": MESSAGES} if path == CHAT else {"prompt": "abc"}) | body)
    if not body.get("stream"):
        return answer.json()
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_a_thought_has_both_names_and_may_be_left_out(api: httpx.Client) -> None:
    message = post(api, CHAT, **THINKS)["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("I muse", "I muse", "Well")
    for hides in (False, True):
        deltas = [c["choices"][0]["delta"] for c in post(api, CHAT, stream=True, include_reasoning=not hides, **THINKS)]
        texts = ["".join(d.get(name) or "" for d in deltas) for name in ("reasoning", "reasoning_content", "content")]
        assert texts == (["", "", "Well"] if hides else ["I muse", "I muse", "Well"])
    message = post(api, CHAT, include_reasoning=False, **THINKS)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "Well")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_is_left_out_has_no_log_probabilities(api: httpx.Client, stream: bool) -> None:
    tokens = []
    for include in (True, False):
        answer = post(api, CHAT, include_reasoning=include, logprobs=True, stream=stream, **THINKS)
        entries = [chunk["choices"][0]["logprobs"] for chunk in (answer if stream else [answer])]
        tokens.append([one["token"] for entry in entries if entry for one in entry["content"]])
    whole, shown = map("".join, tokens)
    assert whole == "I muse</think>Well<eos>"  # here the mark is several tokens, of which some remain
    assert whole.endswith(shown) and shown.removeprefix("</think").removeprefix(">") == "Well<eos>"


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_thought(api: httpx.Client, stream: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(api, CHAT, **THINKS, **more)
    usage = answer[-1]["usage"] if stream else answer["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("I muse")}


def test_continuous_usage(api: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = post(api, TEXT, stream=True, stream_options=options, max_tokens=3)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert post(api, TEXT, stream_options=options)["error"]["param"] == "stream_options"


def test_a_budget_reaches_the_engine(api: httpx.Client) -> None:
    end = MARKS["</think>"]
    post(api, CHAT, thinking_token_budget=7, **THINKS)
    assert (FRONT.grammars[-1].thinking_budget, FRONT.grammars[-1].think_end_id) == (7, end)
    post(api, CHAT, thinking_token_budget=7)  # no thought, so nothing to limit
    assert not FRONT.grammars[-1].masks
    usage = post(api, CHAT, thinking_token_budget=0, **THINKS)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert not FRONT.grammars[-1].masks, "the prompt itself ends the thought"
    post(api, TEXT, prompt="x<think>", thinking_token_budget=0)
    assert FRONT.grammars[-1].thinking_budget == 0 and FRONT.grammars[-1].starts_in_thought
    thinking = {"type": "enabled", "budget_tokens": 9}
    api.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 50, "thinking": thinking})
    assert FRONT.grammars[-1].thinking_budget == 9
    for effort, thinks in (("low", True), ("none", False)):
        body = {"messages": MESSAGES, "max_tokens": 50, "output_config": {"effort": effort}}
        content = api.post("/v1/messages", json=body).json()["content"]
        assert any(block["type"] == "thinking" for block in content) == thinks
    assert post(api, CHAT, thinking_token_budget=-2)["error"]["param"] == "thinking_token_budget"
    budgets: tuple[dict[str, Any], ...] = ({"thinking_token_budget": 6}, {"reasoning": {"max_tokens": 6}})
    for budget in budgets:
        api.post("/v1/responses", json={"input": "Hi", "reasoning_effort": "high", **budget})
        assert FRONT.grammars[-1].thinking_budget == 6


@pytest.mark.parametrize(
    "path, field",
    [
        ("/v1/chat/completions", "reasoning_effort"),
        ("/v1/chat/completions", "reasoning"),
        ("/v1/responses", "reasoning_effort"),
        ("/v1/responses", "reasoning"),
        ("/v1/messages", "reasoning_effort"),
        ("/v1/messages", "output_config"),
    ],
)
def test_an_effort_turns_thinking_on_and_off_in_all_apis(api: httpx.Client, path: str, field: str) -> None:
    body = {"input": MESSAGES} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 50}
    for effort, thinks in (("high", True), ("none", False)):
        value = effort if field == "reasoning_effort" else {"effort": effort}
        assert ("I muse" in api.post(path, json={**body, field: value}).text) == thinks


def test_a_reasoning_object_has_all_that_it_may_say(api: httpx.Client) -> None:
    for option, thinks in (
        ({"enabled": True}, True),
        ({"enabled": False}, False),
        ({"enabled": True, "effort": "none"}, False),
    ):
        assert ("I muse" in json.dumps(post(api, CHAT, reasoning=option))) == thinks
    post(api, CHAT, reasoning={"effort": "high", "max_tokens": 9})
    assert FRONT.grammars[-1].thinking_budget == 9
    body = {"input": MESSAGES, "reasoning": {"summary": "auto"}, "reasoning_effort": "high"}
    assert "I muse" in api.post("/v1/responses", json=body).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_can_come_as_its_signature_alone(api: httpx.Client, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=str(api.base_url), api_key="x", max_retries=0)
    ask: Any = {"model": "default", "max_tokens": 50, "messages": MESSAGES}
    found = []
    for display in ("summarized", "omitted"):
        thinking = {"type": "adaptive", "display": display}
        if stream:
            with client.messages.stream(thinking=thinking, **ask) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(thinking=thinking, **ask)
        thought, text = message.content
        assert text.text == "Well"
        found.append((thought.thinking, thought.signature))
    assert [text for text, _ in found] == ["I muse", ""] and found[0][1] == found[1][1] != ""


def test_overflow_has_the_code_and_the_words_that_clients_look_for(api: httpx.Client) -> None:
    long = [{"role": "user", "content": "x" * CONTEXT}]
    client = openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens") as caught:
        client.chat.completions.create(model="default", messages=long)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    for body in ({"prompt": [1] * 9, "max_tokens": CONTEXT}, {"prompt": "x" * 5000}, {"prompt": "x" * 900_000}):
        assert post(api, TEXT, **body)["error"]["code"] == "context_length_exceeded"
    answer = api.post("/v1/messages", json={"messages": long, "max_tokens": 9}).json()
    assert re.fullmatch(rf"prompt is too long: \d+ tokens > {CONTEXT} maximum", answer["error"]["message"])
    for size, said in ((5000, "5000 tokens"), (900_000, f"more than {CONTEXT} tokens")):
        assert f"this request has {said} of prompt" in post(api, TEXT, prompt="x" * size)["error"]["message"]


def test_a_refused_field_says_what_to_use(api: httpx.Client) -> None:
    for path, body, instead in (
        (CHAT, {"functions": [1]}, "use `tools`"),
        (CHAT, {"best_of": 3}, "use `n`"),
        ("/v1/responses", {"input": "Hi", "conversation": "c"}, "use `previous_response_id`"),
        ("/generate", {"text": "a", "sampling_params": {"bad_words": ["x"]}}, "use `logit_bias`"),
    ):
        assert instead in post(api, path, **body)["error"]["message"]


def test_parameters_of_generate_have_to_be_known(api: httpx.Client) -> None:
    for wrong, right in (("max_tokens", "max_new_tokens"), ("temprature", "temperature")):
        answer = api.post("/generate", json={"text": "a", "sampling_params": [{wrong: 1}]}).json()["error"]
        assert answer["param"] == f"sampling_params[0].{wrong}" and f"did you mean {right}?" in answer["message"]


def test_events_of_generate_come_at_an_interval(api: httpx.Client) -> None:
    body: Any = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    lengths = []
    for interval in (1, 3):
        body["sampling_params"]["stream_interval"] = interval
        lines = [line for line in api.post("/generate", json=body).text.splitlines() if line.startswith("data: {")]
        lengths.append([len(json.loads(line[6:])["output_ids"]) for line in lines])
    assert lengths == [[1, 2, 3, 4], [3, 4]]
    body["sampling_params"]["stream_interval"] = 0
    assert api.post("/generate", json=body).json()["error"]["param"] == "sampling_params.stream_interval"


def test_a_wrong_type_is_said_in_words(api: httpx.Client) -> None:
    for field, value, words in (
        ("temperature", "x", "must be a number, got a text"),
        ("messages", "x", "must be a list, got a text"),
        ("stop", 3, "must be a text or a list, got an integer"),
    ):
        assert post(api, CHAT, **{field: value})["error"]["message"] == f"{field}: {words}"


def test_prompts_are_truncated(api: httpx.Client) -> None:
    for side, ids in (({}, b"def"), ({"truncation_side": "right"}, b"abc")):
        choice = post(api, TEXT, prompt="abcdef", truncate_prompt_tokens=3, return_token_ids=True, **side)["choices"][0]
        assert choice["prompt_token_ids"] == list(ids)
    assert post(api, TEXT, prompt="x" * 9000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == CONTEXT - 1
    assert post(api, CHAT, truncate_prompt_tokens=4)["usage"]["prompt_tokens"] == 4
    assert post(api, TEXT, truncate_prompt_tokens=0)["error"]["param"] == "truncate_prompt_tokens"


def test_small_habits(api: httpx.Client) -> None:
    assert post(api, TEXT)["choices"][0]["matched_stop"] == EOS
    assert post(api, TEXT, stop="l")["choices"][0]["matched_stop"] == "l"
    assert post(api, TEXT, max_tokens=1)["choices"][0]["matched_stop"] is None
    assert post(api, CHAT, logprobs=0)["choices"][0]["logprobs"] is None
    assert len(post(api, CHAT, logprobs=1)["choices"][0]["logprobs"]["content"]) == 5
    assert "top_logprobs" in post(api, CHAT, logprobs=5)["error"]["message"]
    assert post(api, CHAT, best_of=2)["error"]["param"] == "best_of" and "choices" in post(api, CHAT, best_of=1)
    assert api.get("/v1/models/default").json()["id"] == api.get("/v1/models").json()["data"][0]["id"]
    assert post(api, TEXT, max_new_tokens=2)["usage"]["completion_tokens"] == 2
    assert post(api, TEXT, max_new_tokens=CONTEXT)["error"]["param"] == "max_new_tokens"
    assert post(api, CHAT, prediction={"type": "content", "content": "W"})["choices"][0]["message"]["content"] == "Well"
    logprobs = post(api, TEXT, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "token_id:87" and list(logprobs["top_logprobs"][0]) == ["token_id:87"]
    said = {"messages": [*MESSAGES, {"role": "assistant", "content": "So: "}], "continue_final_message": True}
    for stream in (False, True):
        answer = post(api, CHAT, echo=True, stream=stream, **said)
        found = [c["choices"][0]["delta"].get("content", "") for c in answer] if stream else None
        assert "".join(found or [answer["choices"][0]["message"]["content"]]) == "So: Well"
    error = post(api, CHAT, logit_bias={"bad1": 1, "5": 1, "bad2": 2})["error"]
    assert error["param"] == "logit_bias" and "'bad1', 'bad2'" in error["message"]


def test_all_routes_answer_under_the_prefix_of_a_proxy_too() -> None:
    options = ServerOptions(root_path="/llm/a", api_key=("k",), enable_force_include_usage=True)
    with serving(fake_app(FakeFront(), options)) as url, httpx.Client(base_url=url, follow_redirects=False) as api:
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/llm/a"):
            assert api.get(f"{prefix}/health").status_code == 200
            assert api.get(f"{prefix}/v1/models").status_code == 401
            assert api.get(f"{prefix}/v1/models", headers=key).json()["data"]
            body = {"prompt": "a", "stream": True}
            text = api.post(f"{prefix}/v1/completions", json=body, headers=key).text
            assert '"usage":{"prompt_tokens":' in text, "asked for or not"
            body = {"messages": MESSAGES, "stream": True}
            text = api.post(f"{prefix}/v1/chat/completions", json=body, headers=key).text
            assert '"usage":{"prompt_tokens":' in text, "of a chat too"
            assert "Thalweg" in api.get(f"{prefix}/").text
        assert api.get("/llm/a").headers["location"] == "/llm/a/"
        assert api.get("/llm/ab/health", headers=key).status_code == 404
        assert api.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm/a"}]
    assert [ServerOptions(root_path=path).prefix for path in ("llm", "/a/b/", "/", "")] == ["/llm", "/a/b", "", ""]
    for wrong in ("//llm", "/a b", "http://x"):
        with pytest.raises(UnsupportedConfig, match="root_path"):
            ServerOptions(root_path=wrong)


# ---- stop expressions ----


class Letters:
    eos_ids = (EOS,)

    def detokenizer(self, skip_special_tokens: bool) -> ByteDetokenizer:
        return ByteDetokenizer({i: bytes([i]) for i in range(256)})


def ends(text: str, *patterns: str, **params: Any) -> tuple[str, Any]:
    """What is shown of a text that comes byte by byte, and what stopped it."""
    assembler = Assembler(0, (1,), SamplingParams(stop_regex=patterns, **params), Letters())  # type: ignore[arg-type]
    shown = ""
    for byte in text.encode():
        piece = assembler.feed(TokenDelta(1, (byte,)), 0.0)
        shown += piece.text
        if assembler.ended:
            return shown, piece.stop
    return shown, None


def test_a_stop_expression_ends_the_text_with_its_first_match() -> None:
    assert ends("abc 12 d", "[0-9]+") == ("abc 1", "[0-9]+")
    assert ends("über\n\nUser: x", r"\n+User:") == ("über\n\nUser:", r"\n+User:")
    assert ends("aXbY", "q", "Y|X") == ("aX", "Y|X")
    assert ends("a1b2", "[0-9]", min_tokens=3) == ("a1b2", "[0-9]")
    assert ends("say END1", "END1", stop=("END2",)) == ("say END1", "END1")  # held for the stop string until then
    assert ends("nothing", "z") == ("nothing", None)
    assert RegexStops(("b+",)).feed("abba") == (2, "b+"), "also within a token of several characters"


def test_expressions_that_cannot_be_matched_are_refused(api: httpx.Client) -> None:
    for pattern in (r"(?=a)b", r"\bword", "(", "a*", "(a)\\1"):
        with pytest.raises(InvalidRequest, match="stop_regex"):
            check((pattern,))
    assert post(api, TEXT, stop_regex=["("])["error"]["message"] == "stop_regex: '(': does not compile: unclosed group"
    native = api.post("/generate", json={"text": "a", "sampling_params": {"stop_regex": "("}}).json()
    assert native["error"]["param"] == "sampling_params.stop_regex"
    with pytest.raises(InvalidRequest, match="too complex"):
        ends("".join(random.Random(1).choices("ab ", k=30_000)), "a.{0,200}b.{0,200}c")
