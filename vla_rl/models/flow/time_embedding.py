"""Embedding of the time of a flow."""

import math

import torch
from torch import Tensor


def embed_time(time: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Return sines and then cosines of a time, float64 [N, width].

    Periods grow geometrically from `min_period` to `max_period` (openpi, `create_sinusoidal_pos_embedding`).

    Args:
        time: [N], from 1 (noise) to 0 (actions).
        width: even width of the embedding.
        min_period, max_period: in units of time.
    """
    # in float64, because times of neighbouring steps differ less than a float32 phase resolves
    grows = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = min_period * (max_period / min_period) ** grows
    phase = 2 * math.pi / period * time.double()[:, None]
    return torch.cat([phase.sin(), phase.cos()], -1)
