"""What launchers of several nodes share."""

from __future__ import annotations

import ctypes
import signal
import socket

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Linux sends SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_address(host: str) -> str:
    """HOST:PORT of a port that is free now."""
    with socket.create_server((host, 0)) as free:
        return f"{host}:{free.getsockname()[1]}"
