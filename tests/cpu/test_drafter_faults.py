"""A failing drafter costs no request and no token: one that raises, returns NaN or lacks memory is switched off, with
one log line and one count.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compose.matrix import MODEL
from tests.cpu.test_speculation import GREEDY, Broken, breaking, engine, errors, prompts, run, unrecorded
from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.messages import StepUpdate
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine import build
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.launch.serve import serve
from thalweg.llm import LLM, AsyncLLM
from thalweg.memory.planes import Planes
from thalweg.runner import deferred_kv
from thalweg.runner.graph_pool import GraphPool
from thalweg.spec.autoregressive import AutoregressiveDrafter

assert unrecorded  # a fixture of this module, too
FULL = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    " bytes\nmore"
)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return run(engine(0), prompts(5))


@pytest.mark.parametrize(
    ("depth", "tokens"), [(1, 16), (2, 512)], ids=["while it catches up", "before slots are bound anew"]
)
def test_a_drafter_that_raises_while_it_is_idle_is_switched_off(
    plain: list[list[int]], depth: int, tokens: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_kv, "MAX_TOKENS", tokens)
    made = engine(3, max_steps_in_flight=depth, max_running_requests=2)
    made.loop.scheduler.draft_length.choose = lambda sampling, most: 0  # type: ignore[method-assign]
    breaking(made, "extend", 2)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1 and "on purpose" in caplog.text
    assert made.loop.stats().drafter_failures == 1 and not made.runner.drafting.deferred.steps


@pytest.mark.parametrize(("depth", "tree"), [(2, CHAIN), (1, TreeShape(2, 2, 4))], ids=["chain", "tree"])
def test_a_drafter_that_turns_nan_while_serving_is_switched_off(
    plain: list[list[int]], depth: int, tree: TreeShape, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(4 if tree.is_tree else 2, max_steps_in_flight=depth, tree=tree)
    drafter, calls = made.runner.drafting.drafter, 0
    assert isinstance(drafter, AutoregressiveDrafter)
    real = drafter.head.logits

    def logits(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            drafter.head.norm.weight.data.fill_(float("nan"))  # type: ignore[attr-defined]
        return real(hidden)

    drafter.head.logits = logits  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1 and "NaN or infinite" in caplog.text
    stats = made.loop.stats()
    assert stats.drafter_failures == 1 and stats.accepted_tokens > 0
    assert run(made, prompts(5)) == plain and made.loop.stats().drafted_tokens == stats.drafted_tokens


KINDS = {"chain": CHAIN, "tree": TreeShape(2, 2, 4), "static tree": TreeShape(2, 2, 4, False)}
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def wanted() -> dict[bool, list[list[int]]]:
    """By whether they were sampled."""
    made = engine(0)
    return {params is SAMPLED: run(made, prompts(2), params) for params in (GREEDY, SAMPLED)}


@pytest.mark.parametrize(
    ("kind", "fault", "sampled"),
    [
        ("chain", "nan", False),
        ("chain", "one nan", True),
        ("chain", "inf", False),
        ("tree", "one nan", False),
        ("tree", "inf", True),
        ("static tree", "nan", True),
        ("static tree", "inf", False),
    ],
)
def test_a_drafter_with_nan_logits_is_switched_off(
    kind: str, fault: str, sampled: bool, wanted: dict[bool, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its states are, so nothing of them tells."""
    tree = KINDS[kind]
    made = engine(4 if tree.is_tree else 2, max_steps_in_flight=2, tree=tree, max_running_requests=2)
    drafter, calls = made.runner.drafting.drafter, 0
    assert isinstance(drafter, AutoregressiveDrafter) and made.runner.slots.tree.is_tree == tree.is_tree
    real = drafter.head.logits

    def logits(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(hidden).clone()
        if calls > 6:
            found[:, ... if fault == "nan" else 9] = torch.inf if fault == "inf" else torch.nan
        return found

    drafter.head.logits = logits  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(2), SAMPLED if sampled else GREEDY) == wanted[sampled]
    (line,) = errors(caplog)
    assert "NaN or infinite" in line
    stats = made.loop.stats()
    assert stats.drafter_failures == 1 and stats.steps_by_num_drafts[0] > 1, "steps after it are counted"
    assert calls < 20


