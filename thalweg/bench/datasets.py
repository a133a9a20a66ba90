"""Data sets: prompts of exact lengths, random or shared between requests, conversations, and when each is sent.

A prompt is token ids wherever the length must be exact, because text of n tokens need not tokenize to n tokens again.
For an API that takes only text (chat) the ids are decoded, and the server's own count is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from thalweg.bench.errors import DatasetError

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]
Message = Mapping[str, object]
PAGE = 64  # tokens of a page of Thalweg's prefix cache; servers with smaller pages can find a little more


def _no_encoder(text: str) -> Sequence[int]:
    raise DatasetError("text must be tokenized here: give --tokenizer, the folder of tokenizer.json")


class Reply(NamedTuple):
    """A server's answer to an earlier turn."""

    text: str
    ids: tuple[int, ...] = ()  # empty where the API reports no token ids


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request to send. Exactly one of ids, text and messages is not empty."""

    output_len: int
    ids: Sequence[int] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    input_len: int = 0  # tokens; 0 where only the server can count
    at: float = 0.0  # seconds after the start of the trace
    decode: Decode | None = None  # ids to text, for an API that takes no ids
    encode: Encode | None = None  # text to ids, for answers without ids
    after: int = -1  # place in the data set of the turn before; -1: the first turn of a conversation
    turn: int = 0
    pause: float = 0.0  # seconds from the answer before to this turn
    role: str = "user"
    history: tuple[SampleRequest, ...] = ()  # earlier turns and the answers, once they are known

    def following(self, before: SampleRequest, reply: Reply) -> SampleRequest:
        """This turn behind an earlier one and its answer."""
        answer = SampleRequest(0, ids=reply.ids, text=reply.text, role="assistant")
        history = (*before.history, replace(before, history=()), answer)
        lengths = [len(part.ids) for part in (*history, self)]
        return replace(self, history=history, input_len=sum(lengths) if all(lengths) else 0)

    def as_ids_or_text(self) -> list[int] | str:
        """For a completions API. Raises DatasetError for messages."""
        parts, encode = (*self.history, self), self.encode or _no_encoder
        if any(part.messages for part in parts):
            raise DatasetError(
                "this data set has conversations, which completions cannot carry: use --backend openai-chat"
            )
        if self.text:
            return "".join(part.text for part in parts)
        return [token for part in parts for token in part.ids or encode(part.text)]

    def as_messages(self) -> list[Message]:
        """For a chat API. Raises DatasetError for token ids without a tokenizer."""
        return [message for part in (*self.history, self) for message in part._own_messages()]

    def _own_messages(self) -> tuple[Message, ...]:
        if self.ids and self.role == "user" and self.decode is None:
            raise DatasetError(
                "a chat API takes text and this data set has token ids: give --tokenizer, the folder of tokenizer.json"
            )
        text = self.text if self.decode is None else self.decode(self.ids)
        return self.messages or ({"role": self.role, "content": text},)


@dataclass(frozen=True, slots=True)
class OrdinaryTokens:
    """The token ids of random prompts: no special ones, which would end or steer a prompt."""

    ids: Sequence[int]
    decode: Decode | None = None
    encode: Encode | None = None

    def draw(self, rng: Random, count: int) -> list[int]:
        return rng.choices(self.ids, k=count)

    def prompt(self, ids: Sequence[int], output_len: int, at: float = 0.0) -> SampleRequest:
        return SampleRequest(output_len, ids=ids, input_len=len(ids), at=at, decode=self.decode, encode=self.encode)


def vocabulary_of(tokenizer: Path) -> OrdinaryTokens:
    """The ordinary tokens of a `tokenizer.json`, given as the file or as its folder. Raises DatasetError."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise DatasetError(f"--tokenizer: {file} does not exist; give a folder with a tokenizer.json, or that file")
    loaded = Tokenizer.from_file(str(file))
    special = loaded.get_added_tokens_decoder()
    ids = sorted(token for token in loaded.get_vocab(with_added_tokens=True).values() if token not in special)
    if not ids:
        raise DatasetError(f"--tokenizer: {file} has no ordinary tokens")

    def encode(text: str) -> Sequence[int]:
        tokens: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return tokens

    return OrdinaryTokens(ids, loaded.decode, encode)


def ids_of(prompts: Sequence[SampleRequest], vocabulary: OrdinaryTokens) -> list[Sequence[int]]:
    """The prompts as token ids, for an engine without a chat format. Raises DatasetError."""
    sources = [prompt.as_ids_or_text() for prompt in prompts]
    encode = vocabulary.encode or _no_encoder
    return [encode(source) if isinstance(source, str) else source for source in sources]


class LengthRange(NamedTuple):
    """Lengths uniform in [max(1, ratio x most), most]: SGLang's range ratios (1 is fixed, 0 halves the mean)."""

    most: int
    ratio: float

    def draw(self, rng: Random) -> int:
        return rng.randint(max(1, int(self.most * self.ratio)), self.most)


