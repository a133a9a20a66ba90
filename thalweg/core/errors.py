"""Every error that Thalweg raises on purpose.

ThalwegError
├── InvalidRequest          the user's request is wrong: names the field; becomes a 400
│   └── ContextOverflow     prompt and output are longer than the context
├── Overloaded              the queue is full: becomes a 429
├── UnsupportedConfig       the resolver refuses: names what does not fit and the nearest that does
│   └── InsufficientMemory  memory is too small for it
├── CheckpointError         a checkpoint is missing, truncated, of the wrong shape, or unknown
│   └── WeightUpdateError   the weights that replaced the starting ones cannot be loaded again
├── RankLost                a process of those that share a model has ended or hangs: names it
├── NumericalError          the model computed NaN for a request: becomes a 500
└── EngineDead              the engine process is gone: becomes a 503
    └── EngineStarting      the engine does not serve yet
"""

from __future__ import annotations


class ThalwegError(Exception):
    """The root: `except ThalwegError` catches what Thalweg raises on purpose and nothing else."""


class InvalidRequest(ThalwegError, ValueError):
    """A request that cannot be served."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = (
            field  # path of the wrong field as the user wrote it, e.g. `messages[2].content`; "": the whole request
        )
        self.message = message

    def at(self, field: str) -> InvalidRequest:
        """The same error about a field with this name."""
        return InvalidRequest(field, self.message)


class ContextOverflow(InvalidRequest):
    """Prompt and output are longer than the context. Clients look for these words to shorten the conversation."""

    def __init__(self, field: str, context: int, prompt: str, output: str = "") -> None:
        """prompt: its size, such as "5000 tokens"; output: what is wrong with it, where the prompt alone would fit."""
        self.context, self.prompt, self.output = context, prompt, output
        has = f"{prompt} of prompt{output}"
        super().__init__(field, f"this model's maximum context length is {context} tokens, but this request has {has}")

    def at(self, field: str) -> ContextOverflow:
        return ContextOverflow(field, self.context, self.prompt, self.output)


class Overloaded(ThalwegError):
    """There are more requests than the configured limit: try again later."""


class UnsupportedConfig(ThalwegError):
    """No backend or setting fits the configuration; the message names the nearest that does."""


class InsufficientMemory(UnsupportedConfig):
    """The configuration does not fit into memory."""


OUT_OF_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"  # messages of CUDA, torch's allocators, cuBLAS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is too small. Torch raises RuntimeError for many reasons, so its message decides."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY):
        return True
    return isinstance(error, InsufficientMemory | MemoryError)


MAX_LINE = 1000  # characters


class CheckpointError(ThalwegError):
    """A checkpoint cannot be loaded; the message names the file or tensor and what was expected."""

    def __init__(self, message: str) -> None:
        """message: becomes one line; a long value of a file that it shows is cut."""
        line = " ".join(message.split("\n"))
        super().__init__(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} … ({len(line)} characters)")


class WeightUpdateError(CheckpointError):
    """The weights that replaced the starting ones cannot be loaded again."""


class RankLost(ThalwegError):
    """A process of those that share a model has ended, or takes no part in a step; the message names it."""


class NumericalError(ThalwegError):
    """The model computed NaN for a sequence."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN for this request, so there is no next token; others go on. Its"
            " checkpoint is damaged, or what it computes overflows: compare the files with their source, or try --dtype"
            " float32, or another --kv-cache-dtype"
        )


class EngineDead(ThalwegError):
    """The engine process ended; running requests are lost, the server restarts it."""


class EngineStarting(EngineDead):
    """The first engine, or a new one, is starting; it accepts requests once it serves."""


def engine_unavailable(state: str, reason: str) -> EngineDead:
    """The error to raise while no engine serves. state, reason: of `engine.client.EngineClient`."""
    return EngineStarting(reason) if state in ("starting", "restarting") else EngineDead(reason)
