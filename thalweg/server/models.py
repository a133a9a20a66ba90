"""Routes about the model: its names in OpenAI's and Anthropic's form, and what its checkpoint says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

import msgspec
from starlette.requests import Request

from thalweg.server.context import AppContext
from thalweg.server.errors import ANTHROPIC_HEADER


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "thalweg"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class AnthropicModel(msgspec.Struct):
    """Anthropic's ModelInfo. The names of this server are no Claude models, so they belong to no line."""

    id: str
    display_name: str
    created_at: str  # RFC 3339: when this server started
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: dict[str, Any]
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None


class AnthropicModelList(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


class ModelInfo(TypedDict):
    """SGLang's fields."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str | None
    architectures: list[str] | None


async def models(ctx: AppContext, request: Request) -> ModelList | AnthropicModelList:
    """The names of the model, in Anthropic's form for its clients."""
    if ANTHROPIC_HEADER not in request.headers:
        return ModelList([_card(ctx, name) for name in ctx.names])
    return AnthropicModelList([_anthropic_card(ctx, name) for name in ctx.names], ctx.names[0], ctx.names[-1])


async def model(ctx: AppContext, request: Request) -> ModelCard | AnthropicModel:
    given = request.path_params["name"]
    name = ctx.names[0] if given == "default" else ctx.served_name(given)
    return _anthropic_card(ctx, name) if ANTHROPIC_HEADER in request.headers else _card(ctx, name)


def _card(ctx: AppContext, name: str) -> ModelCard:
    return ModelCard(name, int(ctx.started), ctx.path, ctx.context_len)


def _anthropic_card(ctx: AppContext, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(int(ctx.started), UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(name, name, created, ctx.context_len, ctx.context_len, _capabilities(ctx))


def _capabilities(ctx: AppContext) -> dict[str, Any]:
    no, thinks = {"supported": False}, {"supported": ctx.chat.formats.reasoning is not None}
    return {
        **dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), no),
        "context_management": {
            **no,
            **dict.fromkeys(("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112")),
        },
        "effort": {**no, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), no)},
        "server_tools": {**no, "code_execution": no, "web_search": no},
        "structured_outputs": {"supported": True},
        "thinking": {
            **thinks,
            "types": {
                "disabled": {"supported": True},
                **dict.fromkeys(("enabled", "adaptive", "between_tools"), thinks),
            },
        },
    }


async def model_info(ctx: AppContext, request: Request) -> ModelInfo:
    """The model, under SGLang's names."""
    return {
        "model_path": ctx.path,
        "tokenizer_path": ctx.path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": ctx.front.weight_version,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": ctx.config.get("model_type"),
        "architectures": ctx.config.get("architectures"),
    }


async def tokenizer_info(ctx: AppContext, request: Request) -> dict[str, Any]:
    """tokenizer_config.json without paths of files, with the class of its tokenizer and the chat template in use."""
    info: dict[str, Any] = {
        name: value for name, value in ctx.tokenizer_config.items() if name not in ("vocab_file", "merges_file")
    }
    info.setdefault("tokenizer_class", type(ctx.front.tokenizer).__name__)
    if (template := ctx.chat.encoder.templates.get("default")) is not None:
        info["chat_template"] = template.source
    return info
