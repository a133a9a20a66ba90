"""The sum over ranks compiles for Hopper, and looks for words of other ranks as often as its source says: compilers have
duplicated such loads, and each copy is another way through the memory of the GPU. Needs Triton, but no GPU.
"""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kernel", "part", "looks"), [("_one_shot", 448, 1), ("_two_shot", 1792, 2)])
def test_each_look_is_one_load(kernel: str, part: int, looks: int, ranks: int) -> None:
    """Each `_receive` has a first load and one in its loop."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thalweg.kernels.all_reduce import triton as all_reduce

    constants = {
        "codes": None, "scales": None, "WORDS": 3584, "BLOCK": 4096, "PART": part,
        "BLOCK_PART": triton.next_power_of_2(part), "W": ranks, "PHASE": 0, "PDL": True,
    }  # fmt: skip
    pointers = dict.fromkeys(("partial", "x", "x_out", "rows_out", "state"), "*i32") | {
        "weight": "*fp32",
        "peers": "*i64",
    }
    names = vars(all_reduce)[kernel].arg_names
    types = (
        {name: pointers.get(name, "i32") for name in names} | {"eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    )
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers}
    source = ASTSource(vars(all_reduce)[kernel], types, constexprs=constants, attrs=aligned)
    options = {"num_warps": all_reduce.WARPS, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["ttgir"].count("isVolatile = true") == 2 * looks
    assert ".local" not in made.asm["ptx"].replace(".local_depot", ""), "registers spill"
