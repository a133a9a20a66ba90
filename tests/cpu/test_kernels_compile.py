"""Every kernel of a step compiles for Hopper with all its constants, and once for each other GPU that docs/support.md
names; `make kernels` compiles all launches for each. Needs Triton, but no GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SHAPES = "sparse v2-lite:plain v3:plain v3-w4afp8:plain qwen3:plain"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("target", "each"), [("sm_90", "constants"), ("sm_100", "kernel"), ("gfx950", "kernel")])
def test_kernels_compile_without_a_gpu(target: str, each: str) -> None:
    words = f"--target {target} --each {each} {SHAPES}"
    done = subprocess.run([sys.executable, "-m", "tests.gpu.offline", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_page_lists_what_is_compiled_for_and_what_is_exempt() -> None:
    from tests.gpu.offline import TARGETS

    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| target | GPU | state | kernels that are not launched there |\n")
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].splitlines()[1:]]
    found = {target.strip("`"): (state, exempt) for target, _, state, exempt in rows}
    for name, target in TARGETS.items():
        listed = "; ".join(f"`{module}` ({reason})" for module, reason in target.exempt.items()) or "–"
        assert found.pop(name) == ("measured" if name == "sm_90" else "compiled, never run", listed)
    assert not found
