"""`--launcher torchrun`: torchrun starts the command once on each node. Its store tells where the first one listens."""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed has it without exporting it

from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.node_start import end_with_parent, free_address

# what torchrun sets: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
NODE, NODES, PER_NODE = "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"
HOST, PORT, TURN = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"
EXAMPLE = "torchrun --nnodes 2 --nproc-per-node 1 ... --no-python thalweg serve MODEL --launcher torchrun"
WAIT_S = 300.0  # for the first node to say where it listens


def from_torchrun(options: Options) -> Options:
    """The options with the nodes, this node's number and the address of the first one. Raises UnsupportedConfig."""
    found = {name: os.environ.get(name) for name in (NODE, NODES, PER_NODE, HOST, PORT)}
    if missing := [name for name, value in found.items() if value is None]:
        raise UnsupportedConfig(f"launcher: torchrun did not start this ({missing[0]} is not set); use {EXAMPLE}")
    if found[PER_NODE] != "1":
        raise UnsupportedConfig(f"launcher: Thalweg starts the processes of a node itself; use {EXAMPLE}")
    end_with_parent()  # torchrun gives the command a session of its own
    host, node = os.environ[HOST], int(os.environ[NODE])
    store = TCPStore(host, int(os.environ[PORT]), is_master=False, timeout=timedelta(seconds=WAIT_S))
    key = f"thalweg/{os.environ.get(TURN, 0)}"
    if node == 0:
        store.set(key, free_address(host))
    address = store.get(key).decode()
    return replace(options, nnodes=int(os.environ[NODES]), node_rank=node, dist_init_addr=address)
