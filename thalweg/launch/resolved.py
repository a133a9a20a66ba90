"""What the resolver says: the settings of an engine, and for each choice its source and reason. Plain data; printed,
logged, served.
"""

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
    """A kind of KV that the model keeps. bytes_per_token: in all `layers` together."""

    name: str
    layers: int
    bytes_per_token: int


class Sizes(msgspec.Struct, frozen=True):
    """parameters: how many numbers the weights are. weight_bytes: what they take in memory as loaded. planes: the KV
    cache's parts. slot_bytes: what drafts add to the state of a running request.
    """

    parameters: int
    weight_bytes: int
    planes: tuple[Plane, ...]
    slot_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes that one token takes in the KV cache."""
        return sum(plane.bytes_per_token for plane in self.planes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """path: folder of the checkpoint. names: under which the model is served. vocab: token ids. engine: what an engine
    is built from. pages, context: the engine's, or an estimate where it measures them. tokenizer: None where the folder
    has none (a plan needs none). chat: encoder of conversations and parsers of answers. sampling: what a request gets
    that sets nothing.
    """

    path: Path
    names: tuple[str, ...]
    architecture: str
    vocab: int
    engine: EngineConfig
    pages: int
    context: int
    tokenizer: Tokenizer | None
    chat: ChatFormat
    sampling: SamplingParams
    sizes: Sizes

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every choice with its reason."""
        return tuple(self.engine.report.current().values())

    def reader(self) -> Tokenizer:
        """The tokenizer, for those who cannot do without. Raises CheckpointError."""
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path / 'tokenizer.json'} is missing: text needs a tokenizer beside the weights"
            )
        return self.tokenizer
