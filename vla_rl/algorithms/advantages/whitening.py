"""Mean 0 and standard deviation 1 over what is not masked."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

VARIANCE_EPSILON: Final = 1e-8
"""Added to the variance before its root is divided by."""


def whiten(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(x - mean) / sqrt(var + 1e-8), with mean and the unbiased variance (n - 1) of all unmasked values.

    Hand in the values of all micro-batches and ranks at once. Masked values become 0 (elsewhere they keep a shifted
    constant). A single value becomes 0; values that are all equal become 0.

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
