"""`suffix` of /v1/completions, and chat extensions that shape a prompt: the model's input and the answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.cpu.fakes import ByteTokenizer, FakeFront, fake_app, serving
from thalweg.server.completions import FIM_BEGIN as BEGIN
from thalweg.server.completions import FIM_END as END
from thalweg.server.completions import FIM_HOLE as HOLE

USER = {"role": "user", "content": "Say something about rivers."}


class BareTokenizer(ByteTokenizer):
    def mark_id(self, text: str) -> int | None:
        return None


def ask(
    tokenizer: ByteTokenizer, body: dict[str, Any], route: str = "/v1/completions"
) -> tuple[httpx.Response, list[str]]:
    """The answer, and the prompts that the model read."""
    front = FakeFront(lambda prompt, choice: "MIDDLE")
    front.tokenizer = tokenizer
    with serving(fake_app(front)) as url:
        answer = httpx.post(url + route, json=body)
    return answer, [bytes(prompt).decode() for prompt, *_ in front.seen]


def test_the_model_reads_both_sides_of_the_hole() -> None:
    answer, prompts = ask(ByteTokenizer(), {"prompt": "def f(", "suffix": "\n    return é"})
    assert prompts == ["<｜fim▁begin｜>def f(<｜fim▁hole｜>\n    return é<｜fim▁end｜>"]
    assert answer.json()["choices"][0]["text"] == "MIDDLE"
    answer, prompts = ask(ByteTokenizer(), {"prompt": ["a", ""], "suffix": "b"})
    assert prompts == [f"{BEGIN}a{HOLE}b{END}", f"{BEGIN}{HOLE}b{END}"]
    _, prompts = ask(ByteTokenizer(), {"prompt": "a", "suffix": ""})
    assert prompts == ["a"], "no suffix, no hole"


@pytest.mark.parametrize(
    ("tokenizer", "body", "param", "words"),
    [
        (BareTokenizer(), {"prompt": "a", "suffix": "b"}, "suffix", BEGIN),
        (ByteTokenizer(), {"prompt": [1, 2], "suffix": "b"}, "suffix", "token ids"),
        (ByteTokenizer(), {"prompt": [[1, 2]], "suffix": "b"}, "suffix", "token ids"),
        (ByteTokenizer(), {"prompt": "a", "suffix": "b", "echo": True}, "echo", "suffix"),
        (ByteTokenizer(), {"prompt": "a", "suffix": 5}, "suffix", "must be a text"),
    ],
)
def test_what_cannot_be_infilled_is_said(
    tokenizer: ByteTokenizer, body: dict[str, Any], param: str, words: str
) -> None:
    answer, _ = ask(tokenizer, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/generate"])
def test_other_routes_have_no_suffix(route: str) -> None:
    answer, _ = ask(ByteTokenizer(), {"messages": [USER], "text": "a", "suffix": "b"}, route)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"


# ---- chat extensions, end to end ----


def chat(script: str, stream: bool, **body: Any) -> tuple[str, str, str]:
    """(content, reasoning, prompt) of an answer by the SDK."""
    front = FakeFront(lambda prompt, choice: script)
    content = reasoning = ""
    with serving(fake_app(front)) as url, openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
        messages = body.pop("messages", [USER])
        answer = client.chat.completions.create(model="scripted", messages=messages, stream=stream, extra_body=body)
        for message in [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]:
            content += message.content or ""
            reasoning += (message.model_extra or {}).get("reasoning_content") or ""
    return content, reasoning, bytes(front.seen[0][0]).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_separate_reasoning(stream: bool) -> None:
    kwargs = {"thinking": True}
    assert chat("So.</think>Four.", stream, chat_template_kwargs=kwargs)[:2] == ("Four.", "So.")
    together = chat("So.</think>Four.", stream, chat_template_kwargs=kwargs, separate_reasoning=False)
    assert together[:2] == ("So.</think>Four.", "")


@pytest.mark.parametrize("stream", [False, True])
def test_continue_final_message(stream: bool) -> None:
    begun = [USER, {"role": "assistant", "content": "Rivers "}]
    content, _, prompt = chat("flow.", stream, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert content == "flow." and prompt.endswith("</think>Rivers ")
    thought = [USER, {"role": "assistant", "content": "Rivers ", "reasoning_content": "Hm."}]
    more = {"messages": thought, "continue_final_message": True, "chat_template_kwargs": {"thinking": True}}
    content, reasoning, prompt = chat("flow.", stream, **more)
    assert prompt.endswith("<think>Hm.</think>Rivers ")
    assert (content, reasoning) == ("flow.", ""), "the thought is over in the prompt"


def test_continue_final_message_needs_something_to_continue() -> None:
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        chat("", False, messages=[USER], continue_final_message=True)


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_chat_template_kwargs(name: str) -> None:
    assert chat("x", False, chat_template_kwargs={name: True})[2].endswith("<think>")
    assert chat("x", False, chat_template_kwargs={name: False})[2].endswith("</think>")
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        chat("x", False, chat_template_kwargs=[name])
