"""The catalogs of backends that the resolver chooses from, in order of preference, and what a model needs of each.

A backend is a row here; a capability is a field, which every row must answer."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.model import ModelFacts
from thalweg.core.fit import Caps, Need


@dataclass(frozen=True)
class AttentionCaps(Caps):
    """device: "cpu" or "cuda". heads: "mla" or "gqa". sparse: DSA's chosen context."""

    device: frozenset[str]
    heads: frozenset[str]
    sparse: frozenset[bool]


@dataclass(frozen=True)
class AttentionNeed(Need):
    device: str
    heads: str
    sparse: bool


ATTENTION = {
    "triton": AttentionCaps(device=frozenset({"cuda"}), heads=frozenset({"mla", "gqa"}), sparse=frozenset({False})),
    "reference": AttentionCaps(
        device=frozenset({"cpu", "cuda"}), heads=frozenset({"mla", "gqa"}), sparse=frozenset({False, True})
    ),
}


def attention_need(facts: ModelFacts, device: str) -> AttentionNeed:
    return AttentionNeed(device, "mla" if facts.mla else "gqa", facts.indexer is not None)
