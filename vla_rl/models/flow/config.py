"""Settings of a flow policy: its chain, besides the facts that recipes read of it."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.models.flow.network import FlowProcessor
from vla_rl.models.flow.transitions import Schedule
from vla_rl.models.prismatic.config import TrainingImages
from vla_rl.models.prismatic.conventions import CheckpointFormat, Guidance
from vla_rl.types import Config, NonNegativeFloat, PositiveInt


class FlowSampling(Config, frozen=True, kw_only=True):
    """The chain from noise to actions, and the draws of imitation.

    Acting and learning use the same chain, so it belongs to the policy. The defaults are RLinf's for
    pi0 on LIBERO.
    """

    num_steps: PositiveInt = 4
    """Steps of the chain, K. Public policies are evaluated with 10, trained by RL with 3 to 5."""

    noise_level: NonNegativeFloat = 0.5
    """Noise level eta of the stochastic step: 0.3 to 0.5 in RLinf. With 0, decisions have no density: losses
    of a ratio are refused, and nft remains."""

    method: Literal["flow_sde", "flow_cps"] = "flow_sde"
    """Rule of the stochastic step: flow_sde keeps the distribution of states, flow_cps their total noise."""

    imitation_draws: PositiveInt = 1
    """Draws of noise and time in imitation, all on one reading of the observation."""

    advantage_guidance: Guidance | None = None
    """Act on the instruction with "Advantage: positive" at its end, for a policy that learnt such labels
    (`recap_flow`). Above 1, the velocity goes this much further in the direction that the label gives it,
    at the cost of a second pass. None: the instruction as it is."""

    @property
    def schedule(self) -> Schedule:
        """The chain with its stochastic step."""
        return Schedule(self.method, self.num_steps, self.noise_level)


def apply_options(sampling: FlowSampling, format: CheckpointFormat) -> FlowSampling:
    """Return a chain with the options that are set."""
    given = {
        "num_steps": format.flow_steps,
        "noise_level": format.noise_level,
        "advantage_guidance": format.flow_guidance,
    }
    return msgspec.structs.replace(
        sampling, **{name: value for name, value in given.items() if value is not None}
    )


@dataclass(frozen=True)
class FlowPolicyConfig:
    """Facts about a flow policy that recipes read.

    Attributes:
        cameras: observation keys of the images.
        state_size: numbers of the state; None if it is not read.
        chunk_size: rows of a chunk that are executed.
        horizon: rows of a chunk, H; imitation needs all.
        action_dim: numbers of the robot's action, D.
        sampling: the chain.
        fixed_image_size: pixels along each side that images must have; None for any, which are resized.
        padded_dim: width to which a folder of another project pads actions; None for a policy made here.
        action_ends: the least and the greatest value of each number of an action that the statistics of such a
            folder scale: quantiles, or a deviation around the mean.
        state_offsets: first numbers of an action that are offsets from the state.
        training_images: images that it is trained on here; None: those that a file of its folder names, if any.
    """

    cameras: tuple[str, ...]
    state_size: int | None
    chunk_size: int
    horizon: int
    action_dim: int
    sampling: FlowSampling
    fixed_image_size: int | None = None
    padded_dim: int | None = None
    action_ends: tuple[tuple[float, float], ...] | None = None
    state_offsets: int = 0
    training_images: TrainingImages | None = None

    def describe(self) -> str:
        """Describe in one line what the policy sees, decides and executes."""
        sampling, state = self.sampling, "" if self.state_size is None else " and state"
        guidance = sampling.advantage_guidance
        asked = (
            "" if guidance is None else f", asked for positive advantages with guidance {guidance}"
        )
        count = self.state_offsets
        offsets = f", the first {count} as offsets from the state" if count else ""
        return (
            f"sees {', '.join(self.cameras)}{state}, decides {self.horizon} x {self.action_dim} numbers{offsets} "
            f"in {sampling.num_steps} steps and executes {self.chunk_size} rows, {sampling.method} with "
            f"noise level {sampling.noise_level}{asked}"
        )


def make_config(
    network: Any, processor: FlowProcessor, sampling: FlowSampling, num_executed: int | None
) -> FlowPolicyConfig:
    """Collect the facts about a policy, from its parts.

    Args:
        network: a `FlowNetwork`.
        processor: conversions of observations and actions.
        sampling: the chain.
        num_executed: rows of a chunk that are executed; None for all.

    Raises: ConfigError if the robot's action is wider than the network's, or more rows are to be executed
    than there are.
    """
    if processor.action_dim > network.action_dim:
        raise ConfigError(
            f"the robot's action has {processor.action_dim} numbers, expected at most "
            f"{network.action_dim}, the width to which the network pads it; take a policy of this robot"
        )
    executed = network.horizon if num_executed is None else num_executed
    if not 1 <= executed <= network.horizon:
        raise ConfigError(
            f"num_executed is {executed}, expected 1 to {network.horizon}, the rows of a chunk"
        )
    return FlowPolicyConfig(
        cameras=processor.camera_keys,
        state_size=processor.state_size,
        chunk_size=executed,
        horizon=network.horizon,
        action_dim=processor.action_dim,
        sampling=sampling,
        fixed_image_size=processor.fixed_image_size,
        padded_dim=processor.padded_dim,
        action_ends=None if processor.padded_dim is None else _find_ends(processor),
        state_offsets=processor.state_offsets,
    )


def _find_ends(processor: FlowProcessor) -> tuple[tuple[float, float], ...]:
    ends = np.repeat(np.array([[[-1.0]], [[1.0]]], np.float32), processor.action_dim, axis=2)
    low, high = processor.restore_actions(ends)[:, 0].tolist()
    return tuple(zip(low, high, strict=True))
