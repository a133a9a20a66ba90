"""Two nodes of a GPU each, which only sockets join: NCCL may use neither peer access nor shared memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.ranks.test_nodes import NAMED_S, Nodes

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO",
}
TRITON = "--dsa-decode-backend triton --moe-runner-backend triton --fp8-gemm-backend triton".split()  # start sooner
LAYOUTS = {
    "tp2": ("--tp-size", "2"),
    "dp2 ep2": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"),
    "pp2": ("--pp-size", "2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_serve_and_one_is_lost_and_comes_back(layout: str, tmp_path: Path, cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("takes two GPUs")
    flags = (*LAYOUTS[layout], *TRITON, "--max-total-tokens", "32768")
    each = [SOCKETS | {"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
    with contextlib.closing(Nodes(tmp_path, "127.0.0.1", flags, (), each)) as nodes:
        nodes.wait("ready", seconds=200)
        nodes.check()
        said = nodes.log.read_text(errors="replace")
        assert "NET/Socket" in said and "via P2P" not in said and "via SHM" not in said
        nodes.kill_agent()
        assert "lost with node 1" in nodes.wait("restarting", seconds=NAMED_S)["reason"]
        nodes.start_agent()
        nodes.wait("ready", seconds=200)
        nodes.check()
