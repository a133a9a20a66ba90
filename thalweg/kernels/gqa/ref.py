"""Grouped-query attention over gathered keys and values."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> Tensor:
    """→ [R, q, H, d]; query head h reads key head h // (H / K); scores are scaled by d^-1/2.

    bias_RqS: float32, additive, 0 or -inf; every query sees at least one key.
    """
    out = F.scaled_dot_product_attention(
        q_RqHd.transpose(1, 2),
        key_RSKd.transpose(1, 2),
        value_RSKd.transpose(1, 2),
        attn_mask=bias_RqS.to(q_RqHd.dtype).unsqueeze(1),
        enable_gqa=bool(q_RqHd.shape[2] != key_RSKd.shape[2]),
    )
    return out.transpose(1, 2)
