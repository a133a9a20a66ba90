"""Temperature and truncation in torch. Letters: E rows, V vocabulary, F floats of a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.topk_topp.ref import apply_topk_topp


def apply_temperature(logits_EV: Tensor, floats_EF: Tensor, top_k_E: Tensor, truncated: bool) -> Tensor:
    """What each row is drawn from: logits by temperature (a greedy row's as they are), -inf for what truncation
    removes; of a greedy row that may be left. floats_EF: temperature, top_p, min_p, ….
    """
    temperature_E, top_p_E, min_p_E = floats_EF[:, 0], floats_EF[:, 1], floats_EF[:, 2]
    scaled_EV = logits_EV / torch.where(temperature_E == 0, 1.0, temperature_E)[:, None]
    return apply_topk_topp(scaled_EV, top_k_E, top_p_E, min_p_E) if truncated else scaled_EV
