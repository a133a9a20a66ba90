"""The result of the resolver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import CheckpointError
from thalweg.core.report import Decision
from thalweg.core.sampling import SamplingParams
from thalweg.text.chat import ChatFormat
from thalweg.text.tokenizer import Tokenizer


class Plane(msgspec.Struct, frozen=True):
    """A kind of KV that the model keeps."""

    name: str
    layers: int
    bytes_per_token: int  # in all these layers
    in_host: bool = False  # see `kernels.swap_in`


class Sizes(msgspec.Struct, frozen=True):
    """Of a model and its drafter, in one process where a field says nothing else."""

    parameters: int  # of all processes of a copy; redundant experts are not counted
    weight_bytes: int  # in memory, as loaded
    planes: tuple[Plane, ...]  # of the KV cache
    slot_bytes: int = 0  # that drafts add to the state of a running request
    hot_bytes: int = 0  # of the hot sets of a running request
    hot_lookup_bytes: int = 0  # and for each token of the longest context

    @property
    def kv_bytes(self) -> int:
        """Bytes that one token takes in the KV cache."""
        return sum(plane.bytes_per_token for plane in self.planes)

    @property
    def host_kv_bytes(self) -> int:
        """The part of `kv_bytes` that is in host memory."""
        return sum(plane.bytes_per_token for plane in self.planes if plane.in_host)

    def hot_sets(self, context: int) -> int:
        """Bytes of the hot sets of a running request."""
        return self.hot_bytes + self.hot_lookup_bytes * context


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration of an engine, and what its clients need to know of the model."""

    path: Path  # folder of the checkpoint
    names: tuple[str, ...]  # under which the model is served
    architecture: str
    vocab: int
    engine: EngineConfig
    pages: int  # of the KV cache; an estimate where start-up measures them
    context: int  # as `pages`
    tokenizer: Tokenizer | None  # None where the folder has none
    chat: ChatFormat
    sampling: SamplingParams  # defaults of requests
    sizes: Sizes

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every choice with its reason."""
        return tuple(self.engine.report.current().values())

    def reader(self) -> Tokenizer:
        """The tokenizer. Raises CheckpointError where the folder has none."""
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path / 'tokenizer.json'} is missing: text needs a tokenizer beside the weights"
            )
        return self.tokenizer
