"""Reads the prompts, conversations and sampling parameters of Python code."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import msgspec

from thalweg.config.bundled import NAME, find_bundled
from thalweg.config.tree import keyword_options
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams, typed_params
from thalweg.engine.local import SubmitOptions
from thalweg.launch.resolve import resolve
from thalweg.server.parsing import convert, native_params
from thalweg.server.protocol import ChatRequest, NativeSampling
from thalweg.server.structured_output import (
    after_thought,
    call_grammar,
    grammar_of,
    limited_thought,
    outputs_grammar,
    with_budget,
)
from thalweg.text.grammar import check as check_grammar
from thalweg.text.retention import ThinkingRetention


class TextPrompt(TypedDict):
    """A text, in a dictionary."""

    prompt: str
    cache_salt: NotRequired[str]  # only prompts with the same salt share their cached prefixes


class TokensPrompt(TypedDict):
    """Token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # only shown in the result
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Mapping[str, Any]  # a dictionary has SGLang's names
ParamsOfEach = Params | Sequence[Params] | None
GrammarOfEach = Grammar | Sequence[Grammar]
CheckRequest = Callable[[Sequence[int], SamplingParams, Grammar], None]
PROMPT_KEYS = TextPrompt.__annotations__ | TokensPrompt.__annotations__


class TokenizedPrompt(NamedTuple):
    text: str | None  # None: it was given as token ids
    ids: tuple[int, ...]
    salt: int = 0  # of the prefix cache
    retention: CacheRetention = RETAIN_ALL
    place_grammar: Callable[[Grammar, SamplingParams], Grammar] = lambda grammar, _: grammar  # behind a thought


@dataclass(slots=True)
class PreparedRequest:
    """A request as the engine takes it."""

    request_id: str
    prompt: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    options: SubmitOptions
    warnings: tuple[str, ...]  # what the grammar does not enforce


