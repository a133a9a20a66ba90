"""Tables in the docs, made from committed results: `python -m tools.release.docs` writes them anew (`make docs`),
`--check` only looks.

In a page, what stands between `<!-- table: KIND FILE -->` and `<!-- end -->` is made here: KIND is one of
`tables.KINDS`, FILE a path under benchmarks/; `tables.SEVERAL` are of several files. `<!-- table: support -->` makes
the lines of `benchmarks/index.yaml`. All other text is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from thalweg.bench.ablation_tables import digest, save_plot
from thalweg.bench.result_files import ResultFileError
from thalweg.config.args import options_parser
from tools.release import tables

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = ("docs/benchmarks.md", "docs/ablations.md", "docs/support.md", "docs/speculation.md")
BY_HAND = ("README.md", "docs/kernels.md", "docs/structured-output.md")  # their tables name results in their section
BLOCK = re.compile(r"^<!-- table: (?P<order>[^\n]*?) -->\n(?P<body>.*?)^<!-- end -->$", re.M | re.S)
SECTION = re.compile(r"^#{1,6} ", re.M)
NAMED = re.compile(r"benchmarks/[\w./*-]*[\w*/]")
FLAG = re.compile(r"`(--[\w-]+)")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
TABLE = re.compile(r"(?:^\|[^\n]*\n)+", re.M)
MEASURED = re.compile(
    r"^[~≈<>±]?\s*[\d.,]+(?:\s*(?:/|–|-|±|×|%|ms|us|µs|s|tok/s|GB/s|TB/s|TFLOP/s|MiB|GiB|GB)\s*[\d.,]*)*$"
)


class DocsError(Exception):
    """A page or a result that does not fit; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Index:
    """benchmarks/index.yaml."""

    results: Sequence[dict[str, Any]]
    support: Sequence[dict[str, Any]]


@cache
def index() -> Index:
    tree = yaml.safe_load((BENCHMARKS / "index.yaml").read_text(encoding="utf-8"))
    return Index(tree["results"], tree["support"])


def read(name: str) -> dict[str, Any]:
    """A result by its path under benchmarks/. Raises DocsError."""
    try:
        found = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DocsError(f"benchmarks/{name}: {error}") from error
    if not isinstance(found, dict):
        raise DocsError(f"benchmarks/{name}: a result is a JSON object")
    return found


def made(order: str) -> str:
    """The lines that an order in a page stands for. Raises DocsError."""
    kind, _, name = order.partition(" ")
    if kind == "support":
        return "\n".join(support())
    kinds = {**tables.KINDS, **tables.SEVERAL}
    if kind not in kinds:
        raise DocsError(f"<!-- table: {order} -->: unknown kind; there is {', '.join(kinds)}, support")
    names = name.split() if kind in tables.SEVERAL else [name]
    results = [read(one) for one in names]
    try:
        lines = kinds[kind](*results)
    except (KeyError, TypeError, IndexError, ResultFileError) as error:
        raise DocsError(f"benchmarks/{name} is no result of the kind {kind}: {error!r}") from error
    return "\n".join([*lines, "", *(source(*one) for one in zip(names, results, strict=True))])


def source(name: str, result: dict[str, Any]) -> str:
    """The line below a table: the file, the machine, when and of which commit."""
    when = str(result.get("date", ""))[:10]
    commit = str(result.get("commit", ""))
    shown = f"commit {commit[:7]}{'+changes' if commit.endswith('+changes') else ''}" if commit else ""
    told = [tables.where(result), when, shown]
    return f"*[`benchmarks/{name}`](../benchmarks/{name}): {', '.join(one for one in told if one)}*"


def support() -> list[str]:
    """The lines of docs/support.md."""
    heads = ["model", "format", "machine", "recommended settings", "limits", "measured", "result"]
    rows = []
    for one in index().support:
        result = read(one["result"])
        link = f"[{one['result']}](../benchmarks/{one['result']})"
        cells = [one[name] for name in ("model", "format", "machine", "settings", "limits")]
        rows.append([*cells, tables.say(result), link])
    return tables.table(heads, rows)