@pytest.mark.parametrize("far", [1 << 31, -1])
def test_a_drafter_with_invalid_token_ids_is_switched_off(
    plain: list[list[int]], far: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The target would look for the embedding of what is drafted."""
    made = engine(2, max_steps_in_flight=2)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    drafter.head.ids_D = torch.full((drafter.vocab,), far)  # type: ignore[misc]
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1 and made.loop.stats().drafter_failures == 1


def test_a_drafter_that_raises_during_calibration_is_switched_off(
    plain: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(*args: Any) -> None:
        raise Broken("on purpose")

    monkeypatch.setattr(AutoregressiveDrafter, "propose", propose)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        made = engine(3, speculative_adaptive=True, max_running_requests=2)
        assert run(made, prompts(5)) == plain
    assert len(errors(caplog)) == 1 and made.loop.stats().drafter_failures == 1
    assert made.loop.scheduler.draft_length.max_drafts == 0


@pytest.mark.parametrize(
    "error", [RuntimeError(FULL), MemoryError("none left"), InsufficientMemory("memory: no page is left")]
)
def test_a_drafter_without_memory_is_left_out(
    plain: list[list[int]], error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planes(model: Any, drafter: Any, *rest: Any) -> Planes:
        if drafter.planes():
            raise error
        return real(model, drafter, *rest)

    real = build._allocate_planes
    monkeypatch.setattr(build, "_allocate_planes", planes)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        made = engine(3, speculative_adaptive=True)
    (line,) = errors(caplog)
    assert "no room for the drafter" in line and str(error).partition("\n")[0] in line
    assert (made.config.speculative_algorithm, made.config.num_drafts) == ("NONE", 0)
    assert "no room" in made.config.report.current()["speculative_algorithm"].reason
    assert run(made, prompts(5)) == plain and made.loop.stats().drafter_failures == 1


def test_a_drafter_that_cannot_be_captured_is_left_out(
    plain: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: AutoregressiveDrafter, planes: Planes) -> None:
        raise Broken("on purpose")

    monkeypatch.setattr(AutoregressiveDrafter, "capture", record)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        made = engine(3, speculative_adaptive=True)
    (line,) = errors(caplog)
    assert "cannot be captured" in line and "Broken: on purpose" in line
    assert "on purpose" in made.config.report.current()["speculative_algorithm"].reason
    assert run(made, prompts(5)) == plain and made.loop.stats().drafter_failures == 1


def test_a_drafter_with_nan_weights_is_left_out(
    plain: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an EAGLE-3 head makes of the target's states is no number then, and nothing at run time tells it from states
    that are none.
    """
    folder = Path(shutil.copytree(Path(MODEL).parent / "tiny-eagle3", tmp_path / "head"))
    held = load_file(folder / "model.safetensors")
    held["fc.weight"][0] = torch.nan
    save_file(held, folder / "model.safetensors")
    wish = options_of(model=MODEL, speculative_draft_model_path=str(folder), dtype="float32", context_length=400)
    with caplog.at_level(logging.ERROR, "thalweg.engine"):
        made = LocalEngine(
            msgspec.structs.replace(resolve(wish).engine, eos_ids=(1,), show_progress=False, warmup=False)
        )
    (line,) = errors(caplog)
    assert "left out" in line and str(folder) in line and "not finite numbers" in line
    assert "not finite numbers" in made.config.report.current()["speculative_algorithm"].reason
    assert run(made, prompts(5)) == plain and made.loop.stats().drafter_failures == 1


def test_a_drafter_that_does_not_fit_is_planned_without(
    plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    here = Machine.here()

    def resolved(free: int, algorithm: str = "NEXTN") -> Resolved:
        wish = options_of(model=MODEL, speculative_algorithm=algorithm, dtype="float32", context_length=400)
        return resolve(wish, dataclasses.replace(here, free=free), weights=False)

    alone, both = (resolved(1 << 34, algorithm).sizes for algorithm in ("NONE", "NEXTN"))
    most = both.weight_bytes + 6 * PAGE * both.kv_bytes
    assert alone.weight_bytes + 7 * PAGE * alone.kv_bytes < most, "seven pages hold the context that was asked for"
    with caplog.at_level(logging.ERROR, "thalweg.launch"):
        short = resolved(int(most / 0.8))
    (line,) = errors(caplog)
    assert "no room for the drafter" in line and "context_length" in line
    assert (short.engine.speculative_algorithm, short.engine.num_drafts, short.sizes) == ("NONE", 0, alone)
    (noted,) = (one for one in short.decisions if one.name == "speculative_algorithm")
    assert (noted.value, noted.source) == ("NONE", "auto") and noted.reason.startswith(
        "no memory for the drafter: context_length"
    )
    made = LocalEngine(
        msgspec.structs.replace(short.engine, eos_ids=(1,), show_progress=False, warmup=False, chunked_prefill_size=512)
    )
    assert run(made, prompts(5)) == plain and made.loop.stats().drafter_failures == 1
    with pytest.raises(InsufficientMemory):  # nor is there room for the model
        resolved(alone.weight_bytes)
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", InsufficientMemory),
        ("CUDA error: operation not permitted when stream is capturing", UnsupportedConfig),
    ],
)
def test_out_of_memory_in_capture_is_recognized(
    words: str, kind: type[UnsupportedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 2)
    ended: list[bool] = []
    pool = object.__new__(GraphPool)
    vars(pool).update(pool=1, stream=stream, graph=SimpleNamespace(capture_end=lambda: ended.append(True)))
    with (
        pytest.raises(UnsupportedConfig, match="capturing CUDA graphs of 3 rows failed") as told,
        pool.running("3 rows"),
    ):
        raise RuntimeError(words)
    assert type(told.value) is kind and ended == [True] and pool.graph is None
    vars(pool)["graph"] = SimpleNamespace(capture_end=lambda: ended.append(True))
    with pytest.raises(Broken), pool.running("3 rows"):
        raise Broken("in Python")
    assert len(ended) == 2 and pool.graph is None


def test_other_errors_than_lack_of_memory_are_raised() -> None:
    """Nor is one that has no drafter in it."""
    made = engine(1).config

    def failing(error: Exception) -> Any:
        def start(settings: Any) -> None:
            raise error

        return start

    for error in (RuntimeError("shapes differ"), UnsupportedConfig("no such backend")):
        with pytest.raises(type(error), match=str(error)):
            build.build_or_drop_drafter(failing(error), made)
    with pytest.raises(MemoryError):
        build.build_or_drop_drafter(failing(MemoryError("none left")), build.without_drafter(made, "why"))
    with pytest.raises(InsufficientMemory):
        build.build_or_drop_drafter(failing(InsufficientMemory("no page")), made)


def test_a_started_engine_has_no_failure() -> None:
    made = engine(2)
    run(made, prompts(1), GREEDY)
    assert made.loop.stats().drafter_failures == 0


def test_simulated_acceptance_serves_requests_only_if_allowed() -> None:
    wish = {"speculative_algorithm": "NEXTN", "speculative_simulate_accept_length": 2.0, "max_total_tokens": 1024}
    for start in (LLM, AsyncLLM):
        with pytest.raises(UnsupportedConfig, match="--allow-simulated-acceptance"):
            start(MODEL, **wish)
    with pytest.raises(UnsupportedConfig, match="--allow-simulated-acceptance"):
        serve(options_of(model=MODEL, port=0, **wish), lambda *args: {})
    allowed = resolve(options_of(model=MODEL, allow_simulated_acceptance=True, **wish), weights=False)
    for resolved in (allowed, resolve(options_of(model=MODEL, **wish), simulates=True)):
        assert resolved.engine.speculative_simulate_accept_length == 2.0


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_leave_before_the_drafts_of_their_step_are_made(depth: int) -> None:
    made = engine(2, max_steps_in_flight=depth)
    drafter, sent, in_time = made.runner.drafting.drafter, threading.Event(), list[bool]()
    propose, send = drafter.propose, made.loop.channel.send

    def slow(*args: Any) -> Any:
        in_time.append(sent.wait(3))
        sent.clear()
        return propose(*args)

    def sending(message: Any) -> None:
        send(message)
        if isinstance(message, StepUpdate) and any(delta.tokens for delta in message.deltas):
            sent.set()

    drafter.propose, made.loop.channel.send = slow, sending  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(run(made, prompts(1), params)[0]) == 4
    assert in_time[0] and in_time.count(False) < depth, "a step behind the end of its only request has no tokens"