class TextFrontend:
    """Tokenizer, chat encoder and resolved settings of `LLM` and `AsyncLLM`."""

    def __init__(self, model: str | None, config: Mapping[str, Any], progress: bool) -> None:
        options = keyword_options(**({} if model is None else {"model": model}), **config)
        if not options.model.model:
            options = keyword_options(model=find_bundled(NAME), **config)
        self.masks_calls = options.server.tool_strict_level != "off"
        self.resolved = resolve(options, progress=progress)
        self.tokenizer, self.format = self.resolved.reader(), self.resolved.chat
        self.retention = ThinkingRetention(self.format, self.tokenizer.mark_id)

    def tokenize(self, prompts: Prompts) -> list[TokenizedPrompt]:
        """Raises InvalidRequest naming the prompt and what is wrong with it."""
        what = "a text, token ids, a dictionary, or a list of such"
        many = _as_list(prompts, _is_number, "prompts", what)
        return [self._tokenize(one, _place("prompt", place, len(many))) for place, one in enumerate(many)]

    def _tokenize(self, prompt: Any, where: str) -> TokenizedPrompt:
        if isinstance(prompt, str):
            return self._plain(prompt, tuple(self.tokenizer.encode(prompt)))
        if not isinstance(prompt, Mapping):
            return self._plain(None, _token_ids(prompt, where))
        for key, value in prompt.items():
            if key not in PROMPT_KEYS and value is not None:
                raise InvalidRequest(f"{where}.{key}", f"is not known; a prompt has {', '.join(PROMPT_KEYS)}")
        text, ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
        if text is None and ids is None:
            raise InvalidRequest(where, "has neither prompt nor prompt_token_ids")
        for key, value in (("prompt", text), ("cache_salt", salt)):
            if not isinstance(value, str | None):
                raise InvalidRequest(f"{where}.{key}", f"must be a text, got {value!r}")
        read = tuple(self.tokenizer.encode(text or "")) if ids is None else _token_ids(ids, f"{where}.prompt_token_ids")
        digest = hashlib.blake2b((salt or "").encode("utf-8", "replace"), digest_size=7).digest()
        return self._plain(text, read, int.from_bytes(digest) if salt else 0)

    def _plain(self, text: str | None, ids: tuple[int, ...], salt: int = 0) -> TokenizedPrompt:
        """A prompt that no template made."""

        def place(grammar: Grammar, params: SamplingParams) -> Grammar:
            return limited_thought(self.tokenizer, grammar, ids) if grammar.thinking_budget >= 0 else grammar

        return TokenizedPrompt(text, ids, salt, place_grammar=place)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> TokenizedPrompt:
        """The prompt of a conversation, see `LLM.chat`. Raises InvalidRequest naming message and field."""
        if tools and (why := self.format.no_tools):
            raise InvalidRequest("tools", why)
        arguments = dict(chat_template_kwargs or {})
        text = self.format.encoder.encode(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=arguments,
        )
        continues = continue_final_message or not add_generation_prompt
        place = partial(self._place_in_chat, text, tools or (), arguments, continues)
        retention = self.retention.keep(text, arguments, bool(tools))
        return TokenizedPrompt(text, tuple(self.tokenizer.encode(text)), retention=retention, place_grammar=place)

    def _place_in_chat(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        continues: bool,
        grammar: Grammar,
        params: SamplingParams,
    ) -> Grammar:
        """The grammar behind the thought of a rendered prompt. Where none is asked for, calls are of these tools."""
        formats, find = self.format.formats, self.tokenizer.mark_id
        if not grammar.is_set and tools and self.masks_calls:
            body = ChatRequest(
                messages=[],
                tools=[dict(tool) for tool in tools],
                ignore_eos=params.ignore_eos,
                chat_template_kwargs=dict(arguments),
                continue_final_message=continues,
            )
            calls = call_grammar(body, formats, find, prompt)
            with suppress(InvalidRequest):  # what does not compile is not enforced
                _unenforced(calls)
                grammar = msgspec.structs.replace(calls, thinking_budget=grammar.thinking_budget)
        return after_thought(grammar, formats, find, prompt, arguments, continues)

    def prepare(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: ParamsOfEach,
        grammar: GrammarOfEach,
        priority: int | Sequence[int] | None,
        request_ids: Sequence[str],
        check: CheckRequest,
    ) -> list[PreparedRequest]:
        """One request for each prompt. check: of the engine. Raises InvalidRequest naming the field."""
        count, prepared = len(prompts), []
        params = _each(sampling_params, (SamplingParams, Mapping, type(None)), "sampling_params", count)
        grammars = _each(grammar, Grammar, "grammar", count)
        priorities = _each(priority, (int, type(None)), "priority", count)
        for place, (prompt, one, own, rank) in enumerate(zip(prompts, params, grammars, priorities, strict=True)):
            read, structure = self._params(one)
            if own.is_set and structure.is_set:
                raise InvalidRequest(structure.field, f"asks for a second structure beside {own.field}: give one")
            placed = structure if structure.is_set else own
            if read.thinking_token_budget is not None:
                placed = with_budget(placed, read.thinking_token_budget)
            placed = placed if placed.think_end_id >= 0 else prompt.place_grammar(placed, read)
            if not -(2**31) <= (rank or 0) < 2**31:
                raise InvalidRequest("priority", f"must fit 32 bits, got {rank}")
            try:
                check(prompt.ids, read, placed)
            except InvalidRequest as error:
                field = _place("prompt", place, count) if error.field == "prompt" else error.field
                raise InvalidRequest(field, error.message) from None
            options: SubmitOptions = {
                "grammar": placed,
                "retention": prompt.retention,
                "salt": prompt.salt,
                "priority": rank or 0,
            }
            warnings = _unenforced(placed) if placed.is_set else ()
            read = msgspec.structs.replace(read, structured_outputs=None, thinking_token_budget=None)
            prepared.append(PreparedRequest(request_ids[place], prompt.text, prompt.ids, read, options, warnings))
        return prepared

    def _params(self, params: Params | None) -> tuple[SamplingParams, Grammar]:
        """None: the model's defaults. A dictionary means what `sampling_params` of POST /generate means."""
        if params is None:
            return self.resolved.sampling, NO_GRAMMAR
        if isinstance(params, SamplingParams):
            read = typed_params(params)
            shape = read.structured_outputs
            return read, NO_GRAMMAR if shape is None else outputs_grammar(shape)
        native = convert(dict(params), NativeSampling, "sampling_params")
        native.refuse("sampling_params.")
        return native_params(native, self.resolved.sampling), grammar_of(native, where="sampling_params.")


@lru_cache(256)
def _unenforced(grammar: Grammar) -> tuple[str, ...]:
    """What the grammar does not enforce. Raises InvalidRequest if it does not compile."""
    return check_grammar(grammar)


def conversations(messages: Conversations) -> list[Sequence[Message]]:
    what = "a list of messages, or of such lists"
    return _as_list(messages, lambda value: isinstance(value, Mapping), "messages", what)


def _is_number(value: Any) -> bool:
    """Whether it is a token id, numpy's and torch's included."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def _place(name: str, place: int, count: int) -> str:
    return name if count == 1 else f"{name}s[{place}]"


def _token_ids(ids: Any, where: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except TypeError as error:
        raise InvalidRequest(where, f"must be a text or a list of token ids: {error}") from None


def _each(value: Any, kinds: Any, name: str, count: int) -> list[Any]:
    """One value for each prompt."""
    values = [value] * count if isinstance(value, kinds) else list(cast(Sequence[Any], value))
    if len(values) != count:
        raise InvalidRequest(name, f"{len(values)} given for {count} prompts")
    for place, one in enumerate(values):
        if not isinstance(one, kinds):
            raise InvalidRequest(f"{name}[{place}]", f"has the wrong type {type(one).__name__}")
    return values


def _as_list(values: Any, is_item: Callable[[Any], bool], name: str, what: str) -> list[Any]:
    """A text, a dictionary, or a sequence of items (token ids, messages) is a list of one. Raises InvalidRequest."""
    if isinstance(values, bytes) or not isinstance(values, str | Iterable):
        raise InvalidRequest(name, f"must be {what}, got {type(values).__name__}")
    values = values if isinstance(values, str | Mapping) else list(values)
    is_single = isinstance(values, str | Mapping) or any(map(is_item, values))
    return [values] if is_single else values
