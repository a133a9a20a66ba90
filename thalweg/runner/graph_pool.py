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
)  # kinds of sampling that are captured; penalties, bias and masks before it run eagerly
MAX_CAPTURED_ROWS = 64  # rows for which drafts are captured; with more rows, Python is not the bottleneck
TYPESTR = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # by bytes of an element; `view_of` gives the type back

T = TypeVar("T")


class GraphPool:
    """A memory pool, and the stream on which everything is captured. `torch.cuda.graph` would empty the allocator's
    cache at each of the hundreds of graphs. Other graphs of the pool may overwrite the memory of a graph.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Runs the block on the pool's stream. what: name of what is captured, for errors. Raises UnsupportedConfig and
        InsufficientMemory.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            try:
                yield
            except RuntimeError as error:  # of CUDA, its allocator, cuBLAS
                kind = InsufficientMemory if is_out_of_memory(error) else UnsupportedConfig
                raise kind(
                    f"capturing CUDA graphs of {what} failed ({_first_line(error)}); capture fewer with"
                    " --cuda-graph-max-bs, leave more memory with --mem-fraction-static, or use --cuda-graph-mode none"
                ) from error
            finally:
                self._drop()  # also for an exception in the captured code
        torch.cuda.current_stream().wait_stream(self.stream)

    def begin(self) -> None:
        """Captures kernel launches from now on instead of running them."""
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
    pool: GraphPool,
    work: Callable[[], T],
    before: Callable[[], None] = lambda: None,
    warm_up: Callable[[], object] | None = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures `work` into the pool. → the graph and the outputs that each replay writes. `warm_up` runs eagerly first,
    which by default is `work`: a kernel is loaded, a library makes its handles. before: runs before both; it is not
    captured.
    """
    before()
    (warm_up or work)()
    before()
    pool.begin()
    outputs = work()
    return pool.end(), outputs


def view_of(x: Tensor) -> Tensor:
    """A tensor on the same memory that does not own it. The outputs of a graph stay in its pool, and a tensor that owns
    them would keep later graphs from using this memory.
    """
    size = x.element_size()
    borrowed = _BorrowedMemory()
    borrowed.__cuda_array_interface__ = {
        "shape": tuple(x.shape),
        "strides": tuple(stride * size for stride in x.stride()),
        "typestr": TYPESTR[size],
        "data": (x.data_ptr(), False),
        "version": 2,
    }
    return torch.as_tensor(borrowed, device=x.device).view(x.dtype)


class _BorrowedMemory:
    """Memory with the CUDA array interface."""

    __cuda_array_interface__: dict[str, object]


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
