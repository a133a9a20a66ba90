"""Sampling parameters of a request and their limits."""

from __future__ import annotations

import copy
import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from thalweg.core.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_STOP_IDS = 16
MAX_EOS_IDS = 16  # of a model
MAX_LOGIT_BIAS = 1024
MAX_LOGPROB_IDS = 128
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**63 - 1  # of tokens: fits the wire and the device
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request: each sequence keeps a matcher for them
MAX_STOP_REGEXES, MAX_REGEX_CHARACTERS = 8, 1024  # of all expressions together
RANGES = {  # of parameters, both ends included
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, MAX_COUNT),
    "min_p": (0, 1),
    "repetition_penalty": (0.001, 100),  # logits divided by less could overflow float32
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "max_tokens": (0, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "n": (1, 128),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
RANGES_IN_WORDS = {
    "top_k": "-1 or 0 (off) or positive and fit 64 bits",
    "max_tokens": "at least 0 and fit 64 bits",
    "min_tokens": "at least 0 and fit 64 bits",
    "seed": "an integer of 64 bits",
}
GREEDY_BELOW = 1e-5  # dividing by a smaller temperature would overflow float32
OTHER_NAMES = {  # of SGLang and of older versions of vLLM
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **dict.fromkeys(
        ("guided_decoding", "json_schema", "regex", "ebnf", "choice", "structural_tag"), "structured_outputs"
    ),
}

# of vLLM: the value that changes nothing, and what to use in place of another one
NOT_HERE: Mapping[str, tuple[Any, str]] = {
    "detokenize": (True, "texts are always made; token_ids of an output are its tokens"),
    "spaces_between_special_tokens": (True, "the text is as the model's tokenizer decodes it"),
    "best_of": (1, "use n"),
    "use_beam_search": (False, "sampling draws tokens one by one; use n and logprobs"),
    "bad_words": ((), "use logit_bias with the token ids"),
    "allowed_token_ids": ((), "use structured_outputs or logit_bias"),
    "logits_processors": ((), "code of a request is never run"),
    "truncate_prompt_tokens": (None, "give the last ids of the prompt as prompt_token_ids"),
    "extra_args": (None, "no extensions are loaded"),
}
_COLLECTIONS = ("stop", "stop_regex", "stop_token_ids", "logit_bias", "logprob_token_ids")


class RequestOutputKind(enum.Enum):
    """What a stream of `AsyncLLM` yields."""

    CUMULATIVE = 0  # everything so far, each time
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM's `structured_outputs`; one of them."""

    json: Any = None  # a JSON schema: an object, or its text
    regex: str | None = None
    choice: list[str] | None = None  # the output is one of these texts
    grammar: str | None = None  # EBNF or Lark
    json_object: bool | None = None  # any JSON object
    structural_tag: Any = None  # an object, or its text
    disable_any_whitespace: bool | None = None  # JSON without whitespace between its parts, or with it


class _NamesNearest(type(msgspec.Struct)):  # type: ignore[misc]
    """A wrong keyword argument is a TypeError with the nearest right one; vLLM's that change nothing are dropped."""

    if not TYPE_CHECKING:  # the class's own signature counts

        def __call__(cls, *args: Any, **values: Any) -> Any:
            for name in [name for name in values if name not in cls.__struct_fields__]:
                harmless, instead = NOT_HERE.get(name, (None, ""))
                if not instead or values[name] and values[name] != harmless:
                    near = difflib.get_close_matches(name, cls.__struct_fields__, 1)
                    guess = OTHER_NAMES.get(name) or "".join(near)
                    nearest = f"did you mean {guess}?" if guess else f"there is {', '.join(cls.__struct_fields__)}"
                    raise TypeError(f"{cls.__name__} has no parameter {name!r}; {instead or nearest}")
                del values[name]
            return super().__call__(*args, **values)


class SamplingParams(msgspec.Struct, metaclass=_NamesNearest, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, by vLLM's names. Log-probabilities are the model's own: before temperature,
    penalties, bias and truncation.

    Lists become tuples, a single stop string a tuple of one, and a mapping of biases pairs. A wrong name is a
    TypeError. Types and ranges are checked with the request, which raises InvalidRequest. A request keeps the values
    that it was made with.
    """

    temperature: float = 1.0  # below GREEDY_BELOW is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1], relative to the largest probability
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, arXiv 1909.05858 §4.1)
    frequency_penalty: float = 0.0  # in [-2, 2], over the output only (OpenAI's definition)
    presence_penalty: float = 0.0  # in [-2, 2], over the output only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias in [-100, 100])
    seed: int | None = (
        None  # the random numbers are a pure function of (seed, output position); None: the engine draws one
    )
    max_tokens: int | None = None  # None: up to the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # matched by the front
    stop_regex: tuple[str, ...] = ()  # the text ends with the first match; matched by the front
    stop_token_ids: tuple[int, ...] = ()  # matched on the device
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # the text keeps the stop string or token that ended it
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None  # None: off; k: the chosen token and the k most likely ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logprob_token_ids: tuple[int, ...] = ()  # instead of the most likely ones: the tokens beside the chosen one
    # in Python; the engine receives these as a `Grammar`
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens after which a thought is ended; None and -1: no limit
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of `AsyncLLM`

    if TYPE_CHECKING:  # what is taken is wider than what is kept

        def __init__(
            self,
            *,
            temperature: float = 1.0,
            top_k: int = 0,
            top_p: float = 1.0,
            min_p: float = 0.0,
            repetition_penalty: float = 1.0,
            frequency_penalty: float = 0.0,
            presence_penalty: float = 0.0,
            logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = (),
            seed: int | None = None,
            max_tokens: int | None = None,
            min_tokens: int = 0,
            stop: str | Iterable[str] | None = (),
            stop_regex: str | Iterable[str] | None = (),
            stop_token_ids: Iterable[int] | None = (),
            ignore_eos: bool = False,
            include_stop_str_in_output: bool = False,
            skip_special_tokens: bool = True,
            n: int = 1,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            logprob_token_ids: Iterable[int] | None = (),
            structured_outputs: StructuredOutputsParams | None = None,
            thinking_token_budget: int | None = None,
            output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in _COLLECTIONS:
            if not isinstance(value := getattr(self, name), tuple):
                setattr(self, name, value)
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _as_tuple(value) if name in _COLLECTIONS else value)

    def clone(self) -> SamplingParams:
        return copy.copy(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def ends_by_text(self) -> bool:
        return bool(self.stop or self.stop_regex)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check(self, vocab: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range. `vocab` is the number of token ids."""
        for name, (low, high) in RANGES.items():
            if (value := getattr(self, name)) is not None:
                _between(name, value, low, high)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", "must be above 0 (and at most 1), got 0; temperature 0 is greedy decoding")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not all(self.stop):
            raise InvalidRequest("stop", "an empty string would stop everything; leave it out")
        counts = {
            "stop": (len(self.stop), MAX_STOPS, "strings"),
            "stop_regex": (len(self.stop_regex), MAX_STOP_REGEXES, "expressions"),
            "stop_token_ids": (len(self.stop_token_ids), MAX_STOP_IDS, "ids"),
            "logit_bias": (len(self.logit_bias), MAX_LOGIT_BIAS, "entries"),
            "logprob_token_ids": (len(self.logprob_token_ids), MAX_LOGPROB_IDS, "ids"),
        }
        for name, (count, most, what) in counts.items():
            if count > most:
                raise InvalidRequest(name, f"at most {most} {what}, got {count}")
        for name, limit in (("stop", MAX_STOP_CHARACTERS), ("stop_regex", MAX_REGEX_CHARACTERS)):
            if (characters := sum(map(len, getattr(self, name)))) > limit:
                raise InvalidRequest(name, f"at most {limit} characters together, got {characters}")
        by_name = {name: getattr(self, name) for name in ("stop_token_ids", "logprob_token_ids")}
        for name, tokens in (*by_name.items(), ("logit_bias", dict(self.logit_bias))):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise InvalidRequest(name, f"token id {token} is out of vocabulary, which has {vocab}")
        for _, bias in self.logit_bias:
            _between("logit_bias", bias, -100, 100)


def typed_params(given: SamplingParams) -> SamplingParams:
    """The same with checked types, of parameters that Python code made. Raises InvalidRequest that names the field."""
    values = msgspec.structs.asdict(given)
    kind = values.pop("output_kind")
    if not isinstance(kind, RequestOutputKind):
        raise InvalidRequest("output_kind", f"must be a RequestOutputKind, got {kind!r}")
    try:
        return msgspec.structs.replace(msgspec.convert(values, SamplingParams), output_kind=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise InvalidRequest(where.rstrip("`").split("[")[0], what[:1].lower() + what[1:]) from None


def _as_tuple(value: Any) -> Any:
    """What is no collection stays as it is, for `typed_params` to refuse."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    return tuple(value.items() if isinstance(value, Mapping) else value) if isinstance(value, Iterable) else value


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not, either
        words = RANGES_IN_WORDS.get(field, f"a number between {low} and {high}")
        raise InvalidRequest(field, f"must be {words}, got {value}")
