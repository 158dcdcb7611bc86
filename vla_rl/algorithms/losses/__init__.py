"""Policy losses, the value loss, and the correction of a trainer that disagrees with its engine.

A policy loss is a function of a `TokenBatch` that returns one loss per token and additive
diagnostics; `vla_rl.algorithms.aggregation` reduces them to one number. Each is declared beside
its function, in a file of `policy`. Importing all of this does not import torch.
"""

from vla_rl.algorithms.losses.config import (
    PARAMETERS,
    CorrectionConfig,
    KlLossConfig,
    PolicyLossConfig,
    ValueLossConfig,
    safe_policy_loss,
)
from vla_rl.algorithms.losses.configured import (
    POLICY_LOSSES,
    Correction,
    MismatchDiagnostics,
    chosen_tokens,
    engine_correction,
    policy_loss,
    sequence_log_ratio,
)
from vla_rl.algorithms.losses.declaration import (
    DeclaredLoss,
    Diagnostics,
    LossResult,
    PolicyLoss,
    declare_loss,
    diagnose,
)
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.policy.ppo import (
    behavior_weights,
    clipped_surrogate,
    decoupled_surrogate,
    sequence_drift,
)
from vla_rl.algorithms.losses.token_batch import RatioLevel, Ratios, TokenBatch, ratios
from vla_rl.algorithms.losses.value_losses import (
    ValueDiagnostics,
    ValueLoss,
    clipped_value_loss,
    value_loss,
)

__all__ = [
    "LOSSES",
    "PARAMETERS",
    "POLICY_LOSSES",
    "Correction",
    "CorrectionConfig",
    "DeclaredLoss",
    "Diagnostics",
    "KlLossConfig",
    "LossResult",
    "MismatchDiagnostics",
    "PolicyLoss",
    "PolicyLossConfig",
    "RatioLevel",
    "Ratios",
    "TokenBatch",
    "ValueDiagnostics",
    "ValueLoss",
    "ValueLossConfig",
    "behavior_weights",
    "chosen_tokens",
    "clipped_surrogate",
    "clipped_value_loss",
    "declare_loss",
    "decoupled_surrogate",
    "diagnose",
    "engine_correction",
    "policy_loss",
    "ratios",
    "safe_policy_loss",
    "sequence_drift",
    "sequence_log_ratio",
    "value_loss",
]
