"""Captures CUDA graphs one after the other into one pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from thalweg.core.errors import InsufficientMemory, UnsupportedConfig, is_out_of_memory
from thalweg.core.plan import SamplingNeeds

NEEDS = (
    SamplingNeeds(),
    SamplingNeeds(random=True),
    SamplingNeeds(random=True, truncated=True),
)  # draws that are captured; what edits logits before them runs eagerly
MOST = 64  # rows whose drafts are captured; more keep the device busier than Python
WARM_UPS = 2  # eager runs before a capture: kernels compile, libraries make their handles
WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # by bytes of an element; `view_of` gives the type back

T = TypeVar("T")


class GraphPool:
    """A memory pool, and the stream on which everything is captured. `torch.cuda.graph` would empty the allocator's
    cache at each of the hundreds of graphs. A replayed graph finds in the pool what its own kernels left there, and
    nothing else.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Everything inside runs on the pool's stream. what: is captured, for errors. Raises UnsupportedConfig, and
        InsufficientMemory.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            try:
                yield
            except RuntimeError as error:  # of CUDA, its allocator, cuBLAS
                kind = InsufficientMemory if is_out_of_memory(error) else UnsupportedConfig
                raise kind(
                    f"recording CUDA graphs of {what} failed ({_first_line(error)}); record fewer with"
                    " --cuda-graph-max-bs, leave more memory with --mem-fraction-static, or use --cuda-graph-mode none"
                ) from error
            finally:
                self._drop()  # also for an error of Python's in what was to be recorded
        torch.cuda.current_stream().wait_stream(self.stream)

    def begin(self) -> None:
        """What is launched from now on is captured, not run."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self.graph = graph

    def end(self) -> torch.cuda.CUDAGraph:
        assert self.graph is not None, "end() without begin()"
        graph, self.graph = self.graph, None
        graph.capture_end()
        return graph

    def _drop(self) -> None:
        """Ends a capture that failed, if there is one, so that the next can begin."""
        if self.graph is None:
            return
        graph, self.graph = self.graph, None
        try:
            graph.capture_end()
        except RuntimeError:  # CUDA repeats the error that is being raised; torch's allocator
            # still takes all memory of this stream from the pool
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self.pool)
            torch._C._cuda_releasePool(device, self.pool)
        self.pool = torch.cuda.graph_pool_handle()  # the failed capture keeps its own


def capture(
    pool: GraphPool, work: Callable[[], T], before: Callable[[], None] = lambda: None, warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, T]:
    """`work` as the pool's next graph, and what it leaves at every replay. It runs eagerly `warm_ups` times first.
    before: runs before each of them and before the capture, and is not captured.
    """
    for _ in range(warm_ups):
        before()
        work()
    before()
    pool.begin()
    left = work()
    return pool.end(), left


def view_of(x: Tensor) -> Tensor:
    """The same memory, not owned. What a graph leaves in its pool for the next stays there at every replay, but a
    tensor that owned it would keep later graphs from using its memory.
    """
    size = x.element_size()
    lent = _Lent()
    lent.__cuda_array_interface__ = {
        "shape": tuple(x.shape),
        "strides": tuple(stride * size for stride in x.stride()),
        "typestr": WORDS[size],
        "data": (x.data_ptr(), False),
        "version": 2,
    }
    return torch.as_tensor(lent, device=x.device).view(x.dtype)


class _Lent:
    """Memory as other libraries describe it to torch."""

    __cuda_array_interface__: dict[str, object]


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
