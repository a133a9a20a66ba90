"""The bundled model's tasks: the same deterministic items for training (`tools/train_tiny`) and for `thalweg eval`.

The hash of an item's identity puts it either into the training or into the held-out split, so the two are disjoint
whatever the seed.

- `sums`: the sum of two numbers of 2 or 3 digits, thinking on; the last number after `</think>` must be the sum.
- `recall`: the partner of one word out of about 200 pairs, at least `RECALL_DISTANCE` tokens back.
- `tools`: one or two tool calls in DSML; names, arguments and JSON types must be equal.
- `agents`: the next turn of a conversation with made-up tools: calls, the answer to results, or JSON for a schema.
- `dialogue`: the next speech of a play or novel; measured by perplexity, `score` refuses it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Literal

from thalweg.bench.agent_tasks import Maker, ToolConversation
from thalweg.bench.task_pools import PEOPLE, RECALL_KEYS, RECALL_VALUES, TOOL_KINDS, Draws, JsonValue, ToolKind

Split = Literal["train", "held_out"]
Message = Mapping[str, object]

RECALL_DISTANCE = 512
"""Least distance in tokens between the value asked for and the question: 8 × the bundled model's `index_topk` of 64."""

_PAIRS_BETWEEN = 176  # every pair is at least three tokens in any tokenizer: two words and a semicolon; 3 × 176 >= 512
_HELD_OUT_ONE_IN = 8
_END_OF_THINKING = "</think>"


@dataclass(frozen=True)
class Item:
    """One exercise."""

    task: str
    messages: tuple[Message, ...]  # what a client sends, in OpenAI's form
    target: str  # a right output in full; with thinking, the reasoning and `</think>` before the answer
    answer: str  # what scoring compares: a number, a word, or the calls as JSON
    identity: str
    max_new_tokens: int  # ample for the target under the bundled tokenizer
    tools: tuple[Message, ...] = ()
    thinking: bool = False
    response_format: Message | None = None  # the schema that the prompt shows


def split_of(identity: str) -> Split:
    """The split an identity belongs to; one in eight is held out."""
    digest = hashlib.sha256(identity.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0 else "train"


def make_items(task: str, split: Split, count: int, seed: int = 0) -> list[Item]:
    """`count` items of one split, the same for the same arguments.

    Dialogue has a fixed list of held-out items: the first `count` of it are given.

    Raises:
        ValueError: the task is unknown, the training split of `dialogue` is asked for (it lives with the corpus, see
            `tools/train_tiny`), or there are fewer held-out dialogues than asked for.
    """
    if task == "dialogue":
        return _held_out_dialogues(split, count)
    if task not in MAKERS:
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join((*MAKERS, 'dialogue'))}")
    rng = Random(f"{task}/{split}/{seed}")
    items: list[Item] = []
    while len(items) < count:
        item = MAKERS[task](rng)
        if split_of(item.identity) == split:
            items.append(item)
    return items


def score(item: Item, output_text: str) -> bool:
    """Whether the model's output, special tokens of thinking and DSML included and the end token left out, is right.

    Raises:
        ValueError: the item's task has no right answer (`dialogue`).
    """
    if item.task not in SCORERS:
        raise ValueError(f"task {item.task!r} is measured by perplexity, it has no right answer")
    if item.thinking:
        _, found, output_text = output_text.rpartition(_END_OF_THINKING)
        if not found:
            return False
    return SCORERS[item.task](item.answer, output_text)


# --- sums ------------------------------------------------------------------------------------------------------------

_SUM_QUESTIONS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
)


