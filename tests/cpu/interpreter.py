"""Triton's interpreter, of Triton 3.6: ready for new numpy, and three to four times as quick.

It wraps all of `triton.language` anew for every launch and for every call of a device function, describes the shape of
every value as text, compares shapes as values of the language, and looks for overflows that it does not report. Without
these it computes the same.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def prepare() -> None:
    """Call it once, before the first launch, in a process that runs kernels in the interpreter only."""
    patches = vars(interpreter)
    patch_tensor, numpy_type = patches["_patch_lang_tensor"], cache(patches["_get_np_dtype"])
    patch_once, nothing = cache(patches["_patch_lang"]), patches["_LangPatchScope"]()

    def patch_index(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one element, which numpy 2.4 no longer converts to `int`."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_and_keep(function: Any) -> Any:
        """The language stays as the interpreter needs it: a launch restores nothing."""
        patch_once(function)
        return nothing

    def type_of(dtype: Any) -> np.dtype[Any]:
        is_pointer = isinstance(dtype.scalar, tl.pointer_type)
        return np.dtype(np.uint64) if is_pointer else numpy_type(dtype.scalar)

    patches.update(_patch_lang_tensor=patch_index, _patch_lang=patch_and_keep, _get_np_dtype=type_of)
    for name, init in (("tensor", _tensor), ("block_type", _block_type), ("tuple_type", _tuple_type)):
        vars(tl.core)[name].__init__ = init
    vars(tl.core)["block_type"].name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    vars(tl.core)["tuple_type"].name = property(lambda self: f"[{','.join(map(str, self.types))}]")
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operands: None  # `device_assert` ignores what it finds
    tl.core.dtype.__eq__ = _same_type


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """As `TritonSemantic.broadcast_impl_value`."""
    shapes = [() if x.type is x.type.scalar else tuple(x.type.shape) for x in (lhs, rhs)]
    if shapes[0] == shapes[1]:
        return lhs, rhs
    shape = _common_shape(*shapes)
    lhs, rhs = (x if own == shape else _expanded(x, shape) for x, own in zip((lhs, rhs), shapes, strict=True))
    return lhs, rhs


def _expanded(x: Any, shape: tuple[int, ...]) -> Any:
    data = np.broadcast_to(x.handle.data, shape)
    return tl.tensor(interpreter.TensorHandle(data, x.dtype), tl.block_type(x.dtype, shape))


@cache
def _common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*shapes)


def _same_type(self: Any, other: Any) -> bool:
    """As `tl.dtype.__eq__`."""
    if self is other:
        return True
    other = other.value if isinstance(other, tl.constexpr) else other
    return isinstance(other, tl.dtype) and self.name == other.name


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """As `tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.numel, self.shape = _sizes(tuple(type.shape)) if type.is_block() else _scalar()


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """As `tl.block_type.__init__`."""
    self.element_ty = element_ty
    self.shape, numel, _ = _sizes(tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape]))
    self.numel = numel.value


def _tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    """As `tl.tuple_type.__init__`."""
    self.types, self.fields = types, fields or [""] * len(types)


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The same values for all blocks of a shape: its sizes, their product, and the sizes as constants."""
    if not shape:
        raise TypeError("a block has a shape")
    validate_block_shape(list(shape))
    return tl.tuple(shape), tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


@cache
def _scalar() -> tuple[Any, Any, Any]:
    return tl.tuple(()), tl.constexpr(1), tl.tuple(())
