"""Sizes of the package against their ceilings: `python -m tools.size` (`make size`) prints both, and fails above one.

A token is one of Python's; comments, docstrings and layout are free. `tools/ceilings.yaml` has the ceilings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thalweg"
COLUMNS = 120
LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
FREE = {*LAYOUT, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}


@dataclass(slots=True)
class Size:
    """What a package is made of."""

    lines: int = 0
    long_lines: int = 0
    tokens: Counter[str] = field(default_factory=Counter)  # by room
    classes: Counter[str] = field(default_factory=Counter)  # files and classes that define a public name

    @property
    def repeated(self) -> list[str]:
        return sorted(name for name, count in self.classes.items() if count > 1)


def code_of(source: str) -> list[str]:
    """Tokens of a file without comments, docstrings and layout."""
    tokens, starts_statement = list[str](), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in FREE:
            starts_statement = starts_statement or token.type in LAYOUT
            continue
        is_docstring = starts_statement and token.type == tokenize.STRING and '"""' in token.string[:5]
        if not is_docstring:
            tokens.append(token.string)
        starts_statement = False
    return tokens


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def measure(package: Path) -> Size:
    size = Size()
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        size.lines += len(lines)
        size.long_lines += sum(len(line) > COLUMNS for line in lines)
        size.tokens[room_of(path, package)] += len(code_of(source))
        classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
        size.classes.update(node.name for node in classes if not node.name.startswith("_"))
    return size


def above(size: Size, ceilings: dict[str, int], rooms: dict[str, int]) -> Iterator[str]:
    """One sentence for each ceiling that is exceeded."""
    measured = {
        "tokens": size.tokens.total(),
        "lines": size.lines,
        "lines_over_120_columns": size.long_lines,
        "repeated_class_names": len(size.repeated),
    }
    for name, ceiling in ceilings.items():
        if measured[name] > ceiling:
            yield f"{name}: {measured[name]:,}, at most {ceiling:,}"
    for room, tokens in sorted(size.tokens.items()):
        if room not in rooms:
            yield f"{room}: no ceiling; give it one in tools/ceilings.yaml"
        elif tokens > rooms[room]:
            yield f"{room}: {tokens:,} tokens, at most {rooms[room]:,}"


def main() -> int:
    tree = yaml.safe_load((ROOT / "tools" / "ceilings.yaml").read_text(encoding="utf-8"))
    size = measure(PACKAGE)
    for room, tokens in size.tokens.most_common():
        print(f"{room:<12}{tokens:>8,} of {tree['rooms'].get(room, 0):>8,} tokens")
    print(f"{'all':<12}{size.tokens.total():>8,} of {tree['package']['tokens']:>8,} tokens, {size.lines:,} lines")
    print(f"{len(size.repeated)} public class names are used more than once: {', '.join(size.repeated)}")
    problems = list(above(size, tree["package"], tree["rooms"]))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
