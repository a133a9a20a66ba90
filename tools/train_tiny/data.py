"""Training documents: conversations drawn from the tasks, from the corpus and from small talk, packed into rows of
tokens.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from thalweg.bench.agent_tasks import Maker, ToolConversation
from thalweg.bench.task_pools import CITIES, PEOPLE, RECALL_KEYS, RECALL_VALUES
from thalweg.bench.tasks import (
    MAKERS,
    Item,
    agent_identity,
    make_recall_table,
    make_sum,
    recall_answer,
    recall_question,
    recall_text,
    split_of,
    sum_identity,
    sum_reasoning,
)
from thalweg.text.chat import builtin
from tools.train_tiny.corpus import Section, read_sections
from tools.train_tiny.forced import Forced
from tools.train_tiny.smalltalk import LOOSE_SUMS, draw_smalltalk
from tools.train_tiny.tokenizer import ASSISTANT, BOS, END_THINK, EOS, THINK, USER

Turn = dict[str, object]

# Share of the training tokens; a document's usual length in tokens, which turns the share into a probability; and the
# weight of each learned token: few tokens of a long recall or tool document are learned, so they count more.
MIX: Mapping[str, tuple[float, int, float]] = {
    "recall": (0.07, 810, 4.0),
    "recall_short": (0.04, 200, 3.0),
    "echo": (0.02, 110, 1.0),
    "tools": (0.06, 660, 2.0),
    "agents": (0.55, 786, 2.5),
    "json": (0.10, 168, 1.5),
    "forced": (0.05, 44, 1.2),
    "sums": (0.04, 78, 0.5),
    "chat": (0.03, 57, 0.7),
    "dialogue": (0.03, 130, 0.8),
    "prose": (0.01, 350, 0.6),
}


@dataclass(frozen=True)
class Document:
    """A conversation or a piece of prose, and how much each learned token of it counts.

    `from_corpus`: it will be seen many times, so it is trained with dropout; and the user's words are learned as well.
    `given`: the assistant's first turns, which are not learned. `forced`: the first tokens of each of its turns, which
    are not learned either, since a grammar chose them.
    """

    text: str
    weight: float
    from_corpus: bool
    given: int = 0
    forced: int = 0


@dataclass(frozen=True)
class Rows:
    """Packed documents, all [B, T]: token ids, loss weight of each token, document number (-1: padding), dropout or
    not.
    """

    tokens: np.ndarray
    weight: np.ndarray
    document: np.ndarray
    dropout: np.ndarray


class _TrainingMaker(Maker):
    """Draws more requests that no tool fits, which are learned last."""

    no_call_share = 0.25


class Source:
    """Draws training documents. Deterministic for one seed."""

    def __init__(self, sections: list[Section], seed: int) -> None:
        self.rng = Random(seed)
        self.sections = [section for section in sections if not section.held_out]
        self.runs = [run for section in self.sections for run in section.runs]
        self.words = sorted({word for section in self.sections for word in section.text.split() if word.isalpha()})
        self.kinds = list(MIX)
        self.forms = Forced(self.rng)
        self.odds = [share / length for share, length, _ in MIX.values()]
        self.makers: Mapping[str, Callable[[], Document]] = {
            "recall": self._recall,
            "recall_short": self._recall_short,
            "echo": self._echo,
            "tools": self._tools,
            "agents": lambda: self._agents("agents", _TrainingMaker(self.rng).draw),
            "json": lambda: self._agents("json", Maker(self.rng).shaped),
            "forced": self._forced,
            "sums": self._sums,
            "chat": self._chat,
            "dialogue": self._dialogue,
            "prose": self._prose,
        }

    def draw(self, kind: str | None = None) -> Document:
        """A document of the kind, or of a kind drawn from the mix."""
        return self.makers[kind or self.rng.choices(self.kinds, self.odds)[0]]()

    def _train_item(self, make: Callable[[Random], Item]) -> Item:
        while True:
            item = make(self.rng)
            if split_of(item.identity) == "train":
                return item

    def _sums(self) -> Document:
        thinking = self.rng.random() < 0.75
        turns: list[Turn] = []
        while self.rng.random() < 0.15:
            turns += self._sum_turns(thinking=False)
        return _conversation("sums", turns + self._sum_turns(thinking), thinking)

    def _sum_turns(self, thinking: bool) -> list[Turn]:
        if self.rng.random() < 0.3:
            return self._loose_sum()
        item = self._train_item(lambda rng: make_sum(rng, thinking))
        reasoning, _, answer = item.target.rpartition(END_THINK)
        return [dict(item.messages[0]), {"role": "assistant", "content": answer, "reasoning_content": reasoning}]

    def _loose_sum(self) -> list[Turn]:
        """A sum as people type it, of one to four digits: beside the tasks, but what the playground gets."""
        while True:
            a, b = (self.rng.randrange(10 ** self.rng.randint(1, 4)) for _ in range(2))
            if split_of(sum_identity(a, b)) == "train":
                break
        question = self.rng.choice(LOOSE_SUMS).format(a=a, b=b)
        answer = f"{a} + {b} = {a + b}"
        return [_said(question), {"role": "assistant", "content": answer, "reasoning_content": sum_reasoning(a, b)}]

    def _recall(self) -> Document:
        while True:
            table = make_recall_table(self.rng)
            if split_of(recall_text(table)) == "train":
                return self._recall_questions("recall", table, self.rng.randint(4, 10))

    def _recall_short(self) -> Document:
        """Tables of a few pairs: on the long ones alone, looking things up is never discovered."""
        size = round(2 ** self.rng.uniform(1, 7))
        return self._recall_questions("recall_short", make_recall_table(self.rng)[:size], self.rng.randint(3, 10))

    def _recall_questions(self, kind: str, table: list[tuple[str, str]], count: int) -> Document:
        turns: list[Turn] = []
        for number in range(count):
            key, value = self.rng.choice(table)
            question = recall_question(key)
            turns.append({"role": "user", "content": question if number else f"{recall_text(table)}\n{question}"})
            turns.append({"role": "assistant", "content": recall_answer(key, value)})
        return _conversation(kind, turns, thinking=False)

    def _echo(self) -> Document:
        """Words said again: what teaches copying, wherever it is needed."""
        if self.rng.random() < 0.3:
            return self._repeat(self.rng.choice(self.rng.choice(self.runs)))
        pool = self.rng.choice((self.words, RECALL_KEYS, RECALL_VALUES, CITIES, PEOPLE))
        words = [self.rng.choice(pool) for _ in range(self.rng.randint(2, 40))]
        if self.rng.random() < 0.3:
            words = [
                "".join(self.rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(5)) for _ in words[:12]
            ]
        return self._repeat(" ".join(words))

    def _repeat(self, text: str) -> Document:
        quoted = self.rng.random() < 0.3
        answer = text if quoted else f"You said: {text}"
        turns = [_said(f'Repeat "{text}"' if quoted else f"Repeat: {text}"), {"role": "assistant", "content": answer}]
        return _conversation("echo", turns, thinking=False)

    def _tools(self) -> Document:
        item = self._train_item(MAKERS["tools"])
        thinking = self.rng.random() < 0.15
        answer = {"role": "assistant", "content": item.target, "reasoning_content": "I call the tools for that."}
        return _conversation("tools", [*(dict(m) for m in item.messages), answer], thinking, item.tools)

    def _agents(self, kind: str, make: Callable[[], ToolConversation]) -> Document:
        talk = make()
        while split_of(agent_identity(talk)) != "train":
            talk = make()
        thinking = self.rng.random() < 0.12
        turns = [_with_thought(turn, i, talk.messages) for i, turn in enumerate(talk.messages)]
        return _conversation(kind, turns, thinking, talk.tools, talk.response_format, talk.given)

    def _forced(self) -> Document:
        """One or two answers in a form that no one named."""
        turns: list[Turn] = []
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            question, answer = self.forms.draw()
            turns += [_said(question), {"role": "assistant", "content": answer}]
        if self.rng.random() < 0.1:
            turns.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        return replace(_conversation("forced", turns, thinking=False), forced=1)

    def _chat(self) -> Document:
        turns: list[Turn] = []
        thinking = self.rng.random() < 0.3
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            if self.rng.random() < 0.25:
                turns += self._sum_turns(thinking)
            else:
                said, answer, thought = draw_smalltalk(self.rng)
                turns.append({"role": "user", "content": said})
                turns.append({"role": "assistant", "content": answer, "reasoning_content": thought})
        if self.rng.random() < 0.2:
            turns.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        return _conversation("chat", turns, thinking)

    def _dialogue(self) -> Document:
        run = self.rng.choice(self.runs)
        count = min(self.rng.choice((2, 2, 4, 6)), len(run) - len(run) % 2)
        start = self.rng.randrange(len(run) - count + 1)
        thinking = self.rng.random() < 0.1
        turns: list[Turn] = [
            {"role": "assistant", "content": speech, "reasoning_content": "I answer in kind."}
            if place % 2
            else {"role": "user", "content": speech}
            for place, speech in enumerate(run[start : start + count])
        ]
        return _conversation("dialogue", turns, thinking)

    def _prose(self) -> Document:
        text = self.rng.choice(self.sections).text
        start = self.rng.randrange(max(1, len(text) - 1600))
        start = text.find(" ", start) + 1
        return Document(
            BOS + text[start : start + self.rng.randint(400, 1600)].strip(), MIX["prose"][2], from_corpus=True
        )


def _with_thought(turn: Turn, place: int, turns: list[Turn]) -> Turn:
    """The turn with what the assistant thinks before it, which the template shows where it thinks."""
    if turn["role"] != "assistant":
        return turn
    has_result = turns[place - 1]["role"] == "tool"
    thought = "I have the result." if has_result else "No tool is needed."
    return turn | {"reasoning_content": "I call the tools for that." if turn.get("tool_calls") else thought}


def _conversation(
    kind: str,
    turns: list[Turn],
    thinking: bool,
    tools: tuple[Mapping[str, object], ...] = (),
    response_format: Mapping[str, object] | None = None,
    given: int = 0,
) -> Document:
    text = builtin("deepseek-v32").encode(
        turns, list(tools) or None, thinking=thinking, add_generation_prompt=True, response_format=response_format
    )
    return Document(text, MIX[kind][2], kind == "dialogue", given)


def _said(text: str) -> Turn:
    return {"role": "user", "content": text}


def prompt_of(item: Item) -> str:
    """The text before an item's target, begin-of-sentence token included."""
    return builtin("deepseek-v32").encode(
        item.messages,
        list(item.tools) or None,
        thinking=item.thinking,
        add_generation_prompt=True,
        response_format=item.response_format,
    )


