"""What `thalweg bench load` saw, as checks against its promises and as numbers for the result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec

from thalweg.bench.metrics import Record, failures, measure
from thalweg.bench.pace import Pace
from thalweg.bench.twins import Verdict
from thalweg.bench.watch import Sample, pace

MIB = 2**20
KEPT = ("duration", "completed", "failed", "total_output_tokens", "output_throughput", "max_concurrent_requests")
LATENCIES = ("ttft_ms", "itl_ms", "delay_ms")


@dataclass(frozen=True, slots=True)
class Round:
    """One load. samples: the first was taken before it and the last after it. client_cpu: seconds of the client's
    process. overhead: ms from the engine's step to the socket.
    """

    records: list[Record]
    duration: float
    samples: list[Sample]
    client_cpu: float
    overhead: dict[str, float] | None

    @property
    def tokens(self) -> int:
        return sum(record.output_tokens for record in self.records)

    @property
    def server_us(self) -> float:
        """CPU microseconds of the server's process for each output token: connections, requests and everything else
        included.
        """
        return self._us(self.samples[-1].server.cpu - self.samples[0].server.cpu)

    @property
    def pace(self) -> Pace | None:
        return pace(self.samples, len(self.records))

    def _us(self, seconds: float) -> float:
        return 1e6 * seconds / max(self.tokens, 1)

    def numbers(self) -> dict[str, object]:
        measured = measure(self.records, self.duration)
        first, last = self.samples[0], self.samples[-1]
        return {
            "server_cpu_us_per_token": self.server_us,
            "engine_cpu_us_per_token": self._us(last.engine.cpu - first.engine.cpu),
            "client_cpu_us_per_token": self._us(self.client_cpu),
            "server_overhead_ms": self.overhead,
            "engine_pace": msgspec.to_builtins(self.pace),
            **{name: value for name, value in measured.items() if name in KEPT or name.endswith(LATENCIES)},
            "failures": failures(self.records),
        }


@dataclass(frozen=True, slots=True)
class Seen:
    """A whole run. before, after: with nothing under way. verdicts: of the streams of each round against the twins."""

    before: Sample
    rounds: list[Round]
    twins: Round
    few: Round
    chat: Round
    verdicts: list[Verdict]
    after: Sample

    @property
    def loads(self) -> tuple[Round, ...]:
        return (*self.rounds, self.twins, self.few, self.chat)


@dataclass(frozen=True, slots=True)
class Check:
    """A promise: what was measured, what it may be, and whether it holds."""

    name: str
    measured: str
    limit: str
    ok: bool

    @property
    def line(self) -> str:
        return f"{'ok' if self.ok else 'MISSED':<8}{self.name:<52}{self.measured}  (limit: {self.limit})"


def judge(seen: Seen, paces: tuple[Pace, Pace], args: argparse.Namespace) -> list[Check]:
    """paces: of the engine alone, with all streams and with the few."""
    checks = [_answers(seen), _lengths(seen), *_texts(seen.verdicts), *_home(seen), *_memory(seen, args.memory_limit)]
    for name, one in (
        (f"{args.streams} streams", min(seen.rounds, key=lambda one: one.server_us)),
        (f"{args.few} streams", seen.few),
        (f"{args.few} streams, chat", seen.chat),
    ):
        limit = f"{args.cpu_limit:g} us"
        checks.append(
            Check(f"server CPU a token, {name}", f"{one.server_us:.1f} us", limit, one.server_us < args.cpu_limit)
        )
    slots = args.max_running_requests or args.streams
    if slots >= args.streams:  # else prompts are computed all the time, and no two steps are alike
        checks.append(_kept(f"{args.streams} streams", seen.rounds, paces[0], args.pace_limit))
    if slots >= args.few:
        checks.append(_kept(f"{args.few} streams", [seen.few], paces[1], args.pace_limit))
    return checks


def _answers(seen: Seen) -> Check:
    sent, failed = (
        sum(len(one.records) for one in seen.loads),
        [r for one in seen.loads for r in one.records if not r.ok],
    )
    return Check("requests that failed", f"{len(failed)} of {sent}", "0", not failed)


def _lengths(seen: Seen) -> Check:
    """The engine's own count of tokens against those that the answers say they have."""
    made = seen.after.stats.decode_tokens - seen.before.stats.decode_tokens
    told = sum(one.tokens for one in seen.loads) + sum(v.asked_tokens for v in seen.verdicts)
    return Check("tokens that answers have of those sampled", f"{told} of {made}", "all", told == made)


