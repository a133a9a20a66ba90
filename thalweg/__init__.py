"""Thalweg: an LLM inference engine, DeepSeek-first. `docs/python.md` shows its use from Python,
`docs/architecture.md` the path of a token.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thalweg.core.grammar import Grammar
    from thalweg.core.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from thalweg.llm import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput, TextPrompt, TokensPrompt

__all__ = (
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Grammar",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
)


def __getattr__(name: str) -> object:
    """Imports a public name at its first use: `import thalweg` alone loads no torch."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    rooms = {"Grammar": "core.grammar"} | dict.fromkeys(
        ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"), "core.sampling"
    )
    value: object = getattr(importlib.import_module(f"thalweg.{rooms.get(name, 'llm')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
