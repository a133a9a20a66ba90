"""Kernels that wait for words of other ranks compile for Hopper, and look as often as their source says: compilers have
duplicated such loads, and each copy is another way through the memory of the GPU. Needs Triton, but no GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
WORDS = {"WORDS": 3584, "BLOCK": 4096, "PHASE": 0, "PDL": True}


def compiled(kernel: Any, constants: dict[str, Any], pointers: dict[str, str], warps: int) -> dict[str, str]:
    """Its assemblies. pointers: types of the arguments that are addresses; eps is a float, all others integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: pointers.get(name, "fp32" if name == "eps" else "i32") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    made: dict[str, str] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert ".local" not in made["ptx"].replace(".local_depot", ""), "registers spill"
    return made


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kernel", "part", "looks"), [("_one_shot", 448, 1), ("_two_shot", 1792, 2)])
def test_each_look_of_a_sum_is_one_load(kernel: str, part: int, looks: int, ranks: int) -> None:
    """Each `receive` has a first load and one in its loop."""
    import triton

    from thalweg.kernels.all_reduce import triton as all_reduce

    parts = {"PART": part, "BLOCK_PART": triton.next_power_of_2(part), "W": ranks}
    constants = WORDS | parts | {"codes": None, "scales": None}
    pointers = dict.fromkeys(("partial", "x", "x_out", "rows_out", "state", "failed"), "*i32")
    pointers |= {"weight": "*fp32", "peers": "*i64"}
    made = compiled(vars(all_reduce)[kernel], constants, pointers, all_reduce.WARPS)
    assert made["ttgir"].count("isVolatile = true") == 2 * looks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kernel", "looks"), [("_dispatch", 2), ("_combine", 1)])
def test_each_look_of_an_exchange_is_one_load(kernel: str, looks: int, ranks: int) -> None:
    """At the number of each rank's rows, and at each of them."""
    from thalweg.kernels.exchange import triton as exchange

    constants = WORDS | {"W": ranks} | ({"MARKED": 9} if kernel == "_dispatch" else {})
    pointers = dict.fromkeys(("x", "results", "places", "counts", "counts_out", "state", "failed"), "*i32")
    pointers |= {"goes": "*i1", "peers": "*i64", "out": "*i32" if kernel == "_dispatch" else "*fp32"}
    made = compiled(vars(exchange)[kernel], constants, pointers, 8)
    assert made["ttgir"].count("isVolatile = true") == 2 * looks * ranks
