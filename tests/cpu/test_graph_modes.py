"""Knobs of recording and compiling on a CPU: refused with the reason, or honoured with the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.sampling import SamplingParams
from thalweg.launch.resolve import resolve
from thalweg.llm import LLM

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "full_and_piecewise", "piecewise"])
def test_a_cpu_has_no_graphs(mode: str) -> None:
    with pytest.raises(
        UnsupportedConfig, match=f"cuda_graph_mode: {mode}, but a CPU has none; use --cuda-graph-mode none"
    ):
        resolve(options_of(model=str(TINY), device="cpu", cuda_graph_mode=mode))
    found = resolve(options_of(model=str(TINY), device="cpu"))
    assert found.engine.cuda_graph_bs == found.engine.piecewise_cuda_graph_tokens == ()
    said = {one.name: one for one in found.decisions}["cuda_graph_mode"]
    assert (said.value, said.source, said.reason) == ("none", "auto", "a CPU has none")


def test_torch_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedConfig, match="needs a C\\+\\+ compiler"):
        resolve(options_of(model=str(TINY), device="cpu", torch_compile=True))


def test_compiled_parts_give_the_same_answer() -> None:
    pytest.importorskip("torch._inductor")
    found = resolve(options_of(model=str(TINY), device="cpu", torch_compile=True))
    assert found.engine.torch_compile
    asked, greedy = ["23+45="], SamplingParams(temperature=0.0, max_tokens=12)
    plain = LLM(str(TINY), device="cpu", dtype="float32", max_total_tokens=4096).generate(asked, greedy)
    compiled = LLM(str(TINY), device="cpu", dtype="float32", max_total_tokens=4096, torch_compile=True)
    assert compiled.generate(asked, greedy)[0].outputs[0].text == plain[0].outputs[0].text
