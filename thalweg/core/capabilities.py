"""Capability matching: backends declare what they support, and `select` picks the first one that meets the
requirements.

A `Capabilities` field has the supported values; the `Requirements` field of the same name is the one value that
is needed. Refusals are derived from the field names, so a new capability costs one field. Fields have no defaults:
every backend must state its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Mapping

from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, USER

Value = str | int | bool


class Capabilities:
    """Base of the capability records of one operation: frozen dataclasses whose fields are tuples of values."""


class Requirements:
    """Base of the requirement records of one operation: frozen dataclasses with the same field names, one value
    each.
    """


LACKS = {
    "sparse": "no sparse-attention kernel",
    "installed": "the library is not installed",
    "deterministic": "no batch-invariant kernel",
    "trees": "no tree masks",
}


@dataclass(frozen=True, slots=True)
class Selected:
    """The backend that `select` chose."""

    name: str
    source: str  # USER or AUTO
    reason: str  # why none of the backends before it; "" for the user's


def mismatches(required: Requirements, supported: Capabilities) -> list[str]:
    """One reason for each required value that the backend does not support; [] if it fits."""
    reasons = []
    for field in fields(required):  # type: ignore[arg-type]
        value, allowed = vars(required)[field.name], vars(supported)[field.name]
        if value in allowed:
            continue
        if isinstance(value, bool):
            reasons.append(LACKS.get(field.name, f"no {field.name}") if value else f"only {field.name}")
        else:
            reasons.append(f"{field.name} {value or 'none'}, not {' or '.join(sorted({*map(str, allowed)} - {''}))}")
    return reasons


def select(role: str, required: Requirements, catalog: Mapping[str, Capabilities], wish: str = "auto") -> Selected:
    """Returns the wished backend, or for "auto" the first one of `catalog` (its order is the preference) that fits.

    Raises UnsupportedConfig if the wish is unknown or does not fit (the message names one that does), and if nothing
    fits.
    """
    if wish != "auto" and wish not in catalog:
        raise UnsupportedConfig(f"{role}: unknown backend {wish!r}; there is {', '.join(catalog)}")
    misfits = {name: mismatches(required, supported) for name, supported in catalog.items()}
    fitting = [name for name, reasons in misfits.items() if not reasons]
    if wish in fitting:
        return Selected(wish, USER, "")
    if wish != "auto":
        instead = f"Use {fitting[0]}." if fitting else "No other backend fits either."
        raise UnsupportedConfig(f"{role} {wish}: {'; '.join(misfits[wish])}. {instead}")
    # reasons after the first often follow from it
    first = takewhile(lambda entry: entry[1], misfits.items())
    rejected = "; ".join(f"not {name}: {reasons[0]}" for name, reasons in first)
    if not fitting:
        raise UnsupportedConfig(f"{role}: nothing fits. {rejected}")
    return Selected(fitting[0], AUTO, rejected or "first in the order of measured preference")
