"""Policy losses by the name that a config uses, and the terms that each loss may be combined with.

TokenBatch ─► loss ─► x correction weight (engine against trainer) ─► + coef * KL(policy || reference) ─► losses [B, T]
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from vla_rl.algorithms.choices import chosen, is_function_path, load_function
from vla_rl.algorithms.kl import KL_ESTIMATORS, importance_weighted_k3, k3
from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.config import PolicyLossConfig
from vla_rl.algorithms.losses.declaration import LossResult
from vla_rl.algorithms.losses.diagnostics import Diagnostics
from vla_rl.algorithms.losses.engine_mismatch import engine_correction
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig
from vla_rl.algorithms.losses.token_batch import PolicyLoss, TokenBatch
from vla_rl.errors import ConfigError

POLICY_LOSSES: Final[Mapping[str, Callable[..., LossResult]]] = MappingProxyType(
    {name: loss.function for name, loss in LOSSES.items()}
)
"""Losses by name; their keyword arguments are `PARAMETERS[name]`."""


def policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that a config describes, to be called once per micro-batch.

    Raises: ConfigError for a name that is neither known nor a function, or a parameter that a
    custom function lacks.
    """
    loss = _named_loss(config)
    if config.correction.is_active:
        loss = partial(_corrected, loss=loss, config=config.correction)
    if config.kl.coef > 0.0:
        loss = partial(_held_to_reference, loss=loss, config=config.kl)
    return loss


def _named_loss(config: PolicyLossConfig) -> PolicyLoss:
    if not is_function_path(config.name):
        return partial(chosen(POLICY_LOSSES, config.name, "policy loss"), **config.parameters)
    function: Any = load_function(config.name, "policy loss")
    unknown = sorted(config.chosen.keys() - inspect.signature(function).parameters.keys())
    if unknown:
        raise ConfigError(
            f"policy loss {config.name!r} has no keyword argument {unknown[0]!r}; "
            "leave the field out."
        )
    own: PolicyLoss = partial(function, **config.chosen)
    return own


def _corrected(batch: TokenBatch, *, loss: PolicyLoss, config: CorrectionConfig) -> LossResult:
    """Weigh a loss whose ratio is against the trainer's own log-probs.

    Only the weight contains the engine's difference.
    """
    proximal = batch.constant("proximal_log_prob", "PolicyLossConfig.correction")
    weight = batch.correction_weight
    if weight is None:
        weight = engine_correction(config, proximal, batch.behavior_log_prob, batch.mask).weight
    weight = torch.where(batch.mask, weight, 0.0).detach()
    around = dataclasses.replace(
        batch,
        behavior_log_prob=proximal,
        sampler_log_prob=batch.behavior_log_prob,
        correction_weight=weight,
    )
    losses, diagnostics = loss(around)
    dropped = batch.mask & (weight == 0.0)
    extra = {
        "correction_weight_mean": weight.float().sum(),
        "correction_dropped_fraction": dropped.float().sum(),
    }
    return torch.where(dropped, 0.0, losses * weight), _with_extra(diagnostics, extra)


def _held_to_reference(batch: TokenBatch, *, loss: PolicyLoss, config: KlLossConfig) -> LossResult:
    """Add coef * estimate of KL(policy || reference) to a loss."""
    reference = batch.constant("reference_log_prob", "PolicyLossConfig.kl")
    losses, diagnostics = loss(batch)
    log_prob = batch.masked_log_prob
    if config.estimator == "importance_weighted_k3":
        behavior = batch.constant("behavior_log_prob", "KlLossConfig.estimator")
        penalty = importance_weighted_k3(log_prob, behavior, reference)
    else:
        penalty = KL_ESTIMATORS[config.estimator](log_prob, reference)
    logged = torch.where(batch.mask, k3(log_prob.detach(), reference), 0.0)
    held = losses + torch.where(batch.mask, config.coef * penalty, 0.0)
    return held, _with_extra(diagnostics, {"reference_kl": logged.float().sum()})


def _with_extra(diagnostics: Diagnostics, extra_sums: dict[str, Tensor]) -> Diagnostics:
    return dataclasses.replace(diagnostics, extra_sums={**diagnostics.extra_sums, **extra_sums})
