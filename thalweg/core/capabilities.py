"""Capability matching: backends declare what they support, and `select` picks the first one that meets the
requirements.

A `Capabilities` field is the set of supported values; the `Requirements` field of the same name is the one value that
is needed. Refusals are derived from the field names, so a new capability costs one field. Fields have no defaults:
every backend must state its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, Mapping, TypeVar

from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, USER

Value = str | int | bool


class Capabilities:
    """Base of the capability records of one operation: frozen dataclasses whose fields are frozensets."""


class Requirements:
    """Base of the requirement records of one operation: frozen dataclasses with the same field names, one value
    each.
    """


C = TypeVar("C", bound=Capabilities)


@dataclass(frozen=True, slots=True)
class Selected(Generic[C]):
    """The backend that `select` chose."""

    role: str  # operation that the backend was chosen for
    name: str
    source: str  # USER or AUTO
    rejected: tuple[tuple[str, str], ...]  # (name, first mismatch) of the backends that were passed over

    @property
    def reason(self) -> str:
        if self.source == USER:
            return "asked for"
        return (
            "; ".join(f"not {name}: {why}" for name, why in self.rejected)
            or "first in the order of measured preference"
        )


def mismatches(required: Requirements, supported: Capabilities) -> list[str]:
    """One reason for each required value that the backend does not support; [] if it fits."""
    reasons = []
    for field in fields(required):  # type: ignore[arg-type]
        value, allowed = vars(required)[field.name], vars(supported)[field.name]
        if value in allowed:
            continue
        if isinstance(value, bool):
            reasons.append(f"{'not' if value else 'only'} {field.name}")
        else:
            reasons.append(f"{field.name} {value or 'none'}, not {' or '.join(sorted(map(str, allowed - {''})))}")
    return reasons


def select(role: str, required: Requirements, catalog: Mapping[str, C], wish: str = "auto") -> Selected[C]:
    """Returns the wished backend, or for "auto" the first one of `catalog` (its order is the preference) that fits.

    Raises UnsupportedConfig if the wish is unknown or does not fit (the message names one that does), and if nothing
    fits.
    """
    if wish != "auto" and wish not in catalog:
        raise UnsupportedConfig(f"{role}: unknown backend {wish!r}; there is {', '.join(catalog)}")
    fitting = [name for name in catalog if not mismatches(required, catalog[name])]
    if wish != "auto":
        if wish in fitting:
            return Selected(role, wish, USER, ())
        instead = f"use {fitting[0]}" if fitting else "nothing else fits either"
        raise UnsupportedConfig(
            f"{role}: {wish} cannot serve this: {'; '.join(mismatches(required, catalog[wish]))}; {instead}"
        )
    rejected = []
    for name in catalog:
        if reasons := mismatches(required, catalog[name]):
            rejected.append((name, reasons[0]))  # the other reasons often follow from the first
        else:
            return Selected(role, name, AUTO, tuple(rejected))
    raise UnsupportedConfig(f"{role}: nothing fits. " + " | ".join(f"{name}: {why}" for name, why in rejected))
