"""Test tiers: `null` runs without torch, `cpu` and `compose` anywhere, `gpu` on a GPU, `soak` on request."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.seed import SEED

NULL = Path(__file__).parent / "null"
EXIT = 60  # seconds in which the interpreter must have ended
WORKER = "PYTEST_XDIST_WORKER" in os.environ  # one of several processes
LONGEST = (  # a minute or more, the longest first
    "ranks/test_tokens.py",
    "ranks/test_deterministic.py",
    "cpu/test_kernels_compile.py",
    "cpu/test_kernels_interpreted.py",
    "compose/test_compose.py",
    "compose/test_compose_grammar.py",
    "ranks/test_formats.py",
    "ranks/test_processes.py",
    "cpu/test_compile_ahead.py",
    "cpu/test_structured.py",
    "cpu/test_context_parallel.py",
    "cpu/test_sharded_engine.py",
    "cpu/test_several.py",
    "cpu/test_client.py",
    "cpu/test_plan.py",
)

if WORKER:  # one thread each; torch reads it when it is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Files are run as a whole, since their fixtures are made once a file; all of tests/gpu in one process, which has
    the GPU alone.
    """
    from xdist.scheduler import LoadFileScheduling  # only `make test` has it

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/gpu" if nodeid.startswith("tests/gpu/") else super()._split_scope(nodeid)

    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no process has one of them left when the others have ended."""
    places = {NULL.parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True, scope="module")
def settings_of_the_environment_stay() -> Iterator[None]:
    """A `THALWEG_` variable that a file leaves behind is a setting of every later file of its process."""
    before = _settings_of_the_environment()
    yield
    assert _settings_of_the_environment() == before


def _settings_of_the_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("THALWEG_")}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws from torch's own generator is the same alone, in any order and on any worker."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)


def pytest_sessionstart() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, also in what they start; many tests press
    it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """A thread or a child that a failed test has left behind must not hold the process: then it says where each thread
    stands, and ends. A worker waits for the others and is ended by the process that started it.
    """
    if not WORKER:
        faulthandler.dump_traceback_later(EXIT, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True, scope="session")
def null_tests_load_no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """The null tier is quick because nothing in it loads torch; a run of it alone can tell, in one process or more."""
    yield
    alone = all(NULL in item.path.parents for item in request.session.items)
    assert not (alone and "torch" in sys.modules), "something in tests/null or below it imports torch"
