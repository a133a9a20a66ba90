"""Request bodies of every route, as msgspec structs: what is not declared here is ignored, what cannot be honoured is
refused.

A null means "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from thalweg.core.errors import InvalidRequest

Prompt = str | list[str | int | list[int]]

_QUIET = {"modalities": ["text"], "function_call": "none"}


class Refusable(msgspec.Struct, kw_only=True):
    """Fields that other servers have and that change the result: decoded so that they can be refused, never
    honoured.
    """

    HONOURED: ClassVar[frozenset[str]] = frozenset()  # those of them that this body's route can do

    suffix: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    stop_regex: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None

    def refuse(self, where: str = "") -> None:
        """Raises InvalidRequest naming the first of these fields that is on (null, false and empty are off)."""
        for name in Refusable.__struct_fields__:
            value = getattr(self, name)
            if value and value != _QUIET.get(name) and name not in self.HONOURED:
                raise InvalidRequest(where + name, "is not supported here and would change the result: leave it out")


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: one more chunk at the end, without choices, with the usage."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """type: "text", "json_object", "json_schema" (json_schema: {"name", "schema", "strict"}) or "structural_tag"
    (structures, triggers).
    """

    type: str
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`; one of them."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Structured(Refusable, kw_only=True):
    """What the output must match: one of these at most. A schema or structural tag may be given as an object or as its
    JSON text.
    """

    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class Common(Structured, kw_only=True):
    """What both OpenAI routes understand; from `top_k` on they are extensions. rid: the request's id, in place of the
    header's.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    user: Any = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_draft_usage: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    rid: str | None = None

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options is not None and self.stream_options.include_usage)


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of token ids. logprobs: the legacy number of
    alternatives. suffix: what stands behind the text that is asked for.
    """

    HONOURED: ClassVar[frozenset[str]] = frozenset({"suffix"})

    prompt: Prompt
    suffix: str | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions. messages and tools are checked by the chat encoder, which names what is wrong in
    them.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class NativeSampling(Structured, kw_only=True):
    """`sampling_params` of POST /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(Structured, kw_only=True):
    """POST /generate. Exactly one of text and input_ids; a list of either is a batch, answered by a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort. rid: the id of one request; abort_all: every request of this server."""

    rid: str = ""
    abort_all: bool = False


class Maintenance(msgspec.Struct, kw_only=True):
    """Fields that SGLang's admin routes have and that would change what is done: decoded so that they can be
    refused.
    """

    keep_pause: Any = None
    is_async: Any = None
    manifest: Any = None
    start_step: Any = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    profile_prefix: Any = None
    merge_profiles: Any = None

    def refuse(self) -> None:
        """Raises InvalidRequest naming the first of these fields that is on (null, false and empty are off)."""
        for name in Maintenance.__struct_fields__:
            if getattr(self, name):
                raise InvalidRequest(name, "is not supported here and would change what is done: leave it out")


class UpdateWeightsRequest(Maintenance, kw_only=True):
    """POST /update_weights_from_disk. model_path: a folder on the engine's machine with all or some of the model's
    tensors.
    """

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


class StartProfileRequest(Maintenance, kw_only=True):
    """POST /start_profile. output_dir: within the server's --profile-folder, and that itself where it is not given.
    num_steps: after which it ends by itself. activities: "CPU", "GPU" (both).
    """

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize. Either prompt (a text or texts) or messages (as for chat completions)."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None
