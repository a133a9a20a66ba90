"""Every error that Thalweg raises on purpose.

ThalwegError
├── InvalidRequest      the user's request is wrong: names the field; becomes a 400
├── Overloaded          the queue is full: becomes a 429
├── CannotServe         the resolver's no: names what does not fit and the nearest that does
│   └── NoRoom          memory is too small for it
├── CheckpointError     a checkpoint is missing, truncated, of the wrong shape, or unknown
├── NoNumbers           the model computed NaN for a request: becomes a 500
└── EngineDead          the engine process is gone: becomes a 503
    └── EngineStarting  it is not there yet
"""

from __future__ import annotations


class ThalwegError(Exception):
    """The root: `except ThalwegError` catches what Thalweg raises on purpose and nothing else."""


class InvalidRequest(ThalwegError):
    """A request that cannot be served as it stands.

    `field` is the path of the offending field as the user wrote it, e.g. `messages[2].content`; "" where it is the request as a whole.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class Overloaded(ThalwegError):
    """More requests than the configured limit: try again later."""


class CannotServe(ThalwegError):
    """No backend or setting fits what was asked; the message names the nearest that does."""


class NoRoom(CannotServe):
    """What was asked for does not fit into memory."""


MEMORY_WORDS = "out of memory", "can't allocate memory", "ALLOC_FAILED"  # of CUDA, torch's allocators, cuBLAS


def lacks_memory(error: BaseException) -> bool:
    """Whether this was raised because memory is too small; a RuntimeError of torch may be anything."""
    words = isinstance(error, RuntimeError) and any(one in str(error) for one in MEMORY_WORDS)
    return words or isinstance(error, NoRoom | MemoryError)


class CheckpointError(ThalwegError):
    """A checkpoint that cannot be loaded; the message names the file or tensor and what was expected."""


class NoNumbers(ThalwegError):
    """What the model computed for a sequence is not a number."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed no numbers (NaN) for this request, so there is no next token; others go on. Its checkpoint is damaged, or what it "
            "computes overflows: compare the files with their source, or try --dtype float32, or another --kv-cache-dtype"
        )


class EngineDead(ThalwegError):
    """The engine process ended; running requests are lost, the server restarts it."""


class EngineStarting(EngineDead):
    """The first engine, or a new one, is being started: requests are welcome once it serves."""


def not_serving(state: str, reason: str) -> EngineDead:
    """What is raised while there is no engine to ask. state, reason: as of `engine.front.Front`."""
    return EngineStarting(reason) if state == "starting" else EngineDead(reason)
