"""Sampling parameters of a request and their limits."""

from __future__ import annotations

import math

import msgspec

from thalweg.core.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_STOP_IDS = 16
MAX_EOS_IDS = 16  # of a model
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**63 - 1  # of tokens: fits the wire and the device
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request: each sequence keeps a matcher for them
GREEDY_BELOW = 1e-5  # dividing by a smaller temperature would overflow float32


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one sequence. Log-probabilities are the model's own: before temperature, penalties, bias
    and truncation.
    """

    temperature: float = 1.0  # below GREEDY_BELOW is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1], relative to the largest probability
    repetition_penalty: float = 1.0  # > 0, over prompt and output (CTRL, arXiv 1909.05858 §4.1)
    frequency_penalty: float = 0.0  # in [-2, 2], over the output only (OpenAI's definition)
    presence_penalty: float = 0.0  # in [-2, 2], over the output only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias in [-100, 100])
    seed: int | None = (
        None  # the random numbers are a pure function of (seed, output position); None: the engine draws one
    )
    max_tokens: int | None = None  # None: up to the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # matched by the front
    stop_token_ids: tuple[int, ...] = ()  # matched on the device
    ignore_eos: bool = False
    include_stop: bool = False  # the text keeps the stop string or token that ended it
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None  # None: off; k: the chosen token and the k most likely ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check(self, vocab: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range. `vocab` is the number of token ids."""
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", "must be above 0 (and at most 1), got 0; temperature 0 is greedy decoding")
        if not -1 <= self.top_k <= MAX_COUNT:
            raise InvalidRequest("top_k", f"must be -1 or 0 (off) or positive and fit 64 bits, got {self.top_k}")
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty", "must be above 0, got 0; 1 is off")
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_lengths()
        self._check_ids(vocab)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and not 0 <= self.max_tokens <= MAX_COUNT:
            raise InvalidRequest("max_tokens", f"must be at least 0 and fit 64 bits, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= MAX_COUNT:
            raise InvalidRequest("min_tokens", f"must be at least 0 and fit 64 bits, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not 1 <= self.n <= 128:
            raise InvalidRequest("n", f"must be between 1 and 128, got {self.n}")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed", f"must fit 64 bits, got {self.seed}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(name, f"must be between 0 and {MAX_LOGPROBS}, got {value}")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop", "an empty string would stop everything; leave it out")
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest("stop", f"at most {MAX_STOPS} strings, got {len(self.stop)}")
        if (characters := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_CHARACTERS} characters together, got {characters}")

    def _check_ids(self, vocab: int) -> None:
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_IDS} ids, got {len(self.stop_token_ids)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab:
                raise InvalidRequest("stop_token_ids", f"token id {token} is outside the vocabulary of {vocab}")
        for token, bias in self.logit_bias:
            if not 0 <= token < vocab:
                raise InvalidRequest("logit_bias", f"token id {token} is outside the vocabulary of {vocab}")
            _between("logit_bias", bias, -100.0, 100.0)


def _between(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(field, f"must be a number between {low:g} and {high:g}, got {value}")
