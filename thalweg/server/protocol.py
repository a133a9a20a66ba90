"""Request bodies of the OpenAI and native routes.

Undeclared fields are ignored. Fields that would change the result and are not supported are refused. A null means
"not given", as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from thalweg.core.sampling import StructuredOutputsParams
from thalweg.server.refused import AdminRefusedFields, GenerationRefusedFields

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None  # adds a last chunk with the usage and without choices
    continuous_usage_stats: bool | None = None  # beside include_usage: every chunk has the usage so far


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str  # "text", "json_object", "json_schema" or "structural_tag"
    json_schema: dict[str, Any] | None = None  # {"name", "schema", "strict"}
    schema: dict[str, Any] | None = None  # of a json_object
    format: dict[str, Any] | None = None  # of a structural tag
    structures: list[Any] | None = None  # of one in the older form, as triggers
    triggers: list[str] | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """DeepSeek's `thinking`."""

    type: Literal["enabled", "disabled"]


class StructuredFields(GenerationRefusedFields, kw_only=True):
    """The structure of the output: at most one of these. A schema or structural tag may be an object or JSON text."""

    REFUSED = GenerationRefusedFields.__struct_fields__

    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputsParams | None = None


class SamplingFields(StructuredFields, kw_only=True):
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None  # the text ends with the first match
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None


class OpenAIRequest(SamplingFields, kw_only=True):
    """Fields of both OpenAI routes. Hints, such as `prediction`, are not declared: they change no result."""

    REFUSED = tuple(name for name in GenerationRefusedFields.__struct_fields__ if name != "logprob_token_ids")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Any = None
    max_tokens: int | None = None
    # extensions
    max_new_tokens: int | None = None  # the same, under SGLang's name
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    logprob_token_ids: list[int] | None = None  # instead of the most likely ones
    return_tokens_as_token_ids: bool | None = None  # tokens in log-probabilities are written `token_id:N`
    thinking_token_budget: int | None = None  # tokens after which a thought is ended; -1: no limit
    truncate_prompt_tokens: int | None = None  # keeps so many tokens of a prompt; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are cut; default: left
    return_draft_usage: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    rid: str | None = None  # the request's id, in place of the header's


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions."""

    REFUSED = tuple(name for name in OpenAIRequest.REFUSED if name != "suffix")

    prompt: Prompt  # a text, texts, token ids, or lists of token ids
    suffix: str | None = None  # the text after the one to generate
    echo: bool | None = None
    add_special_tokens: bool | None = None  # false: the prompt's text gets no BOS
    logprobs: int | None = None  # the number of alternatives
    best_of: int | None = None


TokenBudget = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReasoningOption(msgspec.Struct, kw_only=True):
    """OpenRouter's `reasoning`."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: TokenBudget | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions. The chat encoder checks messages and tools."""

    REFUSED = (*OpenAIRequest.REFUSED, "best_of")
    HARMLESS: ClassVar[dict[str, Any]] = {**OpenAIRequest.HARMLESS, "best_of": 1}

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None  # 0 and 1 are false and true
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_strict_level: Literal["off", "parameter"] | None = None  # in place of the server's
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: ThinkingSwitch | None = None
    reasoning_effort: str | None = None  # "none" turns thinking off, any other on; templates with levels read it
    reasoning: ReasoningOption | None = None  # effort, on or off, and the budget of tokens in an object
    best_of: Any = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None  # false: thoughts are left out of the answer
    echo: bool | None = None  # the content begins with that of the last message, if it is continued
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class NativeSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of POST /generate."""

    REFUSED = (*SamplingFields.REFUSED, "spaces_between_special_tokens")
    HARMLESS: ClassVar[dict[str, Any]] = {**SamplingFields.HARMLESS, "spaces_between_special_tokens": True}

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None  # tokens from one event of a stream to the next, at least
    spaces_between_special_tokens: Any = None


class GenerateRequest(StructuredFields, kw_only=True):
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
    """POST /abort. Either rid, the id of one request, or abort_all."""

    rid: str = ""
    abort_all: bool = False


class UpdateWeightsRequest(AdminRefusedFields, kw_only=True):
    """POST /update_weights_from_disk."""

    REFUSED = AdminRefusedFields.__struct_fields__

    model_path: str  # a folder on the engine's machine with all or some of the model's tensors
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


class StartProfileRequest(AdminRefusedFields, kw_only=True):
    """POST /start_profile."""

    REFUSED = AdminRefusedFields.__struct_fields__

    output_dir: str | None = None  # within the server's --profile-folder, which is the default
    num_steps: int | None = None  # after which it ends by itself
    activities: list[Literal["CPU", "GPU"]] | None = None  # default: both
    record_shapes: bool | None = None
    with_stack: bool | None = None


class DumpExpertsRequest(msgspec.Struct, kw_only=True):
    """POST /dump_expert_distribution_record."""

    output_dir: str | None = None  # within the server's --profile-folder, which is the default


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
