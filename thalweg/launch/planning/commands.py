"""The command line that starts a layout."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from thalweg.config.options import Options
from thalweg.config.tree import non_defaults, settings
from thalweg.core.plan import PAGE
from thalweg.launch.planning.search import LayoutForecast

DEFAULT_RUNNING = 256  # what the resolver gives a GPU


def command(config: Options, one: LayoutForecast) -> str:
    """What starts it: one server, or one for each copy, on GPUs and ports of their own. Settings that the user gave
    stay.
    """
    layout = one.layout
    words = ["thalweg", "serve", _folder(config.model.model), *layout.flags()]
    own = {
        name: value
        for name, value in non_defaults(config).items()
        if name != "model" and settings()[name].section != "parallel"
    }
    running = -(-one.requests // layout.copies)
    if "max_running_requests" not in own and running > DEFAULT_RUNNING:
        words += ["--max-running-requests", str(-(-running // PAGE) * PAGE)]
    for name, value in own.items():
        words += _flag(name, value)
    if layout.copies == 1:
        return shlex.join(words)
    each = layout.tp * layout.pp
    first = "$i" if each == 1 else f"$(seq -s, $(({each}*i)) $(({each}*i+{each - 1})))"
    return (
        f"for i in $(seq 0 {layout.copies - 1}); do\n"
        f"  CUDA_VISIBLE_DEVICES={first} {shlex.join(words)} --port $((30000+i)) &\ndone"
    )


def _folder(model: str) -> str:
    """What can be served: of a config.json its folder, of a configuration by another name nothing yet."""
    path = Path(model)
    if path.suffix != ".json":
        return model
    return str(path.parent) if path.name == "config.json" else "MODEL"


def _flag(name: str, value: Any) -> list[str]:
    flag = settings()[name].flag
    if settings()[name].secret:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]