def random_prompts(
    vocabulary: OrdinaryTokens, count: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[SampleRequest]:
    """Random tokens."""
    inputs, outputs, rng = LengthRange(input_len, range_ratio), LengthRange(output_len, range_ratio), Random(seed)
    lengths = [(inputs.draw(rng), outputs.draw(rng)) for _ in range(count)]
    return [vocabulary.prompt(vocabulary.draw(rng, size), output) for size, output in lengths]


@dataclass(frozen=True, slots=True)
class PromptGroups:
    """groups x each prompts (or conversations); those of a group begin with the same `system` tokens."""

    groups: int
    each: int
    system: LengthRange
    question: LengthRange  # of each turn
    output: LengthRange
    turns: int = 1
    pause: float = 0.0  # mean seconds from an answer to the next turn, exponential
    ordered: bool = False  # group by group, else in random order


def shared_prompts(vocabulary: OrdinaryTokens, wish: PromptGroups, seed: int) -> list[SampleRequest]:
    """All turns of all conversations; `after` links the turns of one, which follow each other."""
    rng, conversations = Random(seed), list[list[SampleRequest]]()
    for _ in range(wish.groups):
        system = vocabulary.draw(rng, wish.system.draw(rng)) if wish.system.most else []
        for _ in range(wish.each):
            turns: list[SampleRequest] = []
            for turn in range(wish.turns):
                new = vocabulary.draw(rng, wish.question.draw(rng))
                prompt = vocabulary.prompt(new if turn else [*system, *new], wish.output.draw(rng))
                pause = rng.expovariate(1 / wish.pause) if turn and wish.pause else 0.0
                turns.append(replace(prompt, pause=pause))
            conversations.append(turns)
    if not wish.ordered:
        rng.shuffle(conversations)
    return flatten(conversations)


def flatten(conversations: Sequence[Sequence[SampleRequest]]) -> list[SampleRequest]:
    """The turns of conversations in one list, each with the place of the turn before it."""
    prompts: list[SampleRequest] = []
    for turns in conversations:
        for turn, prompt in enumerate(turns):
            prompts.append(replace(prompt, turn=turn, after=len(prompts) - 1 if turn else -1))
    return prompts


def file_conversations(prompts: Sequence[SampleRequest], pause: float, seed: int) -> list[SampleRequest]:
    """Conversations of a file: each user message is a turn, and the file's assistant messages are left out, because the
    measured server answers itself. Raises DatasetError.
    """
    rng, conversations = Random(seed), list[list[SampleRequest]]()
    for number, prompt in enumerate(prompts, 1):
        if not prompt.messages:
            raise DatasetError(f"conversation {number} of the file has no messages: --dataset-name file takes prompts")
        turns, new = list[SampleRequest](), list[Message]()
        for message in prompt.messages:
            role = message.get("role")
            new += [message] * (role != "assistant")
            if role == "user":
                wait = rng.expovariate(1 / pause) if turns and pause else 0.0
                turns.append(SampleRequest(prompt.output_len, messages=tuple(new), pause=wait))
                new = []
        if not turns:
            raise DatasetError(f"conversation {number} of the file has no message of the role user")
        conversations.append(turns)
    return flatten(conversations)


def schedule(
    prompts: Sequence[SampleRequest], rate: float, timestamps: bool, seed: int, burstiness: float = 1.0
) -> list[float]:
    """Seconds after the start at which each prompt is due; later turns of a conversation have their pauses instead.

    timestamps: the trace's own times. Else a renewal process of `rate` a second: gaps are Gamma of shape `burstiness`
    (1: Poisson, below 1: bursts), or all at once (inf).
    """
    if timestamps:
        first = min(prompt.at for prompt in prompts)
        return [prompt.at - first for prompt in prompts]
    if rate == float("inf"):
        return [0.0] * len(prompts)
    rng, at, due = Random(seed + 1), 0.0, []
    for prompt in prompts:
        due.append(at)
        if prompt.after < 0:
            at += rng.expovariate(rate) if burstiness == 1.0 else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return due


def staggered(due: Sequence[float], concurrency: int, seconds: float) -> list[float]:
    """Times of a closed loop whose first `concurrency` requests are spread evenly over `seconds`."""
    return [at + seconds * min(place, concurrency - 1) / concurrency for place, at in enumerate(due)]


def possible_hits(prompts: Sequence[SampleRequest]) -> float | None:
    """Share of all prompt tokens that a prefix cache could have had at best: one that never evicts, in pages of PAGE
    tokens. prompts: in the order in which they were sent. None where token ids are unknown.
    """
    seen, found, total = set[int](), 0, 0
    for prompt in prompts:
        if not all(part.ids for part in (*prompt.history, prompt)):
            return None
        before = [token for part in prompt.history for token in part.ids]
        whole = [*before, *prompt.ids]
        pages = _page_hashes(whole)
        seen.update(pages[: len(before) // PAGE])
        usable = pages[: (len(whole) - 1) // PAGE]  # one token is always left to compute
        found += PAGE * next((place for place, page in enumerate(usable) if page not in seen), len(usable))
        seen.update(pages)
        total += len(whole)
    return found / total if total else None


def _page_hashes(ids: Sequence[int]) -> list[int]:
    """A hash for each full page, of all tokens up to its end."""
    pages = (tuple(ids[start : start + PAGE]) for start in range(0, len(ids) - PAGE + 1, PAGE))
    return list(accumulate(pages, lambda last, page: hash((last, page)), initial=0))[1:]