def plots(page: str) -> dict[Path, dict[str, Any]]:
    """The ablations of a page, by the path of their plot."""
    orders = [found["order"].partition(" ") for found in BLOCK.finditer(page)]
    return {(BENCHMARKS / name).with_suffix(".svg"): read(name) for kind, _, name in orders if kind == "ablation"}


def renewed(page: str) -> str:
    """A page with its tables made anew. Raises DocsError for an order that cannot be made."""
    if page.count("<!-- table: ") != len(BLOCK.findall(page)):
        raise DocsError("a <!-- table: ... --> without its <!-- end --> on a line of its own")
    return BLOCK.sub(lambda found: f"<!-- table: {found['order']} -->\n\n{made(found['order'])}\n\n<!-- end -->", page)


def unbacked(page: str) -> list[str]:
    """First lines of the tables that hold measured numbers and are not made from a result."""
    rest = BLOCK.sub("", page)
    return [found.group().partition("\n")[0] for found in TABLE.finditer(rest) if _measured(found.group())]


def unnamed(page: str) -> list[str]:
    """First lines of the tables with measured numbers in whose section no result is named that is there."""
    found = []
    for section in SECTION.split(page):
        if not any(any(ROOT.glob(name)) for name in NAMED.findall(section)):
            found += unbacked(section)
    return found


def _measured(table: str) -> bool:
    """Whether a cell behind the first column is nothing but a number, with or without its unit."""
    rows = [row.strip().strip("|").split("|")[1:] for row in table.splitlines()[2:]]
    return any(MEASURED.match(cell.strip().strip("*")) for row in rows for cell in row if cell.strip())


def unsupported() -> list[str]:
    """What docs/support.md recommends or names that is not there: settings of `thalweg serve`, and tests."""
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    known = {word for action in options_parser("", "")._actions for word in action.option_strings}
    found = [f"docs/support.md: no flag {flag}" for flag in sorted(set(FLAG.findall(page)) - known)]
    for path, name in sorted(set(TEST.findall(page))):
        file = ROOT / path
        if not file.is_file() or name and not re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.M):
            found.append(f"docs/support.md: no test {path}{'::' * bool(name)}{name}")
    return found


def wrong() -> list[str]:
    """What is wrong with the pages, in words; [] when all is well."""
    found = []
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        try:
            if renewed(page) != page:
                found.append(f"{name}: a table differs from its result; run `make docs`")
            for path, result in plots(page).items():
                if not path.is_file() or digest(result) not in path.read_text(encoding="utf-8"):
                    found.append(f"{name}: {path.name} differs from its result; run `make docs`")
        except DocsError as error:
            found.append(f"{name}: {error}")
        found += [f"{name}: the table {head!r} has no result behind it" for head in unbacked(page)]
        orders = Counter(block["order"] for block in BLOCK.finditer(page))
        found += [
            f"{name}: the table of {order} stands there {many} times" for order, many in orders.items() if many > 1
        ]
    found += unsupported()
    for name in BY_HAND:
        heads = unnamed((ROOT / name).read_text(encoding="utf-8"))
        found += [f"{name}: no result that is there is named in the section of the table {head!r}" for head in heads]
    return found


def main(words: Sequence[str]) -> int:
    """0: the pages are true; 1: they are not, or cannot be made."""
    if "--check" not in words:
        try:
            for name in PAGES:
                path = ROOT / name
                page = path.read_text(encoding="utf-8")
                path.write_text(renewed(page), encoding="utf-8")
                for place, result in plots(page).items():
                    save_plot(result, place.with_suffix(""))
        except DocsError as error:
            print(f"make docs: {error}", file=sys.stderr)
            return 1
    problems = wrong()
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
