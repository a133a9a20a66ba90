"""Layout of a model over ranks: the axis along which each kind of sublayer is cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from thalweg.config.context_parallel import INTERLEAVE
from thalweg.core.errors import UnsupportedConfig
from thalweg.parallel.axis import SINGLE, Axis
from thalweg.parallel.pipeline import ONE_STAGE, Pipe


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where routed experts are, and how tokens get there."""

    redundant: int = 0  # slots beyond one for each expert
    by_slot: tuple[tuple[int, ...], ...] = ()  # of each layer, the expert of each slot; further layers: in order
    is_moving: bool = False  # experts move while requests run, by how many tokens choose each
    backend: str = "none"  # as --moe-a2a-backend
    deepep_mode: str = "auto"


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of one rank. On a single rank every axis is `SINGLE`. All but `world` are of one pipeline stage.

    The ranks of a layer are tp x dp: `tp` ranks compute the same tokens, `dp` groups of them compute different ones:
    of requests of their own, or with context parallelism (`cp`) of the same step. The experts are divided over all of
    these, as `ep` groups of `moe_tp` ranks.
    """

    tp: Axis = SINGLE  # shares attention heads, dense MLPs, vocabulary
    dp: Axis = SINGLE  # has other tokens, and the same experts; ranks with tokens of one step are neighbours
    # shares the width of dense MLPs: `tp`, or SINGLE, where each rank computes all of it
    dense: Axis = SINGLE
    ep: Axis = SINGLE  # shares experts
    moe_tp: Axis = SINGLE  # shares the width of each expert
    world: Axis = SINGLE  # all ranks of the model, those of other pipeline stages too
    pipe: Pipe = ONE_STAGE  # to the other pipeline stages
    experts: ExpertLayout = ExpertLayout()
    dcp: Axis = SINGLE  # neighbours among `tp` that share the KV of each sequence
    cp: Axis = SINGLE  # those of `dp` that divide the tokens of one step
    indexer: Axis = SINGLE  # shares the heads of indexers: `tp`, or SINGLE, where each rank scores by all of them
    cp_strategy: str = INTERLEAVE  # a name in `config.context_parallel`
    is_single: bool = field(init=False)  # one rank computes each layer

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_single", self.tp.size * self.dp.size == 1)
        if self.tp.size * self.dp.size != self.ep.size * self.moe_tp.size:
            raise UnsupportedConfig(
                f"experts are divided over {self.ep.size} x {self.moe_tp.size} ranks, and the layer has {self.tp.size}"
                f" x {self.dp.size}"
            )
        if self.dense.size not in (1, self.tp.size):
            raise UnsupportedConfig(
                f"the width of dense MLPs is divided over {self.dense.size} ranks: use 1 or the attention's"
                f" {self.tp.size}"
            )

    @property
    def scheduler(self) -> int:
        """The number of the scheduler that plans this rank's steps."""
        return self.dp.rank // self.cp.size


SINGLE_RANK = Layout()
