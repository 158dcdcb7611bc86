"""Losses of off-policy learners over a frozen policy, as pure functions on tensors.

targets         rewards of a decision ─► what a critic should say of it
critic_losses   TD error; CQL's penalty; IQL's expectile
actor_losses    RLT, TD3+BC, DAgger, filtered BC, AWR and IQL
soft_actor      SAC, RLPD, DSRL: tanh-Gaussian actors, entropy, temperature
recap           values of returns, which stored steps are called positive, guidance

No function here holds a network or draws a number that it was not given. Importing all of this
does not import torch.
"""

from vla_rl.algorithms.off_policy.actor_losses import (
    LossWeights,
    advantage_weights,
    cloning_targets,
    cloning_weights,
    drop_references,
    imitation_errors,
    imitation_loss,
    ramp_weights,
    value_and_cloning_loss,
    weighted_cloning_loss,
)
from vla_rl.algorithms.off_policy.critic_losses import (
    conservative_gaps,
    conservative_multiplier_loss,
    expectile_loss,
    td_loss,
)
from vla_rl.algorithms.off_policy.recap import (
    bin_loss,
    expected_values,
    guide,
    label_advantages,
    n_step_advantages,
    normalised_returns,
    smooth_advantages,
    spread_over_bins,
)
from vla_rl.algorithms.off_policy.soft_actor import (
    SampledActions,
    gaussian_log_probs,
    sample_squashed,
    soft_actor_loss,
    squashed_log_probs,
    temperature_loss,
)
from vla_rl.algorithms.off_policy.targets import (
    Reduction,
    bootstrap_discounts,
    chunk_returns,
    draw_members,
    move_target_parameters,
    noisy_target_actions,
    reduce_critics,
    soft_values,
    td_targets,
)

__all__ = [
    "LossWeights",
    "Reduction",
    "SampledActions",
    "advantage_weights",
    "bin_loss",
    "bootstrap_discounts",
    "chunk_returns",
    "cloning_targets",
    "cloning_weights",
    "conservative_gaps",
    "conservative_multiplier_loss",
    "draw_members",
    "drop_references",
    "expected_values",
    "expectile_loss",
    "gaussian_log_probs",
    "guide",
    "imitation_errors",
    "imitation_loss",
    "label_advantages",
    "move_target_parameters",
    "n_step_advantages",
    "noisy_target_actions",
    "normalised_returns",
    "ramp_weights",
    "reduce_critics",
    "sample_squashed",
    "smooth_advantages",
    "soft_actor_loss",
    "soft_values",
    "spread_over_bins",
    "squashed_log_probs",
    "td_loss",
    "td_targets",
    "temperature_loss",
    "value_and_cloning_loss",
    "weighted_cloning_loss",
]
