"""Machines by name, such as `h200x8`: what one GPU has and does at best, and how GPUs reach each other. No torch, and
no GPU is needed.

Rates are those of the makers' data sheets without sparsity. No program reaches them, so times computed from them are
lower bounds. Memory is what the driver gives away of an idle card. Every figure has its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from thalweg.config.backends import chip_of, libraries_for
from thalweg.config.machine import Machine
from thalweg.config.setting import nearest
from thalweg.core.errors import UnsupportedConfig

A_NODE = 8  # GPUs behind one NVLink switch, or with links to each other; beyond it the network counts
NETWORK = 50e9  # bytes/s a GPU and direction, assumed: one 400 Gbit/s adapter each, as in DGX and HGX systems
MOST_GPUS = 1024
CORES_A_GPU = 16  # assumed, as a node of two 64-core processors has
HOST_A_GPU = 128 * 10**9  # bytes of main memory, assumed


@dataclass(frozen=True, slots=True)
class Chip:
    """A kind of GPU."""

    name: str
    driver: str  # part of the name that the driver shows
    capability: str
    memory: int  # bytes
    read: float  # bytes a second of its memory
    bf16: float  # FLOP/s of dense products
    fp8: float  # as bf16 where the card has none
    link: float  # bytes a second of its fabric in one direction
    fp4: float = 0.0  # 0: the card has none, and such weights are multiplied as bf16
    maker: str = "NVIDIA"
    fabric: str = "NVLink"


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of one kind in equal nodes."""

    chip: Chip
    gpus: int
    gpus_of_node: int = A_NODE  # at most

    @property
    def name(self) -> str:
        return self.chip.name + (f"x{self.gpus}" if self.gpus > 1 else "")

    def machine(self) -> Machine:
        """An idle machine, as the resolver sees it."""
        host = self.gpus * HOST_A_GPU
        return Machine(
            cpu="assumed",
            cores=self.gpus * CORES_A_GPU,
            memory=host,
            free=host,
            gpus=(f"{self.chip.maker} {self.chip.driver}",) * self.gpus,
            gpu_free=self.chip.memory,
            capability=self.chip.capability,
            libraries=libraries_for(chip_of(self.chip.capability)),
        )


MIB = 1 << 20
TAKEN = 480 * MIB  # that an idle H100 has not free, of what nvidia-smi shows as total

AMD = "AMD Instinct", "Infinity Fabric"  # maker and fabric

# Rates of matrix products are half of what the data sheets give with sparsity; NVLink's are half of both directions.
CHIPS = {
    chip.name: chip
    for chip in (
        # NVIDIA A100 80GB SXM data sheet, NVLink 3. It has no FP8: such weights are multiplied as bf16
        Chip("a100", "A100-SXM4-80GB", "8.0", 81920 * MIB - TAKEN, 2.039e12, 312e12, 312e12, 300e9),
        # NVIDIA H100 SXM data sheet, NVLink 4
        Chip("h100", "H100 80GB HBM3", "9.0", 81559 * MIB - TAKEN, 3.35e12, 989e12, 1979e12, 450e9),
        # NVIDIA H200 SXM data sheet, NVLink 4
        Chip("h200", "H200", "9.0", 143771 * MIB - TAKEN, 4.8e12, 989e12, 1979e12, 450e9),
        # NVIDIA H20 SXM data sheet, NVLink 4
        Chip("h20", "H20", "9.0", 97871 * MIB - TAKEN, 4.0e12, 148e12, 296e12, 450e9),
        # NVIDIA HGX B200 data sheet at 1,000 W, NVLink 5
        Chip("b200", "B200", "10.0", 183359 * MIB - TAKEN, 8.0e12, 2250e12, 4500e12, 900e9, 9000e12),
        # AMD Instinct MI355X data sheet: seven Infinity Fabric links, to one GPU each
        Chip(
            "mi355", "MI355X", "gfx950", 294912 * MIB - TAKEN, 8.0e12, 2516.6e12, 5033.2e12, 537.6e9, 10066.3e12, *AMD
        ),
    )
}


def hardware(name: str, nodes: int = 1) -> Hardware:
    """So many machines of this name: a chip, and "x" with how many. Raises UnsupportedConfig naming those that are
    known.
    """
    found = re.fullmatch(r"([a-z0-9]+?)(?:x(\d+))?", name.strip().lower())
    known = ", ".join(CHIPS)
    if found is None or found[1] not in CHIPS:
        guess = nearest(name.strip().lower().partition("x")[0], CHIPS)
        raise UnsupportedConfig(
            f"--machine {name}: unknown"
            + (f"; did you mean {guess}?" if guess else ".")
            + f" There is {known}, alone or with x and a number of GPUs, such as h200x8. Without --machine the"
            " plan is for this machine"
        )
    gpus = int(found[2] or 1)
    if not 1 <= gpus <= MOST_GPUS or (gpus > A_NODE and gpus % A_NODE):
        raise UnsupportedConfig(
            f"--machine {name}: {gpus} GPUs; use 1 to {A_NODE}, or whole nodes of {A_NODE} up to {MOST_GPUS}"
        )
    if nodes > 1 and gpus > A_NODE or gpus * nodes > MOST_GPUS:
        raise UnsupportedConfig(
            f"--machine {name} --nnodes {nodes}: a node has up to {A_NODE} GPUs, and all together up to {MOST_GPUS}"
        )
    return Hardware(CHIPS[found[1]], gpus * nodes, gpus if nodes > 1 else A_NODE)


def hardware_of(machine: Machine) -> Hardware | None:
    """Data sheet of a real machine's GPUs by the name that the driver gives; None for one without, or of an unknown
    kind.
    """
    for chip in CHIPS.values():
        if machine.gpus and chip.driver in machine.gpus[0]:
            return Hardware(chip, len(machine.gpus))
    return None