def _texts(verdicts: Sequence[Verdict]) -> list[Check]:
    compared, equal = sum(v.compared for v in verdicts), sum(v.equal for v in verdicts)
    excused, wrong = sum(v.excused for v in verdicts), sum(len(v.wrong) for v in verdicts)
    told = f"{equal} of {compared}, {excused} apart at a near-tie of the model, {wrong} wrong"
    return [Check("streams with the text of their twin", told, "none wrong", compared > 0 and not wrong)]


def _home(seen: Seen) -> list[Check]:
    stats, before, after = seen.after.stats, seen.before.server.files, seen.after.server.files
    left = f"{stats.running} running, {stats.waiting} waiting, {stats.pages_used} pages"
    return [
        Check("left behind at the end", left, "nothing", not (stats.running or stats.waiting or stats.pages_used)),
        Check("open files of the server, after - before", f"{after - before}", "at most 2", after - before <= 2),
    ]


def _memory(seen: Seen, limit: float) -> list[Check]:
    """Growth after the first round: that one fills caches, pools and the heap."""
    checks = []
    for name in ("server", "engine"):
        first = max(_rss(sample, name) for sample in seen.rounds[0].samples)
        most = max(_rss(sample, name) for one in seen.loads[1:] for sample in one.samples)
        told = f"{(most - first) / MIB:.1f} MiB (peak {most / MIB:.0f} MiB)"
        checks.append(
            Check(f"memory of the {name}, growth after round 1", told, f"{limit:g} MiB", most - first <= limit * MIB)
        )
    return checks


def _rss(sample: Sample, name: str) -> int:
    return (sample.server if name == "server" else sample.engine).rss


def _kept(name: str, rounds: Sequence[Round], own: Pace, limit: float) -> Check:
    found = [seen for one in rounds if (seen := one.pace) is not None]
    label, wanted = f"engine's pace, {name}, of that alone", f"{limit:.0%}"
    if not found:
        return Check(label, "not measured: too short for two looks", wanted, False)
    best = max(found, key=lambda one: one.steps_per_second)
    share = best.steps_per_second / own.steps_per_second
    cpu = f"{best.cpu_us_per_token:.0f} us of CPU a token, alone {own.cpu_us_per_token:.0f}"
    told = f"{share:.1%} ({best.steps_per_second:.2f} of {own.steps_per_second:.2f} steps/s; {cpu})"
    return Check(label, told, wanted, share >= limit)


def tell(seen: Seen, paces: tuple[Pace, Pace], checks: Sequence[Check]) -> dict[str, object]:
    """The numbers of a run."""
    return {
        "checks": [asdict(check) for check in checks],
        "ok": all(check.ok for check in checks),
        "alone": {"streams": msgspec.to_builtins(paces[0]), "few": msgspec.to_builtins(paces[1])},
        "rounds": [one.numbers() for one in seen.rounds],
        "twins": seen.twins.numbers(),
        "few": seen.few.numbers(),
        "few_chat": seen.chat.numbers(),
        "texts": [asdict(verdict) for verdict in seen.verdicts],
        "memory": {
            "columns": ["seconds", "server_mib", "engine_mib", "running", "waiting", "pages_used"],
            "rows": _series(seen),
        },
    }


def _series(seen: Seen) -> list[list[float]]:
    """Memory and load over time, a row a second, from the first look to the last."""
    start = seen.before.at
    rows: dict[int, list[float]] = {}
    for look in (seen.before, *(sample for one in seen.loads for sample in one.samples), seen.after):
        stats, mib = look.stats, [round(one.rss / MIB, 1) for one in (look.server, look.engine)]
        rows[int(look.at - start)] = [round(look.at - start, 2), *mib, stats.running, stats.waiting, stats.pages_used]
    return list(rows.values())
