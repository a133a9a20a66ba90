"""Backends declare what they can do (`Caps`), a model with a machine and wishes makes a `Need`, and one function chooses.

A Caps field is a set, "the values I can serve"; a Need field is one value of the same name. The reasons of a refusal are derived from the
field names, so a new capability costs one field. Fields have no defaults: a new capability makes every backend state its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, Mapping, TypeVar

from thalweg.core.errors import CannotServe
from thalweg.core.report import AUTO, USER

Value = str | int | bool


class Caps:
    """Base of the capability records of one operation: frozen dataclasses whose fields are frozensets."""


class Need:
    """Base of the needs of one operation: frozen dataclasses with the same field names, one value each."""


C = TypeVar("C", bound=Caps)


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """role: what was chosen for; source: USER or AUTO; rejected: what was passed over: (name, its first misfit)."""

    role: str
    name: str
    source: str
    rejected: tuple[tuple[str, str], ...]

    @property
    def reason(self) -> str:
        if self.source == USER:
            return "asked for"
        return (
            "; ".join(f"not {name}: {why}" for name, why in self.rejected)
            or "first in the order of measured preference"
        )


def misfits(need: Need, caps: Caps) -> list[str]:
    """One reason for each needed value that is not in the backend's set; [] means that it fits."""
    reasons = []
    for f in fields(need):  # type: ignore[arg-type]
        wanted, can = vars(need)[f.name], vars(caps)[f.name]
        if wanted in can:
            continue
        if isinstance(wanted, bool):
            reasons.append(f"{'not' if wanted else 'only'} {f.name}")
        else:
            reasons.append(f"{f.name} {wanted or 'none'}, not {' or '.join(sorted(map(str, can - {''})))}")
    return reasons


def choose(role: str, need: Need, catalog: Mapping[str, C], wish: str = "auto") -> Choice[C]:
    """The first of `catalog` (its order is the preference) that fits, or the wish itself.

    Raises CannotServe when the wish is unknown or does not fit, naming the nearest that does, and when nothing fits.
    """
    if wish != "auto" and wish not in catalog:
        raise CannotServe(f"{role}: unknown backend {wish!r}; there is {', '.join(catalog)}")
    fitting = [name for name in catalog if not misfits(need, catalog[name])]
    if wish != "auto":
        if wish in fitting:
            return Choice(role, wish, USER, ())
        instead = f"use {fitting[0]}" if fitting else "nothing else fits either"
        raise CannotServe(f"{role}: {wish} cannot serve this: {'; '.join(misfits(need, catalog[wish]))}; {instead}")
    rejected = []
    for name in catalog:
        if why := misfits(need, catalog[name]):
            rejected.append((name, why[0]))  # often the others follow from it
        else:
            return Choice(role, name, AUTO, tuple(rejected))
    raise CannotServe(f"{role}: nothing fits. " + " | ".join(f"{name}: {why}" for name, why in rejected))
