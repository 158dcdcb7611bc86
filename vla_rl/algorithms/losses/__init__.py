"""Policy losses, the value loss, and the correction of a trainer that disagrees with its engine.

A policy loss is a function of a `TokenBatch` that returns one loss per token and additive
diagnostics; `vla_rl.algorithms.aggregation` reduces them to one number. Importing the configs does
not import torch; the other names do when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vla_rl.algorithms.losses.config import (
    PARAMETERS,
    PolicyLossConfig,
    RatioLevel,
    policy_loss_for,
)
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig, ValueLossConfig

if TYPE_CHECKING:
    from vla_rl.algorithms.losses.clipped_surrogates import clipped_surrogate
    from vla_rl.algorithms.losses.decoupled import behavior_weights, decoupled_surrogate
    from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
    from vla_rl.algorithms.losses.engine_mismatch import (
        Correction,
        MismatchDiagnostics,
        engine_correction,
    )
    from vla_rl.algorithms.losses.ratio_levels import Ratios, ratios
    from vla_rl.algorithms.losses.registry import POLICY_LOSSES, policy_loss
    from vla_rl.algorithms.losses.sequence_surrogates import sequence_drift, sequence_log_ratio
    from vla_rl.algorithms.losses.token_batch import PolicyLoss, TokenBatch
    from vla_rl.algorithms.losses.value_losses import (
        ValueDiagnostics,
        ValueLoss,
        clipped_value_loss,
        value_loss,
    )
    from vla_rl.algorithms.losses.whole_choices import chosen_tokens

__all__ = [
    "PARAMETERS",
    "POLICY_LOSSES",
    "Correction",
    "CorrectionConfig",
    "Diagnostics",
    "KlLossConfig",
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
    "decoupled_surrogate",
    "diagnose",
    "engine_correction",
    "policy_loss",
    "policy_loss_for",
    "ratios",
    "sequence_drift",
    "sequence_log_ratio",
    "value_loss",
]

_HOME = {
    "clipped_surrogates": ("clipped_surrogate",),
    "decoupled": ("behavior_weights", "decoupled_surrogate"),
    "diagnostics": ("Diagnostics", "diagnose"),
    "engine_mismatch": ("Correction", "MismatchDiagnostics", "engine_correction"),
    "ratio_levels": ("Ratios", "ratios"),
    "registry": ("POLICY_LOSSES", "policy_loss"),
    "sequence_surrogates": ("sequence_drift", "sequence_log_ratio"),
    "token_batch": ("PolicyLoss", "TokenBatch"),
    "value_losses": ("ValueDiagnostics", "ValueLoss", "clipped_value_loss", "value_loss"),
    "whole_choices": ("chosen_tokens",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
