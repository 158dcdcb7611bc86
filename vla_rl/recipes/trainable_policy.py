"""Checks and choices before a policy is trained by reinforcement learning: likelihood, trained part."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.models.families import require_method

if TYPE_CHECKING:
    from vla_rl.models.prismatic.config import LoraConfig
    from vla_rl.models.robot_policy import RobotPolicy

TrainedPart: TypeAlias = Literal["all", "expert"]


def choose_trained_part(policy: Any, part: TrainedPart) -> None:
    """Let gradients reach the chosen part of a policy alone. Raises: ConfigError if it has no such part."""
    if part == "expert":
        require_method(policy, "train_expert", "--train expert")()


def add_adapters(policy: Any, lora: "LoraConfig", seed: int) -> Any:
    """Return a policy with new adapters on what is trained. Raises: ConfigError if its family has none."""
    return require_method(policy, "adapted", "lora_rank")(lora, seed=seed)


def require_trainable(policy: "RobotPolicy", folder: str, learner: LearnerConfig) -> None:
    """Raise ConfigError if a loss cannot train a policy, before any simulator starts."""
    from vla_rl.learner.predictions import require_suitable_loss

    if getattr(policy.config, "head", "tokens") == "diffusion":
        raise ConfigError(
            f"{folder} has a diffusion head, which gives no likelihood of its actions; "
            "reinforcement learning needs one: use a checkpoint with tokens or an L1 head, or "
            "train this one with `sft_libero`"
        )
    require_suitable_loss(policy, learner)
