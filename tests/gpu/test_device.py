"""The device multiplies. If this fails, no other test of this folder means anything."""

from __future__ import annotations

import torch


def test_the_device_multiplies(cuda: torch.device) -> None:
    a = torch.arange(12, dtype=torch.float32, device=cuda).view(3, 4)
    assert torch.equal((a @ a.T).cpu(), a.cpu() @ a.cpu().T)
