"""The Python API: `LLM` runs an engine in the calling thread, `AsyncLLM` one in a process of its own."""

from thalweg.llm.async_llm import AsyncLLM, OutputStream
from thalweg.llm.llm import LLM, GenerationInterrupted
from thalweg.llm.outputs import CompletionOutput, Logprob, RequestOutput
from thalweg.llm.prompts import TextPrompt, TokensPrompt

__all__ = (
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "GenerationInterrupted",
    "Logprob",
    "OutputStream",
    "RequestOutput",
    "TextPrompt",
    "TokensPrompt",
)
