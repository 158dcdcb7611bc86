"""Settings of a flow policy: its chain, besides the facts that recipes read of it."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from vla_rl.models.flow.transitions import Schedule
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
    """

    cameras: tuple[str, ...]
    state_size: int | None
    chunk_size: int
    horizon: int
    action_dim: int
    sampling: FlowSampling
