"""Policy losses, the value loss, and the correction of a trainer that disagrees with its engine.

A policy loss is a function of a `TokenBatch` that returns one loss per token and additive
diagnostics; `vla_rl.algorithms.aggregation` reduces them to one number. Each is declared in its own
file in `policy`. Importing all of this does not import torch.
"""

from vla_rl.algorithms.losses.config import PARAMETERS, PolicyLossConfig, safe_policy_loss
from vla_rl.algorithms.losses.declaration import DeclaredLoss, LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.engine_mismatch import (
    Correction,
    MismatchDiagnostics,
    engine_correction,
)
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.policy.decoupled_ppo import behavior_weights, decoupled_surrogate
from vla_rl.algorithms.losses.policy.opsm import sequence_drift
from vla_rl.algorithms.losses.policy.ppo import clipped_surrogate
from vla_rl.algorithms.losses.ratio_levels import RatioLevel, Ratios, ratios
from vla_rl.algorithms.losses.registry import POLICY_LOSSES, policy_loss
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig, ValueLossConfig
from vla_rl.algorithms.losses.token_batch import PolicyLoss, TokenBatch
from vla_rl.algorithms.losses.value_losses import (
    ValueDiagnostics,
    ValueLoss,
    clipped_value_loss,
    value_loss,
)
from vla_rl.algorithms.losses.whole_batch import chosen_tokens, sequence_log_ratio

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
    "Parameter",
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
