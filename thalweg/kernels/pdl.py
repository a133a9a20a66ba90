"""Programmatic dependent launch, from inside a kernel: see `launch.py` for its launch. Without PDL both do nothing."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Waits for the results of the kernel before this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Lets the next kernel start, once every program has called this or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for the results of the one before."""
    pdl_launch(PDL)
    pdl_wait(PDL)
