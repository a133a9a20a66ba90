"""Temperature and truncation in torch. Letters: E rows, V vocabulary, F floats of a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.topk_topp.ref import apply_topk_topp


def apply_temperature(logits_EV: Tensor, floats_EF: Tensor, top_k_E: Tensor, truncated: bool) -> Tensor:
    """Logits divided by temperature, and -inf for tokens that truncation removes. Those of greedy rows are not divided,
    and may be truncated. floats_EF: see FLOATS in `kernels.build_inputs.ref`.
    """
    temperature_E, top_p_E, min_p_E, *_ = floats_EF.unbind(1)
    scaled_EV = logits_EV / torch.where(temperature_E == 0, 1.0, temperature_E)[:, None]
    return apply_topk_topp(scaled_EV, top_k_E, top_p_E, min_p_E) if truncated else scaled_EV
