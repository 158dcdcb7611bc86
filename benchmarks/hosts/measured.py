"""Measured constants of a 7B OpenVLA-OFT on LIBERO, which the simulation runs on.

An H100 computes the forward pass of a decision (347 tokens, 5.05 TFLOP) at 40 % of its peak while it
acts, and learns from one, with recomputation, at 45 %.
"""

import math
import random
from typing import Final

import numpy as np

ACTED_PER_S: Final = 78.0
"""Decisions that one GPU makes in a second."""

LEARNED_PER_S: Final = 22.0
"""Decisions that one GPU learns from in a second."""

READ_TOKENS: Final = 347
"""Tokens that a forward pass reads for one decision."""

BATCH: Final = 32
"""Most decisions of one forward pass that acts."""

BATCH_FLOOR_S: Final = 0.0045
"""Least seconds of a forward pass: 15.1 GB of weights are read once."""

MICRO_BATCH: Final = 16
"""Decisions of one pass that learns."""

STEP_AND_PUBLICATION_S: Final = 0.15
"""Optimizer step, and publication of the weights over NVLink."""

CHUNK_S, CHUNK_SIGMA = 0.020, 0.6
"""Mean seconds of one core for an action chunk in the simulator, and sigma of its logarithm."""

EPISODES_PER_GPU: Final = 64
"""Episodes of an update for each GPU, and episodes that run at the same time."""

GROUP_SIZE: Final = 8
CORES_PER_GPU: Final = 2
GPUS_PER_HOST: Final = 8
GPU_BYTES: Final = 80 * 10**9
HOST_BYTES: Final = 10**12

MOST_DECISIONS: Final = 64
_LENGTH_SCALE: Final = 27.1
"""Scale of the geometric lengths, for a mean of 25 decisions under the limit of 64."""


def num_decisions(seed: int) -> int:
    """Draw the length of an episode: geometric, 25 decisions on average, at most 64."""
    drawn = -math.log(1.0 - random.Random(seed).random()) * _LENGTH_SCALE
    return min(MOST_DECISIONS, 1 + int(drawn))


class ChunkTimes:
    """Seconds of one core that action chunks take, drawn thousands at a time."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def next_s(self) -> float:
        """Draw the seconds of the next chunk."""
        if not self._drawn:
            mean = math.log(CHUNK_S) - CHUNK_SIGMA**2 / 2
            self._drawn = self._source.lognormal(mean, CHUNK_SIGMA, 4096).tolist()
        return self._drawn.pop()


def acting_s(num_rows: int) -> float:
    """Return the seconds of a forward pass that acts."""
    return max(BATCH_FLOOR_S, num_rows / ACTED_PER_S)


def learning_s(num_rows: int) -> float:
    """Return the seconds of a pass that learns."""
    return num_rows / LEARNED_PER_S
