"""The tiers: `null` runs without torch, `cpu` and `compose` anywhere, `gpu` where there is one, `soak` when asked for."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

NULL = Path(__file__).parent / "null"


def pytest_sessionstart() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, also in what they start; many tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The null tier is quick because nothing in it loads torch; a run of it alone can tell."""
    alone = bool(session.items) and all(NULL in item.path.parents for item in session.items)
    if alone and "torch" in sys.modules:
        print("\nsomething in tests/null or below it imports torch")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
