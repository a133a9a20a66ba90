"""What runs the command on the other nodes, by the values of `--launcher`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from thalweg.config.engine import EngineConfig
from thalweg.config.options import Options
from thalweg.launch.launch_ray import on_cluster, ray_agents
from thalweg.launch.launch_torchrun import from_torchrun


def as_given(options: Options) -> Options:
    return options


def no_agents(options: Options, engine: EngineConfig) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class Launcher(NamedTuple):
    """options: those of the command line with what the launcher knows, such as the first node's address. agents: within
    the block the other nodes have agents. Both raise UnsupportedConfig.
    """

    options: Callable[[Options], Options] = as_given
    agents: Callable[[Options, EngineConfig], AbstractContextManager[None]] = no_agents


LAUNCHERS = {
    "local": Launcher(),
    "ray": Launcher(on_cluster, ray_agents),
    "torchrun": Launcher(from_torchrun),
}
