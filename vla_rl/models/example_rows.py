"""One observation that a policy can read, made from its configuration alone: for estimates, before
there is an environment.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_rl.models.mlp.config import MlpConfig
from vla_rl.models.prismatic.config import PrismaticConfig
from vla_rl.types import Observation

INSTRUCTION: Final = "pick up the black bowl between the plate and the ramekin and place it on it"
"""An instruction as long as LIBERO's longer ones."""


class ExampleRow(NamedTuple):
    """A prepared batch of one row, and tokens that could be its action."""

    batch: Any
    tokens: Tensor
    """int64 [1, T]."""


def example_row(model: Any) -> ExampleRow | None:
    """Return a row of `model`; None for language policies (`example_talks`), and for families that
    are not ours.
    """
    observation = example_observation(model)
    if observation is None:
        return None
    config = model.config
    idle = np.zeros((1, config.chunk_size, config.action_dim), np.float32)
    return ExampleRow(model.prepare([observation]), torch.from_numpy(model.encode(idle)))


def example_observation(model: Any, seed: int = 0) -> Observation | None:
    """Return pictures of noise and a state in the middle of its range; None as in `example_row`."""
    config = getattr(model, "config", None)
    if isinstance(config, MlpConfig):
        return {"state": np.zeros(config.state_size, np.float32)}
    if not isinstance(config, PrismaticConfig):
        return None
    size = (config.image_size, config.image_size, 3)
    random = np.random.default_rng(seed)
    seen: dict[str, Any] = {
        camera: random.integers(0, 256, size, dtype=np.uint8) for camera in config.cameras
    }
    proprio = getattr(config, "proprio", None)
    if proprio is not None:
        middle = (np.array(proprio.low) + np.array(proprio.high)) / 2
        seen[proprio.key] = middle.astype(np.float32)
    observation: Mapping[str, Any] = {**seen, "instruction": INSTRUCTION}
    return dict(observation)
