"""The import order of rooms: imports go down this table, lazy and type-only ones included; rooms on one level do not
import each other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thalweg"
MAX_LINES = 600
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}

LEVELS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("config", "cache", "kernels"),
    ("scheduler", "text", "parallel", "batch", "quant", "memory"),
    ("attention", "moe", "sampling", "weights"),
    ("layers",),
    ("models",),
    ("spec",),
    ("runner",),
    ("engine",),
    ("launch", "server"),
    ("llm",),
    ("",),  # the package itself, whose names are loaded at their first use
    ("bench",),
    ("quantize",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
NO_TORCH = ("core", "config", "cache", "scheduler", "text")
TORCHLIKE = {"torch", "triton", "transformers", "safetensors"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """thalweg/cache/radix.py → cache; thalweg/cli.py → cli; thalweg/__init__.py → ""."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem.replace("__init__", "")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the file, wherever it stands; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def broken(importer: str, name: str) -> str:
    """Why a file of this room may not import `name`, or ""."""
    top, _, rest = name.partition(".")
    if importer in NO_TORCH and top in TORCHLIKE:
        return f"{importer} is a room without torch"
    if top != "thalweg" or rest == "__version__" or not rest:
        return ""
    room = rest.partition(".")[0]
    if room not in LEVEL:
        return f"{room} is no room of the table: give it a level"
    if importer != room and LEVEL[room] >= LEVEL.get(importer, -1):
        return f"{importer} is on level {LEVEL.get(importer, -1) + 1}, {room} on {LEVEL[room] + 1}"
    return ""


def test_imports_run_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {why}"
        for path in sources()
        for line, name in imports(path)
        if (why := broken(room_of(path), name))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "name", "allowed"),
    [
        ("engine", "thalweg.scheduler.scheduler.Scheduler", True),
        ("cache", "thalweg.cache.page_allocator", True),
        ("scheduler", "thalweg.engine.loop", False),
        ("cache", "thalweg.config.tree", False),
        ("server", "thalweg.launch.resolve", False),
        ("scheduler", "torch.nn", False),
        ("runner", "torch", True),
        ("core", "thalweg.nowhere", False),
        ("cli", "thalweg.bench.serve", True),
        ("bench", "thalweg.cli", False),
    ],
)
def test_the_rule_itself(importer: str, name: str, allowed: bool) -> None:
    assert (broken(importer, name) == "") == allowed


def test_every_room_has_a_level() -> None:
    rooms = {room_of(path) for path in sources()} - {""}
    assert rooms <= set(LEVEL), rooms - set(LEVEL)


def test_files_are_short_and_have_names() -> None:
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: one room may be two"
        assert path.stem not in VAGUE and path.parent.name not in VAGUE, (
            f"{path.relative_to(ROOT)} does not say what it holds"
        )


def test_every_folder_is_a_package() -> None:
    missing = [path.parent for path in sources() if not (path.parent / "__init__.py").is_file()]
    assert not missing, f"without __init__.py: {sorted({str(m.relative_to(ROOT)) for m in missing})}"


@pytest.mark.parametrize("room", [room for room in NO_TORCH if (PACKAGE / room).is_dir()])
def test_rooms_without_torch_do_not_load_it(room: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.stem != "__init__"
    ]
    script = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