def sum_reasoning(a: int, b: int) -> str:
    """The written addition, from the last digit to the first."""
    width = max(len(str(a)), len(str(b)))
    left, right = f"{a:0{width}d}", f"{b:0{width}d}"
    steps, carry = [f"{left}+{right}"], 0
    for x, y in zip(reversed(left), reversed(right), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total}, write {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join((*steps, f"The sum is {a + b}"))


def sum_identity(a: int, b: int) -> str:
    """The identity of a sum: the two numbers, in whichever order they are asked."""
    return f"sums {min(a, b)} {max(a, b)}"


def make_sum(rng: Random, thinking: bool = True) -> Item:
    """A sum of two numbers of two or three digits each."""
    a, b = (rng.randint(10, 99) if rng.random() < 0.4 else rng.randint(100, 999) for _ in range(2))
    question = rng.choice(_SUM_QUESTIONS).format(a=a, b=b)
    answer = f"{a} + {b} = {a + b}"
    return Item(
        task="sums",
        messages=({"role": "user", "content": question},),
        thinking=thinking,
        target=sum_reasoning(a, b) + _END_OF_THINKING + answer if thinking else answer,
        answer=str(a + b),
        identity=sum_identity(a, b),
        max_new_tokens=160,
    )


def _score_number(answer: str, text: str) -> bool:
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and numbers[-1] == answer


# --- recall ----------------------------------------------------------------------------------------------------------


def recall_question(key: str) -> str:
    """The question for the partner of `key`."""
    return f"Which word goes with {key}?"


def recall_answer(key: str, value: str) -> str:
    """The answer: the pair, said once."""
    return f"The pair is {key} {value}."


def make_recall_table(rng: Random) -> list[tuple[str, str]]:
    """190 to 260 pairs with distinct keys."""
    keys = rng.sample(RECALL_KEYS, rng.randint(190, 260))
    return [(key, rng.choice(RECALL_VALUES)) for key in keys]


def recall_text(table: list[tuple[str, str]]) -> str:
    """The pairs as they stand in the prompt."""
    return "Remember these pairs: " + "; ".join(f"{key} {value}" for key, value in table) + "."


def make_recall(rng: Random) -> Item:
    """One pair asked for, with at least `_PAIRS_BETWEEN` other pairs after it."""
    table = make_recall_table(rng)
    key, value = table[rng.randrange(len(table) - _PAIRS_BETWEEN)]
    text = recall_text(table)
    return Item(
        task="recall",
        messages=({"role": "user", "content": f"{text}\n{recall_question(key)}"},),
        target=recall_answer(key, value),
        answer=value,
        identity=text,
        max_new_tokens=24,
    )


def _score_word(answer: str, text: str) -> bool:
    words = re.findall(r"[a-z]+", text)
    return bool(words) and words[-1] == answer


# --- tools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """A tool as offered in one item: which spelling of its name and of its parameters' names is used."""

    kind: ToolKind
    name: str
    parameters: tuple[str, ...]

    def schema(self) -> Message:
        properties = {name: p.schema() for name, p in zip(self.parameters, self.kind.parameters, strict=True)}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.kind.description,
                "parameters": {"type": "object", "properties": properties, "required": list(self.parameters)},
            },
        }

    def ask(self, rng: Random) -> tuple[str, dict[str, JsonValue]]:
        """A sentence that asks for one call, and the call's arguments."""
        draws = Draws(rng)
        drawn = [draws(*parameter.draw) for parameter in self.kind.parameters]
        sentence = rng.choice(self.kind.requests).format(*(words for words, _ in drawn))
        return sentence, {name: value for name, (_, value) in zip(self.parameters, drawn, strict=True)}


def _dsml_call(name: str, arguments: Mapping[str, JsonValue]) -> str:
    lines: list[str] = []
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">{text}</｜DSML｜parameter>')
    parameters = "\n".join(lines)  # without parameters an empty line stays, as in the published encoder
    return f'<｜DSML｜invoke name="{name}">\n{parameters}\n</｜DSML｜invoke>'


def dsml_block(calls: list[tuple[str, dict[str, JsonValue]]]) -> str:
    """Calls in DeepSeek-V3.2's tool markup, with the blank line that precedes the block."""
    inner = "\n".join(_dsml_call(name, arguments) for name, arguments in calls)
    return f"\n\n<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def make_tool_call(rng: Random) -> Item:
    """One call (or, in two of five items, two calls) of one to three tools offered."""
    offers = [
        _Offer(kind, rng.choice(kind.names), tuple(rng.choice(parameter.names) for parameter in kind.parameters))
        for kind in rng.sample(TOOL_KINDS, rng.randint(1, 3))
    ]
    wanted = [rng.choice(offers) for _ in range(2 if rng.random() < 0.4 else 1)]
    asked = [(offer.name, *offer.ask(rng)) for offer in wanted]
    request = " Then: ".join(sentence for _, sentence, _ in asked)
    if rng.random() < 0.2:
        request = f"This is {rng.choice(PEOPLE)}. {request}"
    calls = [(name, arguments) for name, _, arguments in asked]
    tools = tuple(offer.schema() for offer in offers)
    return Item(
        task="tools",
        messages=({"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": request}),
        tools=tools,
        target=dsml_block(calls),
        answer=json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False),
        identity=f"tools {request} {json.dumps(tools)}",
        max_new_tokens=320,
    )


