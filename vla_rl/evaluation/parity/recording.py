"""Recording of an episode of ours, from the simulator's image to the executed action.

Every boundary of every decision is recorded.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from vla_rl.evaluation.parity.trace import Trace, TraceEntry
from vla_rl.models.images.pipeline import image_stages
from vla_rl.models.prismatic.action_tokens import ActionScaler, ActionTokenizer
from vla_rl.types import Trajectory

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy


def record_trace(trajectory: Trajectory, policy: "VlaPolicy", source: str) -> Trace:
    """Return the values of an episode.

    Images and prompts are prepared again, by the code that acted: the preparation is
    deterministic.

    Args:
        trajectory: the episode, with whole observations.
        policy: the policy that acted in it.
        source: description of the loop, for tables.
    """
    entries = list(_entries(trajectory, policy))
    last = len(trajectory.steps) - 1
    success = bool(trajectory.stop_reason.is_success)
    return Trace(source, (*entries, TraceEntry(last, "success", success)))


def _entries(trajectory: Trajectory, policy: "VlaPolicy") -> Iterator[TraceEntry]:
    for decision, step in enumerate(trajectory.steps):
        seen = step.observation
        yield TraceEntry(decision, "instruction", seen["instruction"])
        for camera in policy.config.cameras:
            for boundary, image in _images(seen[camera], policy):
                yield TraceEntry(decision, boundary, image, camera)
        batch = policy.prepare([seen])
        if batch.proprio is not None:
            yield TraceEntry(decision, "state", np.asarray(seen["state"]))
            yield TraceEntry(decision, "proprioception", _numbers(batch.proprio[0]))
        prompt = batch.prompts[0, : int(batch.prompt_lengths[0])]
        yield TraceEntry(decision, "prompt_ids", _numbers(prompt))
        yield TraceEntry(decision, "tokens", step.chunk.tokens)
        for boundary, actions in _actions(step.chunk.tokens, policy):
            yield TraceEntry(decision, boundary, actions)
        executed = step.chunk.actions[: len(step.rewards)]
        yield TraceEntry(decision, "executed_action", executed)


def _images(frame: np.ndarray, policy: "VlaPolicy") -> Iterator[tuple[str, np.ndarray]]:
    # the environment turns OpenGL's image by 180 degrees, which takes nothing away
    yield "camera", np.ascontiguousarray(frame[::-1, ::-1])
    yield "orientation", frame
    images = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None]
    for name, stage in image_stages(policy.config.images).items():
        images = stage(images, policy.config.image_size)
        yield name, _numbers(images[0].permute(1, 2, 0))


def _actions(tokens: np.ndarray, policy: "VlaPolicy") -> Iterator[tuple[str, np.ndarray]]:
    config = policy.config
    unit: np.ndarray = tokens
    if np.issubdtype(tokens.dtype, np.integer):
        # continuous heads have no tokens: their numbers are in the unit range already
        tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)
        unit = tokenizer.to_unit(tokens)
    unit = unit.reshape(-1, config.action_dim)
    yield "unit_action", unit.astype(np.float64)
    yield "action", ActionScaler(config.action_bounds).unscaled(unit)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = tensor.cpu().numpy()
    return numbers
