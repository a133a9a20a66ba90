"""Prompts that share: groups with one system prompt (SGLang's generated-shared-prefix), and conversations of several
turns.

A later turn's prompt is all that was said before it, the server's own answers included, and its new tokens. So it is
made while the load runs; here is only what is new in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from thalweg.bench.datasets import Prompt, Span, Vocabulary
from thalweg.bench.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Groups:
    """groups x each prompts (or conversations, with turns above 1); those of a group begin with the same `system`
    tokens.

    question, output: lengths of each turn. pause: mean seconds from an answer to the next turn, exponential. ordered:
    group by group, else in random order.
    """

    groups: int
    each: int
    system: Span
    question: Span
    output: Span
    turns: int = 1
    pause: float = 0.0
    ordered: bool = False

    def check(self, flag: str) -> None:
        """flag: the first part of the flags' names, which errors tell. Raises DatasetError."""
        for name, value in (("groups", self.groups), ("prompts in each group", self.each), ("turns", self.turns)):
            if value < 1:
                raise DatasetError(f"{flag}-*: the number of {name} must be at least 1, got {value}")
        if self.system.most:
            self.system.check(f"{flag}-system-prompt-len", f"{flag}-range-ratio")
        self.question.check(f"{flag}-question-len", f"{flag}-range-ratio")
        self.output.check(f"{flag}-output-len", f"{flag}-range-ratio")
        if not 0 <= self.pause < float("inf"):
            raise DatasetError(f"--think-time is a number of seconds from 0 on, got {self.pause}")


def shared_prompts(vocabulary: Vocabulary, wish: Groups, seed: int) -> list[Prompt]:
    """All turns of all conversations; `after` links the turns of one, which stand one behind the other. Raises
    DatasetError.
    """
    rng = Random(seed)
    chains: list[list[Prompt]] = []
    for _ in range(wish.groups):
        system = vocabulary.draw(rng, wish.system.draw(rng)) if wish.system.most else []
        chains += [_chain(vocabulary, wish, system, rng) for _ in range(wish.each)]
    if not wish.ordered:
        rng.shuffle(chains)
    return flatten(chains)


def _chain(vocabulary: Vocabulary, wish: Groups, system: Sequence[int], rng: Random) -> list[Prompt]:
    chain: list[Prompt] = []
    for turn in range(wish.turns):
        new = vocabulary.draw(rng, wish.question.draw(rng))
        one = vocabulary.prompt([*system, *new] if turn == 0 else new, wish.output.draw(rng))
        pause = rng.expovariate(1 / wish.pause) if turn and wish.pause else 0.0
        chain.append(replace(one, turn=turn, pause=pause))
    return chain


def flatten(chains: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The turns of conversations in one list, each naming the place of the turn before it."""
    found: list[Prompt] = []
    for chain in chains:
        for turn, prompt in enumerate(chain):
            found.append(replace(prompt, turn=turn, after=len(found) - 1 if turn else -1))
    return found


def file_conversations(prompts: Sequence[Prompt], pause: float, seed: int) -> list[Prompt]:
    """Conversations of a file, played again: each user message is a turn, and what the file's assistant said is left
    out, because the server under test answers itself. Raises DatasetError for what are no messages.
    """
    rng, chains = Random(seed), list[list[Prompt]]()
    for number, prompt in enumerate(prompts, 1):
        if not prompt.messages:
            raise DatasetError(f"conversation {number} of the file has no messages: --dataset-name file takes prompts")
        chain: list[Prompt] = []
        new: list[dict[str, object]] = []
        for message in prompt.messages:
            role = message.get("role")
            if role != "assistant":
                new.append(dict(message))
            if role == "user":
                wait = rng.expovariate(1 / pause) if chain and pause else 0.0
                chain.append(Prompt(prompt.output_len, messages=tuple(new), pause=wait))
                new = []
        if not chain:
            raise DatasetError(f"conversation {number} of the file has no message of the role user")
        chains.append(chain)
    return flatten(chains)
