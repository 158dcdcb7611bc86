"""Values that OpenVLA's families compute of an observation on the way to an action, step by step.

The preparation is deterministic, so that an episode's values can be computed again afterwards.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vla_rl.models.images.pipeline import image_stages
from vla_rl.models.prismatic.action_tokens import ActionScaler, ActionTokenizer
from vla_rl.models.robot_policy import TracedValue
from vla_rl.types import Observation


def trace_decision(
    policy: Any, observation: Observation, tokens: np.ndarray
) -> Iterator[TracedValue]:
    """Yield the values of a decision: images, proprioception, prompt, and the chunk before and after scaling.

    Args:
        policy: the `PrismaticPolicy` that decided.
        observation: what it saw.
        tokens: what it chose, int64 [T], or float32 [T] of a continuous head.
    """
    for camera in policy.config.cameras:
        images = torch.from_numpy(observation[camera].copy()).permute(2, 0, 1)[None]
        for name, stage in image_stages(policy.config.images).items():
            images = stage(images, policy.config.image_size)
            yield TracedValue(name, _to_numbers(images[0].permute(1, 2, 0)), camera)
    batch = policy.prepare([observation])
    if batch.proprio is not None:
        yield TracedValue("proprioception", _to_numbers(batch.proprio[0]))
    prompt = batch.prompts[0, : int(batch.prompt_lengths[0])]
    yield TracedValue("prompt_ids", _to_numbers(prompt))
    config, unit = policy.config, tokens
    if np.issubdtype(tokens.dtype, np.integer):
        # continuous heads have no tokens: their numbers are in the unit range already
        tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)
        unit = tokenizer.to_unit(tokens)
    unit = unit.reshape(-1, config.action_dim)
    yield TracedValue("unit_action", unit.astype(np.float64))
    yield TracedValue("action", ActionScaler(config.action_bounds).unscaled(unit))


def _to_numbers(tensor: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = tensor.cpu().numpy()
    return numbers
