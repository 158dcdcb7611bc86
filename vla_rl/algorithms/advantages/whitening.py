"""Scaling to mean 0 and standard deviation 1 over the unmasked values."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

VARIANCE_EPSILON: Final = 1e-8
"""Added to the variance before dividing by its square root."""


def whiten(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Compute (x - mean) / sqrt(var + 1e-8) over all unmasked values.

    The variance is unbiased (n - 1).

    Pass the values of all micro-batches and ranks at once. Masked values become 0 (in other systems
    they keep a shifted constant). A single value becomes 0, and so do values that are all equal.

    Args:
        values: float [N, S]; anything where masked.
        mask: bool [N, S].

    Returns: float64 [N, S].
    """
    chosen = np.asarray(values[mask], dtype=np.float64)
    whitened = np.zeros(mask.shape)
    if len(chosen) > 1 and np.ptp(chosen) > 0.0:
        whitened[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + VARIANCE_EPSILON)
    return whitened
