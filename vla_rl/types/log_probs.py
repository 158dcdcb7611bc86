"""The check that numbers can be log-probs."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_LOG_PROB: Final = 1e-3
"""Largest log-prob of a token, in nats. Rounding in a log-softmax may lift a certain token a little
above 0; larger numbers are not natural logs of probabilities."""


def first_impossible(log_probs: NDArray[np.floating], tokens: NDArray[np.generic]) -> int | None:
    """Find the first log-prob that no policy can have.

    Args:
        log_probs: float [T].
        tokens: [T]; integers are ids with a probability, floats are numbers with a density, whose
            log may be above 0.

    Returns: its index, or None.
    """
    # NaN compares false with everything
    possible = (log_probs > -np.inf) & (
        log_probs < np.inf if tokens.dtype.kind == "f" else log_probs <= MAX_LOG_PROB
    )
    return None if possible.all() else int(np.argmin(possible))
