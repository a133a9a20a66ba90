"""`thalweg bench compare A B`: what changed between two results beyond noise, and how their settings differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from thalweg.bench.command import OUTPUT, CommandParser, add_flags, command
from thalweg.bench.display import show
from thalweg.bench.result_files import Json, Measurement, Points, ResultFileError, command_of, load, points
from thalweg.bench.results import save
from thalweg.bench.statistics import Ratio, paired, share_ratio, welch

VERDICTS = {"better": "green", "worse": "red", "same": "dim", "unclear": "yellow", "unknown": "dim"}
LARGE = 9.0  # a tenfold change and more is printed as a factor
# fields of a configuration that do not set anything: where a run was written, what the server happened to do
UNRELATED = """
client.output_file client.result_filename client.tag client.base_url client.host client.port client.disable_tqdm
client.output_details server.internal_states server.uptime_seconds server.requests server.status server.reason
""".split()
REASONS = (".reason", ".source")  # why a setting has its value
SWEPT = {"client.seed", "client.request_rate", "client.max_concurrency"}  # may differ between files of one side
FLAGS = f"""
--confidence     number=0.99  of the intervals; high, because many numbers are compared
--threshold      number=1     percent; smaller changes do not matter
--fail-on-worse  switch       exit with 3 when something got worse, for scripts
{OUTPUT}
"""


@dataclass(frozen=True, slots=True)
class Change:
    """One measurement in both results."""

    point: str
    name: str
    unit: str
    a: float  # mean over the repeats
    b: float
    change: float  # B / A - 1
    low: float | None  # its interval
    high: float | None
    verdict: str  # of VERDICTS


def ratio(a: Measurement, b: Measurement, confidence: float) -> Ratio:
    """B / A with the interval that repeats or the items of a share give."""
    if a.hits is not None and b.hits is not None:
        return share_ratio(a.hits, b.hits, confidence)
    counts = len(a.values), len(b.values)
    if min(counts) > 1 and min((*a.values, *b.values)) > 0:
        if a.seeded and counts[0] == counts[1]:
            return paired(a.values, b.values, confidence)
        return welch(a.values, b.values, confidence)
    return Ratio(fmean(b.values) / fmean(a.values) if fmean(a.values) else float("inf"))


def verdict(ratio: Ratio, higher: bool, threshold: float) -> str:
    """better or worse: the interval excludes no change, and the change reaches the threshold. same: the whole interval
    is within the threshold. unclear: neither. unknown: no interval.
    """
    if ratio.low is None or ratio.high is None:
        return "unknown"
    if (ratio.low > 1 or ratio.high < 1) and abs(ratio.value - 1) >= threshold:
        return "better" if (ratio.value > 1) == higher else "worse"
    return "same" if 1 - threshold <= ratio.low and ratio.high <= 1 + threshold else "unclear"


def changes(a: Points, b: Points, confidence: float, threshold: float) -> Iterator[Change]:
    """Every measurement that both have, point by point."""
    for point, measurements in a.items():
        for name, before in measurements.items():
            if (after := b.get(point, {}).get(name)) is None:
                continue
            found = ratio(before, after, confidence)
            low, high = (None if end is None else end - 1 for end in (found.low, found.high))
            judged, means = verdict(found, before.higher, threshold), (fmean(before.values), fmean(after.values))
            yield Change(point, name, before.unit, *means, found.value - 1, low, high, judged)


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted path, value) of every leaf; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def differences(a: Json, b: Json) -> list[tuple[str, str, str]]:
    """(field, in A, in B) of unequal configuration, device, versions and commit."""
    different = []
    for section in ("commit", "device", "versions", "configuration"):
        prefix = "" if section == "configuration" else section
        left, right = (dict(_leaves(one.get(section, {}), prefix)) for one in (a, b))
        for name in sorted(left.keys() | right.keys()):
            unrelated = any(name == one or name.startswith(one + ".") for one in UNRELATED) or name.endswith(REASONS)
            if not unrelated and left.get(name) != right.get(name):
                different.append((name, str(left.get(name, "missing")), str(right.get(name, "missing"))))
    return different


def percent(change: float) -> str:
    """A relative change; a factor where percent would be long."""
    return f"{100 * change:+.1f} %" if change < LARGE else f"x {1 + change:.3g}"


def interval(low: float | None, high: float | None) -> str:
    """ "" where nothing measures the noise."""
    return "" if low is None or high is None else f"{percent(low)} … {percent(high)}"


def table(found: Sequence[Change], names: tuple[str, str]) -> Table:
    shown = Table(title=f"A: {names[0]}   B: {names[1]}", title_justify="left", padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
    shown.add_column("measured", overflow="fold")  # shrinks in a narrow terminal
    for head in ("A", "B", "change", "interval"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    point_is_name = len({one.point for one in found}) == len(found)  # one measurement of each point
    last = ""
    for one in found:
        if not point_is_name and one.point != last:
            shown.add_row(f"[bold]{escape(one.point)}[/]")
        last = one.point
        numbers = f"{one.a:.4g} {one.unit}", f"{one.b:.4g} {one.unit}", percent(one.change), interval(one.low, one.high)
        style = VERDICTS[one.verdict]
        shown.add_row(escape(one.point if point_is_name else one.name), *numbers, f"[{style}]{one.verdict}[/]")
    return shown


def words(found: Sequence[Change], different: Sequence[tuple[str, str, str]], warnings: Sequence[str]) -> list[str]:
    """The comparison in lines of text."""
    lines, changed = list[str](), dict[tuple[str, str], list[str]]()
    for name in ("worse", "better"):
        for one in (one for one in found if one.verdict == name):
            changed.setdefault((name, one.point), []).append(f"{one.name} {percent(one.change)}")
    lines += [f"{name} at {point}: {', '.join(texts)}" for (name, point), texts in changed.items()]
    if not changed:
        unknown = "the noise is unknown: measure both with --repeat 5, or give several files of each with commas"
        is_known = any(one.low is not None for one in found)
        lines.append("nothing changed beyond noise" if is_known else unknown)
    return [*lines, *(f"differs: {name}: {left} → {right}" for name, left, right in different), *warnings]


def _warnings(a: Sequence[Json], b: Sequence[Json], left: Points, right: Points) -> Iterator[str]:
    for side, results, mine, others in (("A", a, left, right), ("B", b, right, left)):
        yield from (f"{side} is partial: {one.get('ended')}" for one in results if one.get("partial"))
        different = {name: (was, now) for one in results[1:] for name, was, now in differences(results[0], one)}
        for name in sorted(different.keys() - SWEPT):
            was, now = different[name]
            yield f"the files of {side} are not repeats of one run: {name} is {was} and {now}"
        if missing := [name for name in mine if name not in others]:
            yield f"only in {side}: {'; '.join(missing)}"


def compare(
    a: Sequence[Json], b: Sequence[Json], confidence: float, threshold: float
) -> tuple[list[Change], list[tuple[str, str, str]], list[str]]:
    """The changes, the differences of the settings, and warnings. Raises ResultFileError for results with nothing in
    common.
    """
    kinds = [", ".join(dict.fromkeys(f"`{command_of(one)}`" for one in side)) for side in (a, b)]
    if "," in kinds[0] or kinds[0] != kinds[1]:
        raise ResultFileError(f"A is of {kinds[0]} and B of {kinds[1]}: nothing to compare")
    left, right = points(a), points(b)
    found = list(changes(left, right, confidence, threshold))
    if not found:
        raise ResultFileError(f"no point is in both: A has {'; '.join(left)}, B has {'; '.join(right)}")
    return found, differences(a[0], b[0]), list(_warnings(a, b, left, right))


def _read(names: str) -> list[Json]:
    """The results of files with commas between them. Raises ResultFileError that names the file."""
    all_results: list[Json] = []
    for name in names.split(","):
        results = load(Path(name))
        try:
            points(results)
        except ResultFileError as error:
            raise ResultFileError(f"{name}: {error}") from error
        all_results += results
    return all_results


@command("thalweg bench compare")
def main(argv: list[str]) -> int:
    """0: compared; 1: a file cannot be compared; 3: something got worse and --fail-on-worse was given."""
    description = (
        "Shows what changed from A to B beyond noise. Each is a result of bench serve, offline, one-batch, startup or"
        " kernels, of eval or ablate; several files with commas between them are repeats of one."
    )
    parser = CommandParser(prog="thalweg bench compare", description=description)
    parser.add_argument("a", metavar="A", help="the result before")
    parser.add_argument("b", metavar="B", help="the result after")
    add_flags(parser, "", FLAGS)
    args = parser.parse_args(argv)
    if not 0.5 <= args.confidence < 1 or not 0 <= args.threshold < 100:
        parser.error("--confidence is between 0.5 and 1, --threshold between 0 and 100 (percent)")
    found, different, warnings = compare(_read(args.a), _read(args.b), args.confidence, args.threshold / 100)
    lines = words(found, different, warnings)
    show(table(found, (args.a, args.b)))
    print("\n".join(lines))
    fields = [{"field": name, "a": left, "b": right} for name, left, right in different]
    result = {"a": args.a, "b": args.b, "changes": [asdict(one) for one in found], "words": lines}
    save(args.output_file, "bench compare", argv, vars(args), result | {"differences": fields})
    return 3 if args.fail_on_worse and any(one.verdict == "worse" for one in found) else 0
