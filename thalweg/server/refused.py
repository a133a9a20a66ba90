"""Fields of other servers' requests that would change the result and that this server refuses, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from thalweg.core.errors import InvalidRequest

# why, or what to use; in the errors and in the tables of the API pages
REASONS: Mapping[str, str] = {
    "suffix": "only `/v1/completions` has it",
    "use_beam_search": "sampling draws tokens one by one; use `n` and log-probabilities",
    "best_of": "use `n`; 1 is accepted",
    "bad_words": "use `logit_bias` with the token ids",
    "logits_processors": "code of a request is never run",
    "custom_logit_processor": "code of a request is never run",
    "prompt_embeds": "prompts are texts or token ids",
    "input_embeds": "prompts are texts or token ids",
    "image_data": "models here read text",
    "video_data": "models here read text",
    "audio_data": "models here read text",
    "lora_path": "no adapters in this version",
    "return_hidden_states": "hidden states stay on the device",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`; `none` is accepted",
    "audio": "models here write text",
    "modalities": 'models here write text; `["text"]` is accepted',
    "web_search_options": "the server runs no tools",
    "documents": "put them into a message",
    "chat_template": "set it when the server starts (`--chat-template`)",
    "allowed_token_ids": "use `choice`, `regex` or `logit_bias`",
    "token_ids_logprob": "use `top_logprobs_num`",
    "logprob_token_ids": "use `top_logprobs_num`",
    "vllm_xargs": "no extensions are loaded",
    "custom_params": "no custom processors are loaded",
    "mcp_servers": "the server runs no tools",
    "container": "the server runs no tools",
    "thread": "send the whole conversation; the SDK's `tool_runner` then does",
    "conversation": "use `previous_response_id`",
    "prompt": "no prompts are stored on the server",
    "spaces_between_special_tokens": "the text is as the model's tokenizer decodes it; `true` is accepted",
    "keep_pause": "profiles and updates do not pause the engine",
    "is_async": "the answer comes when the update is done",
    "manifest": "the folder names the tensors",
    "start_step": "it starts at once",
    "profile_by_stage": "one trace has all steps",
    "profile_stages": "one trace has all steps",
    "profile_prefix": "the files are named by their time",
    "merge_profiles": "each rank has a file of its own",
}


class RefusedFields(msgspec.Struct, kw_only=True):
    """Base of bodies with fields that other servers have and this one refuses."""

    REFUSED: ClassVar[tuple[str, ...]] = ()
    HARMLESS: ClassVar[dict[str, Any]] = {}  # values of refused fields that change nothing

    def refuse(self, where: str = "") -> None:
        """Raises InvalidRequest naming the first refused field that is on (null, false and empty are off)."""
        for name in self.REFUSED:
            value = getattr(self, name)
            if value and value != self.HARMLESS.get(name):
                raise InvalidRequest(where + name, f"is not supported here: {REASONS[name]}")


class GenerationRefusedFields(RefusedFields, kw_only=True):
    HARMLESS: ClassVar[dict[str, Any]] = {"modalities": ["text"], "function_call": "none"}

    suffix: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
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
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    allowed_token_ids: Any = None
    token_ids_logprob: Any = None
    logprob_token_ids: Any = None
    vllm_xargs: Any = None
    custom_params: Any = None


class AdminRefusedFields(RefusedFields, kw_only=True):
    """Fields of SGLang's admin routes that are refused here."""

    keep_pause: Any = None
    is_async: Any = None
    manifest: Any = None
    start_step: Any = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    profile_prefix: Any = None
    merge_profiles: Any = None
