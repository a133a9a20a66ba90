"""What the load generator sends: prompts of exact lengths, and when each is due.

A prompt is token ids wherever the length must be exact, because text of n tokens need not come back as n tokens. For an
API that takes only text (chat) the ids are decoded, and the server's own count is what is reported.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from thalweg.bench.errors import DatasetError

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server wrote to an earlier turn. ids: empty where the API tells no token ids."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send. Exactly one of ids, text and messages is not empty. input_len: 0 where only the server can
    count.

    at: seconds after the start of the trace, 0 where there is no trace. decode: turns ids into text for an API that
    takes none; encode: the other way, for answers that come without ids. after: place in the data set of the turn that
    this one continues, -1 for the first turn of a conversation (turn 0). pause: seconds from that turn's answer until
    this one is sent. history: earlier turns with their answers, filled in when they are known.
    """

    output_len: int
    ids: Sequence[int] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    input_len: int = 0
    at: float = 0.0
    decode: Decode | None = None
    encode: Encode | None = None
    after: int = -1
    turn: int = 0
    pause: float = 0.0
    history: tuple[tuple[Prompt, Answer], ...] = ()

    def following(self, before: Prompt, answer: Answer) -> Prompt:
        """This turn with all that was said before it."""
        history = (*before.history, (replace(before, history=()), answer))
        told = [len(turn.ids) + len(said.ids) for turn, said in history if turn.ids and said.ids]
        known = sum(told) + len(self.ids) if self.ids and len(told) == len(history) else 0
        return replace(self, history=history, input_len=known)

    def as_ids_or_text(self) -> list[int] | str:
        """For a completions API. Raises DatasetError for a conversation in messages."""
        turns = [*(turn for turn, _ in self.history), self]
        if any(turn.messages for turn in turns):
            raise DatasetError(
                "this data set has conversations, which completions cannot carry: use --backend openai-chat"
            )
        if self.text:
            return "".join(turn.text + answer.text for turn, answer in self.history) + self.text
        ids: list[int] = []
        for turn, answer in self.history:
            ids += turn.ids
            ids += answer.ids or self._encoded(answer.text)
        return [*ids, *self.ids]

    def _encoded(self, text: str) -> Sequence[int]:
        if self.encode is None:
            raise DatasetError(
                "this API gives answers as text and later turns are token ids: give --tokenizer, the folder of"
                " tokenizer.json"
            )
        return self.encode(text)

    def as_messages(self) -> list[Message]:
        """For a chat API. Raises DatasetError for token ids without a tokenizer."""
        said: list[Message] = []
        for turn, answer in self.history:
            said += [*turn.own_messages(), {"role": "assistant", "content": answer.text}]
        return [*said, *self.own_messages()]

    def own_messages(self) -> tuple[Message, ...]:
        """This turn alone."""
        if self.messages:
            return self.messages
        if self.ids and self.decode is None:
            raise DatasetError(
                "a chat API takes text and this data set has token ids: give --tokenizer, the folder of tokenizer.json"
            )
        return ({"role": "user", "content": self.text if self.decode is None else self.decode(self.ids)},)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that random prompts draw from (no special ones, which would end or steer a prompt). decode, encode:
    see `Prompt`.
    """

    ids: Sequence[int]
    decode: Decode | None = None
    encode: Encode | None = None

    def draw(self, rng: Random, count: int) -> list[int]:
        return rng.choices(self.ids, k=count)

    def prompt(self, ids: Sequence[int], output_len: int, at: float = 0.0) -> Prompt:
        return Prompt(output_len, ids=ids, input_len=len(ids), at=at, decode=self.decode, encode=self.encode)


def vocabulary_of(tokenizer: Path) -> Vocabulary:
    """The ordinary tokens of a `tokenizer.json`, given as the file or as its folder. Raises DatasetError."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise DatasetError(f"--tokenizer: {file} is not there; give a folder with a tokenizer.json, or that file")
    loaded = Tokenizer.from_file(str(file))
    special = loaded.get_added_tokens_decoder()
    ids = sorted(token for token in loaded.get_vocab(with_added_tokens=True).values() if token not in special)
    if not ids:
        raise DatasetError(f"--tokenizer: {file} has no ordinary tokens")

    def encode(text: str) -> Sequence[int]:
        found: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return found

    return Vocabulary(ids, loaded.decode, encode)


# --- lengths
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths uniform in [max(1, ratio x most), most]: SGLang's meaning of its range ratios (1.0 is fixed, 0.0 halves
    the mean).
    """

    most: int
    ratio: float

    def draw(self, rng: Random) -> int:
        return rng.randint(max(1, int(self.most * self.ratio)), self.most)

    def check(self, length: str, ratio: str) -> None:
        """Raises DatasetError that names the flags."""
        if not 0.0 <= self.ratio <= 1.0:
            raise DatasetError(f"{ratio} must be between 0 and 1, got {self.ratio}: 1 gives fixed lengths")
        if self.most < 1:
            raise DatasetError(f"{length} must be at least 1, got {self.most}")


def random_prompts(
    vocabulary: Vocabulary, count: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[Prompt]:
    """Random tokens, lengths as `Span` says (vLLM's flag of the same name means something else). Raises
    DatasetError.
    """
    inputs, outputs = Span(input_len, range_ratio), Span(output_len, range_ratio)
    inputs.check("--random-input-len", "--random-range-ratio")
    outputs.check("--random-output-len", "--random-range-ratio")
    rng = Random(seed)
    lengths = [(inputs.draw(rng), outputs.draw(rng)) for _ in range(count)]
    return [vocabulary.prompt(vocabulary.draw(rng, size), output) for size, output in lengths]


# --- reading
# -----------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file, gzipped or not. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as raw:
            yield from io.TextIOWrapper(io.BytesIO(raw.read()), encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number from 1, object) of each line that is not empty. Raises DatasetError."""
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DatasetError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, value


# --- when they are sent
# ------------------------------------------------------------------------------------------------


def schedule(
    prompts: Sequence[Prompt], rate: float, timestamps: bool, seed: int, burstiness: float = 1.0
) -> list[float]:
    """Seconds after the start at which each prompt is due; for later turns of a conversation the pauses count instead.

    timestamps: the trace's own times from its first one on. Else a renewal process of `rate` a second: gaps are Gamma
    of shape `burstiness` (1: Poisson, below 1: bursts, above 1: more regular), or all at once (inf). Raises
    DatasetError.
    """
    if timestamps:
        first = min(prompt.at for prompt in prompts)
        return [prompt.at - first for prompt in prompts]
    if rate == float("inf"):
        return [0.0] * len(prompts)
    if not rate > 0:
        raise DatasetError(f"--request-rate must be above 0 (or inf), got {rate}")
    if not burstiness > 0:
        raise DatasetError(f"--burstiness must be above 0, got {burstiness}: 1 is a Poisson process")
    rng, at, due = Random(seed + 1), 0.0, []
    for prompt in prompts:
        due.append(at)
        if prompt.after < 0:
            at += rng.expovariate(rate) if burstiness == 1.0 else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return due
