"""The counter of code tokens, and that each room has a ceiling."""

from __future__ import annotations

from pathlib import Path

import yaml

from tools.size import PACKAGE, ROOT, above, code_of, measure, room_of


def test_comments_docstrings_and_layout_are_free() -> None:
    assert len(code_of("x = 1\n")) == 3
    assert len(code_of('"""A module."""\n\nx = 1  # one\n')) == 3
    assert len(code_of('def f():\n    """Says what it does."""\n    return """text"""\n')) == 7
    assert len(code_of("f(\n    1,\n    # why\n)\n")) == 5


def test_a_ceiling_that_is_exceeded_is_named(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text("class A: ...\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("class A: ...\nclass _B: ...\n" + "#" * 121 + "\n", encoding="utf-8")
    size = measure(tmp_path)
    assert (size.lines, size.long_lines, size.repeated) == (4, 1, ["A"])
    assert size.tokens == {"room": 4, "other": 8}
    assert not list(above(size, {"tokens": 12, "lines": 4}, {"room": 4, "other": 8}))
    assert list(above(size, {"tokens": 11, "repeated_class_names": 0}, {"room": 3})) == [
        "tokens: 12, at most 11",
        "repeated_class_names: 1, at most 0",
        "other: no ceiling; give it one in tools/ceilings.yaml",
        "room: 4 tokens, at most 3",
    ]


def test_every_room_has_a_ceiling_and_their_sum_is_within_the_whole() -> None:
    tree = yaml.safe_load((ROOT / "tools" / "ceilings.yaml").read_text(encoding="utf-8"))
    assert set(tree["rooms"]) == {room_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert sum(tree["rooms"].values()) <= tree["package"]["tokens"]
