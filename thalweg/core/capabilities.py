"""Capability matching: backends declare what they support, and `select` picks the first one that meets the
requirements.

A `Capabilities` field has the supported values; a requirement of the same name is the one value that is needed.
Refusals are derived from the field names, so a new capability costs one field. Fields have no defaults: every backend
must state its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Mapping

from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, USER

Required = Mapping[str, str | int | bool]  # by capability, in the order in which refusals name them


class Capabilities:
    """Base of the capability records of one operation: frozen dataclasses whose fields are tuples of values."""


LACKS = {
    "sparse": "no sparse-attention kernel",
    "installed": "the library is not installed",
    "deterministic": "no batch-invariant kernel",
    "trees": "no tree masks",
    "unaligned_latents": "its batch-invariant kernel needs a kv_lora_rank in whole tiles of 64",
    "other_shapes": "it needs at most 128 attention heads on each device, latents of 512 + 64 dims and an index_topk"
    " in whole tiles of 128",
    "padded_heads": "it would fill up the heads of a device to 64 or 128",
    "divided": "it has not run with --dcp-size above 1, or --shard-indexer",
    "host_latents": "it does not read latents in host memory (--enable-hisparse)",
    "other_index_heads": "it needs 32 or 64 index heads of 32, 64 or 128 dims",
    "unaligned_experts": "its grouped products need a hidden size in whole tiles of 128 and, on each rank, experts as"
    " as whole tiles of 64",
}


@dataclass(frozen=True, slots=True)
class Selected:
    """The backend that `select` chose."""

    name: str
    source: str  # USER or AUTO
    reason: str  # why none of the backends before it; "" for the user's


def mismatches(required: Required, supported: Capabilities) -> list[str]:
    """One reason for each required value that the backend does not support; [] if it fits. A wrong device is the only
    reason: the others follow from it.
    """
    reasons = []
    for name, value in required.items():
        allowed = vars(supported)[name]
        if value in allowed:
            continue
        if name == "device" or (name == "chip" and not value):
            return ["needs a GPU"]
        if isinstance(value, bool):
            reasons.append(LACKS.get(name, f"no {name}") if value else f"only {name}")
        else:
            reasons.append(f"{name} {value or 'none'}, not {' or '.join(sorted({*map(str, allowed)} - {''}))}")
    return reasons


def select(role: str, required: Required, catalog: Mapping[str, Capabilities], wish: str = "auto") -> Selected:
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
        instead = f"Use {fitting[0]}." if fitting else "No other one fits either; leave it out."
        raise UnsupportedConfig(f"{role} {wish}: {'; '.join(misfits[wish])}. {instead}")
    # reasons after the first often follow from it
    first = takewhile(lambda entry: entry[1], misfits.items())
    by_reason: dict[str, list[str]] = {}
    for name, reasons in first:
        by_reason.setdefault(reasons[0], []).append(name)
    rejected = "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in by_reason.items())
    if not fitting:
        raise UnsupportedConfig(f"{role}: nothing fits. {rejected}")
    return Selected(fitting[0], AUTO, rejected or "first in the order of measured preference")
