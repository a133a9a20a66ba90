"""An engine in this process that shares its model with other processes on GPUs: how it ends."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thalweg.config.engine import EngineConfig
from thalweg.engine import local, other_processes
from thalweg.engine.group import ALONE
from thalweg.engine.processes import socket_folder


def test_an_engine_that_nobody_closes_gives_up_its_graphs_and_then_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for the graphs at the end of the interpreter."""
    ended: list[str] = []
    others = SimpleNamespace(join=lambda: ALONE, wait_ready=lambda: None, wait=lambda seconds: None)
    others.close = lambda error=None: ended.append("processes")
    runner = SimpleNamespace(disable_graphs=lambda: ended.append("graphs"))
    loop = SimpleNamespace(scheduler=SimpleNamespace(context=64))

    def build(config: EngineConfig, *_: Any) -> tuple[Any, ...]:
        return loop, runner, SimpleNamespace(vocab=8), config

    monkeypatch.setattr(local, "OtherProcesses", lambda config: others)
    monkeypatch.setattr(local, "build", build)
    monkeypatch.setattr(other_processes, "leave", lambda: ended.append("group"))
    engine = local.LocalEngine(EngineConfig(model_path="", device="cuda", tp_size=2))
    engine.close()
    engine.close()
    assert ended == ["processes", "graphs", "group"], "once"
    ended.clear()
    engine = local.LocalEngine(EngineConfig(model_path="", device="cuda", tp_size=2))
    del engine
    gc.collect()
    assert ended == ["processes", "graphs", "group"]


def test_another_start_leaves_the_sockets_of_one_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sentinel, alive = os.pipe()
    made = SimpleNamespace(start=lambda: None, close=lambda: None, kill=lambda: os.close(alive), spawned=[])
    made.children = [SimpleNamespace(sentinel=sentinel)]
    monkeypatch.setattr(other_processes, "EngineProcesses", lambda config, folder, with_own: made)
    others = other_processes.OtherProcesses(EngineConfig(model_path="", device="cuda", tp_size=2))
    (folder,) = tmp_path.iterdir()
    os.utime(folder, (0, 0))
    with socket_folder():
        assert folder.is_dir()
    others.close()
    others._watcher.join()
    assert not list(tmp_path.iterdir())
    os.close(sentinel)