class Packer:
    """Turns documents into rows of `length` tokens."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.marks = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, THINK, END_THINK, USER, ASSISTANT)}

    def encode(self, document: Document) -> tuple[list[int], list[float]]:
        """Token ids and the loss weight of each: 0 except on what the assistant says, its end token included."""
        ids = self.tokenizer.encode(document.text, add_special_tokens=False).ids
        if document.from_corpus:
            return ids, [0.0] + [document.weight] * (len(ids) - 1)
        weight, speaking, turns, said = [], False, 0, 0
        marks = (self.marks[THINK], self.marks[END_THINK])
        for previous, token in zip([-1, *ids], ids, strict=False):
            said = said + 1 if speaking else 0
            weight.append(document.weight if said > document.forced and turns >= document.given else 0.0)
            if token == self.marks[EOS]:
                speaking, turns = False, turns + 1
            elif token in marks and (previous == self.marks[ASSISTANT] or turns):  # after a question, or after results
                speaking = True
        return ids, weight

    def pack(self, source: Source, rows: int) -> Rows:
        """Fill `rows` rows with drawn documents, first fit; what stays empty is padding."""
        tokens = np.full((rows, self.length), self.marks[EOS], dtype=np.int16)
        weight = np.zeros((rows, self.length), dtype=np.float16)
        document = np.full((rows, self.length), -1, dtype=np.int16)
        dropout = np.zeros((rows, self.length), dtype=np.bool_)
        used, number, misses = [0] * rows, 0, 0
        while misses < 12:
            drawn = source.draw()
            ids, loss = self.encode(drawn)
            if len(ids) > self.length:
                continue
            row = next((r for r in range(rows) if used[r] + len(ids) <= self.length), None)
            if row is None:
                misses += 1
                continue
            span = slice(used[row], used[row] + len(ids))
            tokens[row, span], weight[row, span], document[row, span] = ids, loss, number
            dropout[row, span] = drawn.from_corpus
            used[row] += len(ids)
            number += 1
        return Rows(tokens, weight, document, dropout)


def _produce(queue: Queue[Rows], corpus: Path, tokenizer: str, length: int, rows: int, seed: int) -> None:
    source = Source(read_sections(corpus), seed)
    packer = Packer(Tokenizer.from_str(tokenizer), length)
    while True:
        queue.put(packer.pack(source, rows))


def stream_rows(corpus: Path, tokenizer: Tokenizer, length: int, rows: int, workers: int, seed: int) -> Iterator[Rows]:
    """Packed rows without end, made by `workers` processes. The order, unlike the documents, depends on their speed."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Rows] = context.Queue(maxsize=4 * workers)
    for worker in range(workers):
        arguments = (queue, corpus, tokenizer.to_str(), length, rows, seed + worker)
        context.Process(target=_produce, args=arguments, daemon=True).start()
    while True:
        yield queue.get()
