"""`thalweg bench compare A B`: what changed between two results beyond noise, and what else is different about them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg.bench.noise import BLOCKS, Floats, Ratio, bootstrap, inner, paired, shares, welch
from thalweg.bench.readings import Json, Points, ReadError, Reading, kind, load, points
from thalweg.bench.results import ResultError, provenance, write
from thalweg.bench.usage import Parser

VERDICTS = {
    "better": "green", "worse": "red", "same": "dim", "higher": "yellow", "lower": "yellow", "unclear": "yellow", "unknown": "dim"
}  # fmt: skip
OF = {"mean": -1.0, "median": 50.0, "p99": 99.0}
WIDTH = 120  # of the table where it is not for a terminal and COLUMNS says nothing
MANY = 9.0  # a change to the tenfold and beyond is told as a factor
FEWEST = {"mean": 30, "median": 30, "p99": 200}  # samples that a bootstrap needs: with fewer it claims too much
ONE_RUN = "of one run"  # how an interval ends that does not know what differs from run to run
# of a configuration: where a run was written to and what the server happened to do, not how it was set
PASSING = (
    "client.output_file", "client.result_filename", "client.tag", "client.base_url", "client.host", "client.port",
    "client.disable_tqdm", "client.output_details", "server.internal_states", "server.uptime_seconds", "server.requests", "server.status",
    "server.reason",
)  # fmt: skip
REASON = (".reason", ".source")  # why a setting has its value: told where the value differs
REPEATS_DIFFER = {
    "client.seed",
    "client.request_rate",
    "client.max_concurrency",
}  # of files that are repeats of one, or points of a sweep
REPEAT = (
    "repeat it: an interval from within one run (its requests, its seconds) does not hold what differs from run to run"
    " (a busy machine, another placement in memory), so what has no other is called higher or lower, not better or"
    " worse; measure both with --repeat 5, or give several files of each with commas"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One measurement in both. a, b: means over the repeats. change: B / A - 1, low and high its interval. verdict: see
    VERDICTS.
    """

    point: str
    name: str
    unit: str
    a: float
    b: float
    change: float
    low: float | None
    high: float | None
    verdict: str
    how: str


def _statistic(of: str) -> Any:
    def taken(rows: Floats) -> Floats:
        found: Floats = rows.mean(axis=1) if of == "mean" else np.percentile(rows, OF[of], axis=1)
        return found

    return taken


def ratio(a: Reading, b: Reading, confidence: float) -> Ratio:
    """B / A with the best interval that the two allow: repeats, else samples of one run, else none."""
    if a.hits is not None and b.hits is not None:
        return shares(a.hits, b.hits, confidence)
    positive = min((*a.values, *b.values)) > 0
    if a.seeded and len(a.values) == len(b.values) > 1 and positive:
        return paired(a.values, b.values, confidence, f"{len(a.values)} repeats, pair by pair")
    if min(len(a.values), len(b.values)) > 1 and positive:
        return welch(a.values, b.values, confidence, f"{len(a.values)} and {len(b.values)} repeats")
    plain = _mean(b.values) / _mean(a.values) if _mean(a.values) else float("inf")
    if a.of == "rate":
        seconds = inner(a.samples), inner(b.samples)
        if min(len(one) for one in seconds) < BLOCKS:
            return Ratio(plain)
        found = bootstrap(*seconds, _statistic("mean"), confidence, f"seconds {ONE_RUN}")
        return Ratio(plain, found.low, found.high, found.how)  # of the whole run, its ends included
    if a.of in OF and min(len(a.samples), len(b.samples)) >= FEWEST[a.of]:
        return bootstrap(a.samples, b.samples, _statistic(a.of), confidence, f"{a.what} {ONE_RUN}")
    return Ratio(plain)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(found: Ratio, higher: bool, threshold: float) -> str:
    """better or worse: the interval lies on one side of no change, and the change is at least the threshold; higher or
    lower: it does, and is from within one run each, which is no proof. same: all of it is within the threshold.
    unclear: neither. unknown: there is no interval.
    """
    if found.low is None or found.high is None:
        return "unknown"
    if (found.low > 1 or found.high < 1) and abs(found.value - 1) >= threshold:
        if found.how.endswith(ONE_RUN):
            return "higher" if found.value > 1 else "lower"
        return "better" if (found.value > 1) == higher else "worse"
    if 1 - threshold <= found.low and found.high <= 1 + threshold:
        return "same"
    return "unclear"


