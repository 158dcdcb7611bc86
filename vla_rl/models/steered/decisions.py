"""Decisions of a head: its inputs, what is stored of them, and the chance that it draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.sampling import to_normal
from vla_rl.models.steered.config import HeadSizes
from vla_rl.types import Observation, Sampling

STATE_KEY: Final = "state"

HEAD_STREAM: Final = 1
"""Number of the head's stream among those of a decision's seed; the base draws from the seed itself."""


@dataclass(frozen=True)
class SteeredBatch:
    """N observations, or N stored decisions.

    Attributes:
        proprio: float32 [N, P].
        observed: the base's own batch; None for stored decisions.
        features: float32 [N, Z], of stored decisions; None while acting.
        reference: float32 [N, A], of stored decisions; None while acting.
    """

    proprio: Tensor
    observed: Any = None
    features: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of the head for N decisions, and what the base has read for them.

    Attributes:
        features: float32 [N, Z].
        proprio: float32 [N, P].
        reference: float32 [N, A].
        read: result of `FrozenBase.read`; None for stored decisions.
    """

    features: Tensor
    proprio: Tensor
    reference: Tensor
    read: Any = None

    @property
    def drawn(self) -> dict[str, Tensor]:
        """The arrays that are stored with a decision; with them, the head is scored without its base."""
        return {"features": self.features, "proprio": self.proprio, "reference": self.reference}


def list_drawn_sizes(sizes: HeadSizes) -> dict[str, int]:
    """Return the length of each array that is stored with a decision, by name."""
    return {"features": sizes.features, "proprio": sizes.proprio, "reference": sizes.action}


def check_drawn(sizes: HeadSizes, drawn: Mapping[str, np.ndarray] | None) -> None:
    """Check what a decision has stored, before it is scored.

    Raises: ValueError for what is missing or of another size.
    """
    for name, size in list_drawn_sizes(sizes).items():
        values = None if drawn is None else drawn.get(name)
        if values is None or values.shape != (size,):
            given = "nothing" if values is None else f"shape {list(values.shape)}"
            raise ValueError(
                f"`drawn` has {given} as {name!r}, expected [{size}]: the decision is of another policy, or "
                "of a head over another base; record it anew"
            )


def read_proprio(observation: Observation, size: int) -> np.ndarray:
    """Return the first `size` numbers of the robot's state, float32 [P].

    Raises: ValueError if there are fewer.
    """
    if size == 0:
        return np.zeros(0, np.float32)
    state = observation.get(STATE_KEY)
    if not isinstance(state, np.ndarray) or state.ndim != 1 or len(state) < size:
        given = "missing" if state is None else f"of shape {list(np.shape(state))}"
        raise ValueError(
            f"observation[{STATE_KEY!r}] is {given}, expected {size} numbers or more, which the head reads; "
            "set proprio_size to what the environment has"
        )
    return np.asarray(state[:size], np.float32)


def draw_noise(samplings: Sequence[Sampling], num_numbers: int) -> Tensor:
    """Draw standard normal numbers float32 [N, num_numbers], each row from its own seed."""
    # A stream of its own: noise that repeats what the base drew would explore along its chance.
    streams = [
        np.random.SeedSequence(sampling.seed, spawn_key=(HEAD_STREAM,)) for sampling in samplings
    ]
    uniforms = [np.random.Generator(np.random.Philox(each)).random(num_numbers) for each in streams]
    return to_normal(torch.from_numpy(np.stack(uniforms)))