_BLOCK = re.compile(r"<｜DSML｜function_calls>\n(.*)\n</｜DSML｜function_calls>", re.DOTALL)
_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]+)">\n(.*?)</｜DSML｜invoke>(?:\n|$)', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>\n', re.DOTALL
)


def parse_dsml(text: str) -> list[dict[str, object]] | None:
    """The calls of a DSML block that is all of `text` (blank space around it aside), or None if it is not well formed.

    Strict on purpose, unlike the server's parser, which saves what it can.
    """
    block = _BLOCK.fullmatch(text.strip())
    if block is None or _INVOKE.sub("", block[1]):
        return None
    calls: list[dict[str, object]] = []
    for name, body in _INVOKE.findall(block[1]):
        arguments: dict[str, object] = {}
        for key, is_string, value in _PARAMETER.findall(body):
            if key in arguments:
                return None
            try:
                arguments[key] = value if is_string == "true" else json.loads(value)
            except ValueError:
                return None
        if _PARAMETER.sub("", body).strip("\n"):
            return None
        calls.append({"name": name, "arguments": arguments})
    return calls


def _score_calls(answer: str, text: str) -> bool:
    calls = parse_dsml(text)
    # compared as text: JSON's 1, 1.0 and true are equal in Python, but not to a tool
    return calls is not None and json.dumps(calls, sort_keys=True) == json.dumps(json.loads(answer), sort_keys=True)


# --- agents ----------------------------------------------------------------------------------------------------------


def agent_identity(talk: ToolConversation) -> str:
    """The identity of a conversation, which all its turns share."""
    return f"agents {json.dumps([talk.messages, talk.tools, talk.response_format])}"


def make_agent_turn(rng: Random) -> Item:
    """One turn of the assistant, after all that came before it."""
    maker = Maker(rng)
    talk = maker.shaped() if rng.random() < 0.2 else maker.draw()
    turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"][talk.given :]
    place = rng.choice(turns)
    message = talk.messages[place]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    answer = [{"name": name, "arguments": arguments} for name, arguments in calls] or message["content"]
    return Item(
        task="agents",
        messages=tuple(talk.messages[:place]),
        tools=talk.tools,
        response_format=talk.response_format,
        target=dsml_block(calls) if calls else message["content"],
        answer=json.dumps(answer, ensure_ascii=False),
        identity=agent_identity(talk),
        max_new_tokens=512,
    )


def _score_turn(answer: str, text: str) -> bool:
    wanted = json.loads(answer)
    return text.strip() == wanted if isinstance(wanted, str) else _score_calls(answer, text)


# --- dialogue --------------------------------------------------------------------------------------------------------


def dialogue_item(user: str, assistant: str) -> Item:
    """The next speech, given one speech."""
    return Item(
        task="dialogue",
        messages=({"role": "user", "content": user},),
        target=assistant,
        answer=assistant,
        identity=f"dialogue {user} {assistant}",
        max_new_tokens=64,
    )


def _held_out_dialogues(split: Split, count: int) -> list[Item]:
    if split != "held_out":
        raise ValueError("dialogue has only held-out items here: its training text is the corpus of tools/train_tiny")
    pairs = json.loads((resources.files("thalweg.bench") / "dialogue_held_out.json").read_text(encoding="utf-8"))
    if count > len(pairs):
        raise ValueError(f"there are {len(pairs)} held-out dialogues, fewer than the {count} asked for")
    return [dialogue_item(*pair) for pair in pairs[:count]]


# --- problems from files ---------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def plain_number(text: str) -> str | None:
    """The last number of a text, without thousands separators and trailing zeros; None where there is none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    value = str(numbers[-1]).replace(",", "")
    return value.rstrip("0").rstrip(".") if "." in value else value


def _score_problem(answer: str, text: str) -> bool:
    return plain_number(text.partition("\n\n\n")[0]) == answer


MAKERS: Mapping[str, Callable[[Random], Item]] = {
    "sums": make_sum,
    "recall": make_recall,
    "tools": make_tool_call,
    "agents": make_agent_turn,
}
SCORERS: Mapping[str, Callable[[str, str], bool]] = {
    "sums": _score_number,
    "gsm8k": _score_problem,
    "recall": _score_word,
    "tools": _score_calls,
    "agents": _score_turn,
}
