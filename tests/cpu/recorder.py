"""CUDA graphs without a GPU: a recorder of PyTorch operations, which a replay runs again on the same memory. Kernels
are their references. A capture that synchronizes with the device or holds host values fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from thalweg.engine.worker import ThreadStream
from thalweg.layers.moe import Experts
from thalweg.runner import captured, draft_graphs, graphs, piecewise

ASKS = {
    "item",
    "is_nonzero",
    "equal",
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "lift_fresh",
    "unique_dim",
    "_unique2",
}


class Recording(TorchDispatchMode):
    """The operations that ran in it; `replay` runs them again, on the same memory."""

    replays = 0  # of all recordings

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch.compile there is nothing to keep away; loading it takes most of a second of every process."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        Recording.replays += 1
        for function, args, kwargs, out in self.operations:
            again = function(*args, **kwargs)
            if isinstance(again, torch.ScriptObject):  # a collective in flight, which fills a tensor that it was given
                again.wait()
                continue
            for held, one in zip(_tensors(out), _tensors(again), strict=True):
                if held.data_ptr() != one.data_ptr():
                    held.copy_(one)


class Strict(Recording):
    """As of a CUDA graph: nothing may wait for the device, and no number of the host may come along that another replay
    would need to be another.
    """

    def __init__(self, block: str = "") -> None:
        super().__init__()
        self.block, self.read, self.made = block, set[int](), set[int]()  # storages

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        constant = (
            name == "lift_fresh" and not args[0].dim()
        )  # a number that stands in the program: kernels get it as it is
        assert constant or name not in ASKS, function
        chosen = args[1] if name in ("index", "index_put_") else ()
        masks = [one for one in chosen if one is not None and one.dtype == torch.bool]
        assert not masks, "how many a mask has is asked of the device"
        given = {storage(one) for one in _tensors([*args, *(kwargs or {}).values()])}
        self.read |= given - self.made
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.made |= {storage(one) for one in _tensors(out)} - given - self.read
        return out


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [tensor for one in out for tensor in _tensors(one)] if isinstance(out, (tuple, list)) else []


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class GraphPool:
    """See `runner.graph_pool.GraphPool`."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.block = ""
        POOLS.append(self)

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        self.block = what
        yield

    def begin(self) -> None:
        self.recordings.append(Strict(self.block))
        self.recordings[-1].__enter__()

    def end(self) -> Recording:
        self.recordings[-1].__exit__(None, None, None)
        return self.recordings[-1]


POOLS: list[GraphPool] = []


@contextmanager
def recorded_launches() -> Iterator[None]:
    """Pieces of steps can be recorded: launches of interpreted kernels, too, are operations, which recordings replay
    with the same tensors and numbers.
    """
    from triton.runtime.interpreter import GridExecutor  # only where kernels are interpreted

    launch = GridExecutor.__call__

    def launch_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recording)]
        with _disable_current_modes():
            launch(self, *args, **kwargs)
        for mode in modes:
            mode.operations.append((launch, (self, *args), kwargs, ()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch_and_record)
        patch.setattr(piecewise, "view_of", lambda x: x)
        yield


def record_instead_of_capturing(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, `runner.graphs` records."""
    patch.setattr(graphs, "GraphPool", GraphPool)
    patch.setattr(captured, "view_of", lambda x: x)
    for one in (captured, draft_graphs):
        patch.setattr(one, "refill", lambda out, values: out.copy_(torch.tensor(values)))
    patch.setattr(Experts, "add_", _add_all_)
    patch.setattr(Experts, "partial", _partial_of_all)
    patch.setattr(ThreadStream, "submit_sampling", _submit_sampling)
    for name in ("synchronize", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda: None)


def _submit_sampling(self: ThreadStream, sample: Any, draft: Any) -> Any:
    """Copies results before a later step overwrites them, as the stream of a GPU does."""
    sampled = self.submit(sample)
    tokens = self.submit(lambda: _copy(sampled()))
    return tokens, self.submit(lambda: _copy(draft(sampled())))


def _copy(result: Any) -> Any:
    if result is None:
        return None
    values = {one.name: getattr(result, one.name) for one in fields(result)}
    return replace(result, **{name: x.clone() for name, x in values.items() if isinstance(x, Tensor)})


def _add_all_(self: Experts, out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
    """The experts without asking which of them there are. An id of their number is none."""
    count = len(self.w13)
    gate_TEI, up_TEI = torch.einsum("th,eih->tei", x_TH, self.w13).chunk(2, -1)
    y_TEH = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate_TEI) * up_TEI, self.w2)
    share_TE = torch.zeros(len(x_TH), count + 1).scatter_add_(1, ids_TK.clamp(max=count), weights_TK)
    out_TH += torch.einsum("te,teh->th", share_TE[:, :count], y_TEH)


def _partial_of_all(self: Experts, ids_TK: Tensor, weights_TK: Tensor, x_TH: Tensor) -> Tensor:
    out_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
    _add_all_(self, out_TH, x_TH, weights_TK, ids_TK)
    return out_TH
