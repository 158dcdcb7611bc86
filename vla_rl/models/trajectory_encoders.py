"""Build the trajectory encoder that a configuration names."""

from typing import TYPE_CHECKING, Any

from vla_rl.algorithms import EmbeddingConfig, ObservationEncoder, TrajectoryEncoder

if TYPE_CHECKING:  # they import torch, which reading a pipeline's settings does not need
    import torch

    from vla_rl.engines import DeviceLane, PolicyModel


def trajectory_encoder(
    config: EmbeddingConfig,
    model: "PolicyModel[Any]",
    lane: "DeviceLane",
    device: "torch.device | None" = None,
) -> TrajectoryEncoder:
    """Make SRPO's encoder. Call it before the policy is trained or restored, because the encoder
    `policy` copies its tower.

    Args:
        config: selects the encoder.
        model: the policy.
        lane: the device lane of the run.
        device: device on which the encoder computes. None: that of the policy.

    Raises: ConfigError for a policy without a vision tower, or a folder that is not a V-JEPA 2
    checkpoint.
    """
    if config.encoder == "policy":
        from vla_rl.models.policy_tower import PolicyTowerEncoder

        return PolicyTowerEncoder(config, model, lane, device)
    if config.encoder == "vjepa2":
        from vla_rl.models.vjepa2 import VJepa2Encoder  # imports transformers, which takes seconds

        own = next(model.network.parameters()).device
        return VJepa2Encoder(config.vjepa2, config.image_key, lane, device or own)
    return ObservationEncoder(config)