def changes(a: Points, b: Points, confidence: float, threshold: float) -> Iterator[Change]:
    """Every measurement that both have, point by point."""
    for point, readings in a.items():
        for name, reading in readings.items():
            other = b.get(point, {}).get(name)
            if other is None:
                continue
            found = ratio(reading, other, confidence)
            low, high = (None if end is None else end - 1 for end in (found.low, found.high))
            judged = verdict(found, reading.higher, threshold)
            means = _mean(reading.values), _mean(other.values)
            yield Change(point, name, reading.unit, *means, found.value - 1, low, high, judged, found.how)


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted path, value) of every leaf; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for name, inside in value.items():
            yield from flat(inside, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def differences(a: Json, b: Json) -> list[tuple[str, str, str]]:
    """(field, in A, in B) of what is not the same: configuration, device, versions, commit."""
    found = []
    for section in ("commit", "device", "versions", "configuration"):
        left, right = (
            dict(flat(one.get(section, {}), "" if section == "configuration" else section)) for one in (a, b)
        )
        for name in sorted(left.keys() | right.keys()):
            if any(name == one or name.startswith(one + ".") for one in PASSING) or name.endswith(REASON):
                continue
            if left.get(name) != right.get(name):
                found.append((name, str(left.get(name, "not there")), str(right.get(name, "not there"))))
    return found


def percent(change: float) -> str:
    """A relative change; factors where percent would be long."""
    return f"{100 * change:+.1f} %" if change < MANY else f"x {1 + change:.3g}"


def table(found: Sequence[Change], names: tuple[str, str]) -> Table:
    shown = Table(title=f"A: {names[0]}   B: {names[1]}", title_justify="left", padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
    shown.add_column("measured", overflow="fold")  # what gives way in a narrow terminal
    for head in ("A", "B", "change", "interval"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    points = dict.fromkeys(one.point for one in found)
    alone = len(points) == len(found)  # one measurement of each: their names say nothing more
    last = ""
    for one in found:
        if not alone and one.point != last:
            shown.add_row(f"[bold]{escape(one.point)}[/]")
        last = one.point
        interval = "" if one.low is None or one.high is None else f"{percent(one.low)} … {percent(one.high)}"
        numbers = (f"{one.a:.4g} {one.unit}", f"{one.b:.4g} {one.unit}", percent(one.change), interval)
        name = escape(one.point if alone else one.name)
        shown.add_row(name, *numbers, f"[{VERDICTS[one.verdict]}]{one.verdict}[/]")
    return shown


def words(found: Sequence[Change], differing: Sequence[tuple[str, str, str]], warnings: Sequence[str]) -> list[str]:
    """What the table says, in lines."""
    alone = any(one.how.endswith(ONE_RUN) for one in found)
    lines = [REPEAT] if alone else []
    for name in ("worse", "better", "higher", "lower"):
        for point in dict.fromkeys(one.point for one in found if one.verdict == name):
            these = [one for one in found if one.verdict == name and one.point == point]
            lines.append(f"{name} at {point}: " + ", ".join(f"{one.name} {percent(one.change)}" for one in these))
    if not any(one.verdict in ("better", "worse", "higher", "lower") for one in found):
        known = any(one.low is not None for one in found)
        lines.append("nothing changed beyond noise" if known else "nothing tells the noise: measure with --repeat")
    sources = dict.fromkeys(one.how for one in found if one.low is not None)
    if sources:
        lines.append(f"intervals from {'; '.join(sources)}")
    lines += [f"differs: {name}: {left} → {right}" for name, left, right in differing]
    return [*lines, *warnings]


def _warnings(a: Sequence[Json], b: Sequence[Json], left: Points, right: Points) -> Iterator[str]:
    for side, results in (("A", a), ("B", b)):
        for one in results:
            if one.get("partial"):
                yield f"{side} is partial: {one.get('ended')}"
        apart = {name: (was, now) for one in results[1:] for name, was, now in differences(results[0], one)}
        for name in sorted(apart.keys() - REPEATS_DIFFER):
            yield f"the files of {side} are no repeats of one: {name} is {apart[name][0]} and {apart[name][1]}"
    for side, mine, other in (("A", left, right), ("B", right, left)):
        missing = [name for name in mine if name not in other]
        if missing:
            yield f"only in {side}: {'; '.join(missing)}"


def compare(
    a: Sequence[Json], b: Sequence[Json], confidence: float, threshold: float
) -> tuple[list[Change], list[tuple[str, str, str]], list[str]]:
    """The changes, the differences of the settings, and warnings. Raises ReadError where the two have nothing in
    common.
    """
    kinds = [", ".join(dict.fromkeys(f"`{kind(one)}`" for one in side)) for side in (a, b)]
    if "," in kinds[0] or kinds[0] != kinds[1]:
        raise ReadError(f"A is of {kinds[0]} and B of {kinds[1]}: nothing to compare")
    left, right = points(a), points(b)
    found = list(changes(left, right, confidence, threshold))
    if not found:
        raise ReadError(f"no point is in both: A has {'; '.join(left)}, B has {'; '.join(right)}")
    return found, differences(a[0], b[0]), list(_warnings(a, b, left, right))


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench compare",
        description=(
            "Says what changed from A to B beyond noise. Each is a result of bench serve, offline, one-batch, startup"
            " or kernels, of eval or ablate; several files with commas between them are repeats of one."
        ),
    )
    add = parser.add_argument
    add("a", metavar="A", help="the result before")
    add("b", metavar="B", help="the result after")
    add(
        "--confidence",
        type=float,
        default=0.99,
        metavar="C",
        help="of the intervals (default: %(default)s, since many numbers are looked at)",
    )
    add(
        "--threshold",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="smaller changes do not matter (default: %(default)s)",
    )
    add("--fail-on-worse", action="store_true", help="exit with 3 when something got worse, for scripts")
    add("--output-file", default="", help="write the comparison as JSON")
    return parser


def _read(given: str) -> list[Json]:
    """The results of files with commas between them. Raises ReadError naming the one that is none, or not whole."""
    found: list[Json] = []
    for name in given.split(","):
        results = load(Path(name))
        try:
            points(results)
        except ReadError as error:
            raise ReadError(f"{name}: {error}") from error
        found += results
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0: compared; 1: it could not be; 3: something got worse and --fail-on-worse was given."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(given)
    if not 0.5 <= args.confidence < 1 or not 0 <= args.threshold < 100:
        parser.error("--confidence is between 0.5 and 1, --threshold between 0 and 100 (percent)")
    try:
        found, differing, warnings = compare(_read(args.a), _read(args.b), args.confidence, args.threshold / 100)
        told = words(found, differing, warnings)
        Console(width=shutil.get_terminal_size((WIDTH, 0)).columns).print(table(found, (args.a, args.b)))
        print("\n".join(told))
        if args.output_file:
            sides = {"a": args.a, "b": args.b, "changes": [asdict(one) for one in found], "words": told}
            sides["differences"] = [{"field": name, "a": left, "b": right} for name, left, right in differing]
            write(Path(args.output_file), sides | provenance("bench compare", given, vars(args)))
    except (ReadError, ResultError) as error:
        print(f"thalweg bench compare: {error}", file=sys.stderr)
        return 1
    return 3 if args.fail_on_worse and any(one.verdict == "worse" for one in found) else 0
