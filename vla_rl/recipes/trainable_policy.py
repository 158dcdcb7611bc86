"""Checks and choices before a policy is trained by reinforcement learning: likelihood, chain, trained part."""

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.models.families import require_method
from vla_rl.types import Config, NonNegativeFloat, PositiveInt

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


class FlowTrainingConfig(Config, frozen=True, kw_only=True):
    """Options of flow policies alone; a checkpoint of a run keeps the chain that it was trained with."""

    num_steps: PositiveInt | None = None
    """Steps from noise to actions, in acting and learning: public policies name 10, and are trained with 3
    to 5. None: as the folder says."""

    noise_level: NonNegativeFloat | None = None
    """Noise of the one stochastic step, 0.3 to 0.5 in others' runs; with 0 only the loss nft can learn.
    None: as the folder says, else 0.5."""

    train: Literal["all", "expert"] = "all"
    """Part that is trained: all, or the expert alone with the projections of state and actions."""

    def prepare_policy(self, policy: "RobotPolicy") -> "RobotPolicy":
        """Return the policy with the chosen chain, its trained part chosen.

        Raises: ConfigError if an option is set for another policy than a flow.
        """
        if self == FlowTrainingConfig():
            return policy
        with_sampling = require_method(policy, "with_sampling", "an option of flow")
        config: Any = policy.config
        chosen = {"num_steps": self.num_steps, "noise_level": self.noise_level}
        changes = {name: value for name, value in chosen.items() if value is not None}
        policy = with_sampling(msgspec.structs.replace(config.sampling, **changes))
        if self.train != "all":
            from vla_rl.models.flow.trained_parts import choose_trained

            choose_trained(policy.network, self.train, None, seed=0)
        return policy


def require_trainable(policy: "RobotPolicy", folder: str, learner: LearnerConfig) -> None:
    """Raise ConfigError if a loss cannot train a policy, before any simulator starts."""
    # imports torch, which `--help` does without
    from vla_rl.learner.predictions import require_suitable_loss

    if getattr(policy.config, "head", "tokens") == "diffusion":
        raise ConfigError(
            f"{folder} has a diffusion head, which gives no likelihood of its actions; "
            "reinforcement learning needs one: use a checkpoint with tokens or an L1 head, or "
            "train this one with `sft_libero`"
        )
    require_suitable_loss(policy, learner)
