"""Kernels that wait for words of other ranks compile for Hopper, and look as often as their source says: compilers have
duplicated such loads, and each copy is another way through the memory of the GPU. Needs Triton, but no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import re
from math import prod
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
WORDS = {"WORDS": 3584, "BLOCK": 4096, "PHASE": 0, "PDL": True}
LAYOUT = r"(#blocked\d*) = #ttg.blocked<{sizePerThread = (.*?), threadsPerWarp = (.*?), warpsPerCTA = (.*?), order"


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


def looks_of(code: str) -> int:
    """How many loads wait for other ranks. Each word of their tiles is in one thread: the loop that waits for a tile
    asks one thread for each word, and other threads with the same word may not have seen it yet. Of a tile of one word
    every thread asks itself.
    """
    layouts = {name: [json.loads(part) for part in parts] for name, *parts in re.findall(LAYOUT, code)}
    tiles = re.findall(r"isVolatile = true.* : tensor<([\dx]+)x!tt.ptr<i64>, (#\w+)>", code)
    assert len(tiles) == code.count("isVolatile = true")
    for shape, layout in ((shape, layout) for shape, layout in tiles if shape != "1"):
        held = [prod(sizes) for sizes in zip(*layouts[layout], strict=True)]
        assert all(size <= int(rows) for size, rows in zip(held, shape.split("x"), strict=True)), (shape, held)
    return len(tiles)


def compiled_sum(kernel: str, words: int, part: int, ranks: int) -> dict[str, str]:
    import triton

    from thalweg.kernels.all_reduce import triton as all_reduce

    sizes = {"WORDS": words, "BLOCK": triton.next_power_of_2(words)}
    parts = {"PART": part, "BLOCK_PART": triton.next_power_of_2(part), "W": ranks}
    constants = WORDS | sizes | parts | {"codes": None, "scales": None}
    pointers = dict.fromkeys(("partial", "x", "x_out", "rows_out", "failed"), "*i32")
    pointers |= {"weight": "*fp32", "peers": "*i64", "state": "*i64"}
    warps = all_reduce.warps_for(ranks, sizes["BLOCK"], parts["BLOCK_PART"], kernel == "_two_shot")
    return compiled(vars(all_reduce)[kernel], constants, pointers, warps)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kernel", "part", "looks"), [("_one_shot", 448, 1), ("_two_shot", 1792, 2)])
def test_each_look_of_a_sum_is_one_load(kernel: str, part: int, looks: int, ranks: int) -> None:
    """Each `receive` has a first load and one in its loop."""
    assert looks_of(compiled_sum(kernel, 3584, part, ranks)["ttgir"]) == 2 * looks


@pytest.mark.parametrize(("words", "part"), [(64, 64), (1024, 128), (4096, 512)])
@pytest.mark.parametrize(("kernel", "looks"), [("_one_shot", 1), ("_two_shot", 2)])
def test_each_word_of_narrow_rows_is_in_one_thread(kernel: str, looks: int, words: int, part: int) -> None:
    """Rows of models that are narrower than a program has threads for; with parts as small as they get."""
    assert looks_of(compiled_sum(kernel, words, part, 2)["ttgir"]) == 2 * looks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("words", "block"), [(3584, 4096), (33, 64)])
@pytest.mark.parametrize(("kernel", "looks"), [("_dispatch", 2), ("_combine", 1)])
def test_each_look_of_an_exchange_is_one_load(kernel: str, looks: int, words: int, block: int, ranks: int) -> None:
    """At the number of each rank's rows, and at each of them."""
    from thalweg.kernels.exchange import triton as exchange

    constants = WORDS | {"W": ranks, "WORDS": words, "BLOCK": block} | ({"MARKED": 9} if kernel == "_dispatch" else {})
    pointers = dict.fromkeys(("x", "results", "places", "counts", "counts_out", "failed"), "*i32")
    pointers |= {"goes": "*i1", "peers": "*i64", "state": "*i64", "out": "*i32" if kernel == "_dispatch" else "*fp32"}
    made = compiled(vars(exchange)[kernel], constants, pointers, exchange.warps_for(block))
    assert looks_of(made["ttgir"]) == 2 * looks * ranks
