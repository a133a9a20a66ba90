"""The prompts and answers of an evaluation, in the checkpoint's chat format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from thalweg.bench.tasks import Item
from thalweg.text.chat import ChatEncoder, ChatOptions, choose_chat
from thalweg.text.tokenizer import Tokenizer


class EvalPrompt(NamedTuple):
    """A question."""

    ids: tuple[int, ...]
    limit: int  # most tokens of the answer


class EvalAnswer(NamedTuple):
    text: str  # with special tokens, without the end token
    ids: tuple[int, ...] = ()  # with the end token; empty over HTTP


class Continuation(NamedTuple):
    """A prompt and a text that follows it."""

    ids: tuple[int, ...]
    at: int  # where the continuation begins, at least 1


class PromptFormat:
    """Makes prompts in the checkpoint's chat format."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options = ChatOptions(special_tokens=self.tokenizer.special_tokens)
        self.encoder: ChatEncoder = choose_chat(folder, config, options).encoder

    def prompt(self, item: Item) -> EvalPrompt:
        """Raises InvalidRequest where the checkpoint has no chat format."""
        text = self.encoder.encode(item.messages, list(item.tools) or None, thinking=item.thinking)
        return EvalPrompt(tuple(self.tokenizer.encode(text)), item.max_new_tokens)

    def with_target(self, item: Item) -> Continuation:
        """The prompt with its right answer and the end token."""
        prompt, target = self.prompt(item).ids, self.tokenizer.encode(item.target, add_special=False)
        return Continuation((*prompt, *target, self.tokenizer.eos_ids[0]), len(prompt))


class Answerer(Protocol):
    """Answers greedily, and scores continuations. Each result goes into `into`, by its place, as soon as it is known,
    so that it is kept when Ctrl-C or an error ends the run.
    """

    def answer(self, prompts: Sequence[EvalPrompt], label: str, into: dict[int, EvalAnswer]) -> None: ...

    def likelihoods(self, texts: Sequence[Continuation], label: str, into: dict[int, float]) -> None:
        """The log-probability of each continuation, in nats."""
