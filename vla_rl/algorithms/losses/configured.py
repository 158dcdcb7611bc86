"""The policy loss that a configuration describes, with the terms that it is combined with.

TokenBatch ─► loss ─► x correction weight (engine against trainer) ─► + coef * KL(policy || reference) ─► losses [B, T]

The correction is for an engine and a trainer that disagree about log-probs:

    kappa_t = exp(proximal_log_prob - behavior_log_prob)   under the acting weights: trainer's / engine's

Two programs never compute the same log-probs to the last bit, and a quantised or differently
batched engine differs more. A correction weighs or drops tokens by kappa, a constant: gradients
flow through log_prob / proximal_log_prob. It is computed once over a whole update, because
sequences may span rows and micro-batches; so are the ratios of sequences that span several rows, and
the choices of tokens, over a whole mini-batch.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from vla_rl.algorithms.kl import KL_ESTIMATORS, exact_kl, importance_weighted_k3, k3
from vla_rl.algorithms.losses.config import CorrectionConfig, KlLossConfig, PolicyLossConfig
from vla_rl.algorithms.losses.declaration import Diagnostics, LossResult, PolicyLoss
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.token_batch import MAX_LOG_RATIO, SequencesOfRows, TokenBatch, ratios
from vla_rl.algorithms.tensors import Tensor, full_precision, torch
from vla_rl.errors import ConfigError
from vla_rl.util.imports import choose, is_function_path, load_function

POLICY_LOSSES: Final[Mapping[str, Callable[..., LossResult]]] = MappingProxyType(
    {name: loss.function for name, loss in LOSSES.items()}
)
"""Losses by name, functions of a batch and of the configuration that `LOSSES[name].config` is."""


def policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that a config describes, to be called once per micro-batch.

    Raises: ConfigError for a name that is neither known nor a function, or a parameter that a
    custom function lacks.
    """
    loss = _named_loss(config)
    # the correction first and the penalty around it: the weight is of the data, and the distance
    # from the reference is not
    if config.correction.is_active:
        loss = partial(_corrected, loss=loss, config=config.correction)
    if config.kl.coef > 0.0:
        loss = partial(_with_kl_penalty, loss=loss, config=config.kl)
    return partial(_with_behavior_kl, loss=loss) if config.predicted == "next_state" else loss


def _named_loss(config: PolicyLossConfig) -> PolicyLoss:
    if not is_function_path(config.name):
        loss = choose(POLICY_LOSSES, config.name, "policy loss")
        return partial(loss, config=config.parameters)
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
    # the loss sees the trainer's own numbers as those that acted: its ratio starts at exactly 1,
    # and the engine's rounding is in the weight alone
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


def _with_kl_penalty(batch: TokenBatch, *, loss: PolicyLoss, config: KlLossConfig) -> LossResult:
    """Add coef * estimate of KL(policy || reference) to a loss."""
    reference = batch.constant("reference_log_prob", "PolicyLossConfig.kl")
    losses, diagnostics = loss(batch)
    if config.is_exact:
        exact = exact_kl(
            batch.predicted("KlLossConfig.estimator"), reference, batch.by_row("step_std", "kl")
        )
        held = losses + torch.where(batch.mask, config.coef * exact, 0.0)
        return held, _with_extra(diagnostics, {"reference_kl": _sum_masked(exact, batch.mask)})
    log_prob = batch.masked_log_prob
    if config.estimator == "importance_weighted_k3":
        behavior = batch.constant("behavior_log_prob", "KlLossConfig.estimator")
        penalty = importance_weighted_k3(log_prob, behavior, reference)
    else:
        penalty = KL_ESTIMATORS[config.estimator](log_prob, reference)
    # k3 is logged whatever the estimator of the loss is, so that runs can be compared; it is the
    # one with low variance
    logged = _sum_masked(k3(log_prob, reference), batch.mask)
    held = losses + torch.where(batch.mask, config.coef * penalty, 0.0)
    return held, _with_extra(diagnostics, {"reference_kl": logged})


def _with_behavior_kl(batch: TokenBatch, *, loss: PolicyLoss) -> LossResult:
    """Report the exact KL(policy || weights that acted), if the batch has the means of both."""
    losses, diagnostics = loss(batch)
    if batch.prediction is None:
        return losses, diagnostics
    behavior = batch.constant("behavior_prediction", "the exact KL")
    exact = exact_kl(batch.predicted("the exact KL"), behavior, batch.by_row("step_std", "kl"))
    return losses, _with_extra(diagnostics, {"behavior_kl": _sum_masked(exact, batch.mask)})


def _sum_masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).float().sum()


def _with_extra(diagnostics: Diagnostics, extra_sums: dict[str, Tensor]) -> Diagnostics:
    return dataclasses.replace(diagnostics, extra_sums={**diagnostics.extra_sums, **extra_sums})


def sequence_log_ratio(config: PolicyLossConfig, batch: TokenBatch, sequence: Tensor) -> Tensor:
    """Compute `TokenBatch.sequence_log_ratio` over a whole mini-batch at once.

    It is needed for sequences that span several rows.

    Args:
        config: the loss that needs it. GMPO's mean is over clipped log-ratios; with a correction,
            and for decoupled_ppo, ratios are against `proximal_log_prob`.
        batch: all rows of the mini-batch, with the current policy's log-probs, and the
            `correction_weight` of the update if there is one; its own `sequence_log_ratio` is not
            read.
        sequence: int64 [B], id of the sequence that each row belongs to.

    Returns: float [B, 1], constant.
    """
    if config.needs_proximal:
        proximal = batch.constant("proximal_log_prob", f"the sequence ratio of {config.name!r}")
        batch = dataclasses.replace(batch, behavior_log_prob=proximal)
    # a constant: the gradient of a sequence's mean comes through its own tokens, in whichever
    # micro-batch they are
    by_token = ratios(batch).token_log_ratio.detach()
    if config.declared is not None and config.declared.averaged is not None:
        by_token = config.declared.averaged(by_token, batch.masked_advantage, config.parameters)
    return SequencesOfRows(batch.mask, sequence).means(by_token, batch.counted)


def chosen_tokens(config: PolicyLossConfig, batch: TokenBatch) -> Tensor:
    """Choose `TokenBatch.chosen_tokens` for a loss whose `needs_chosen_tokens` is true.

    Args:
        config: the loss that needs them; with a correction, ratios are against `proximal_log_prob`.
        batch: all rows of the mini-batch, with the current policy's log-probs; its own
            `chosen_tokens` is not read.

    Returns: bool [B, T], anything where masked.
    """
    if config.needs_proximal:
        proximal = batch.constant("proximal_log_prob", f"the choice of tokens of {config.name!r}")
        batch = dataclasses.replace(batch, behavior_log_prob=proximal)
    assert config.declared is not None
    assert config.declared.choose_tokens is not None, config.name
    return config.declared.choose_tokens(batch, config.parameters)


@dataclass(frozen=True)
class MismatchDiagnostics:
    """Sums over the unmasked tokens and the sequences of some rows, float64 [].

    `a + b` combines whole sequences exactly.

    d = proximal_log_prob - behavior_log_prob; kappa = exp(d); K = the product of kappa over a
    sequence.
    """

    num_tokens: Tensor
    num_sequences: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    d_sum: Tensor
    kappa_sum: Tensor
    kappa_square_sum: Tensor
    sequence_square_sum: Tensor
    num_dropped: Tensor

    def __add__(self, other: "MismatchDiagnostics") -> "MismatchDiagnostics":
        """Combine the diagnostics of two sets of sequences."""
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__
        }
        return MismatchDiagnostics(
            **(sums | {"abs_max": torch.maximum(self.abs_max, other.abs_max)})
        )

    def metrics(self) -> dict[str, float]:
        """Return `log_prob_gap_mean` and `_max` (|d|), `engine_kl_k1` and `_k3` (of KL(engine ||
        trainer)), `engine_chi2_token` and `_sequence` (E[kappa^2] - 1), `engine_ess` (effective
        share of the tokens, (sum kappa)^2 / (n sum kappa^2)) and `engine_dropped_fraction`; empty
        if every token was masked."""
        num = float(self.num_tokens)
        if num == 0.0:
            return {}
        kappa, square = float(self.kappa_sum), float(self.kappa_square_sum)
        return {
            "log_prob_gap_mean": float(self.abs_sum) / num,
            "log_prob_gap_max": float(self.abs_max),
            "engine_kl_k1": -float(self.d_sum) / num,
            "engine_kl_k3": (kappa - num - float(self.d_sum)) / num,
            "engine_chi2_token": square / num - 1.0,
            "engine_chi2_sequence": float(self.sequence_square_sum) / float(self.num_sequences)
            - 1.0,
            "engine_ess": kappa**2 / (num * square),
            "engine_dropped_fraction": float(self.num_dropped) / num,
        }


@dataclass(frozen=True)
class Correction:
    """Attributes:
    weight: float [B, T], constant; 0 where dropped or masked.
    diagnostics: of all rows.
    """

    weight: Tensor
    diagnostics: MismatchDiagnostics


def engine_correction(
    config: CorrectionConfig,
    proximal_log_prob: Tensor,
    behavior_log_prob: Tensor,
    mask: Tensor,
    sequence: Tensor | None = None,
) -> Correction:
    """Compute weights for the losses of a whole update, and their diagnostics.

    Diagnostics are computed also if the config corrects nothing.

        truncate (TIS, Yao et al. 2025)    w_t = min(kappa_t, C), or min(prod kappa, C) for the sequence
        mask (IcePop, arXiv:2510.18855)    w_t = 0 where kappa_t, or for the sequence prod kappa or exp(mean log kappa),
                                           leaves [mask_low, mask_high]
        veto                               w = 0 for a sequence in which some kappa_t < veto_below

    Masks use kappa before truncation. Dropped tokens stay in the denominators of the aggregation.

    Args:
        config: settings of the correction.
        proximal_log_prob: float [B, T], computed by the trainer with the weights that acted, or its
            newest ones.
        behavior_log_prob: float [B, T], as the engine reported them.
        mask: bool [B, T].
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.
    """
    proximal, behavior = (
        full_precision(proximal_log_prob.detach()),
        full_precision(behavior_log_prob.detach()),
    )
    d = torch.where(mask, proximal, 0.0) - torch.where(mask, behavior, 0.0)
    # a token that the engine found impossible has a log-prob of -inf; unclamped, its weight would
    # be infinite
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kappa = d.exp()
    rows = SequencesOfRows(mask, sequence)
    total = rows.sums(d)
    geometric = rows.means(d, mask).exp().expand_as(d)
    product = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[:, None].expand_as(d)

    weight = {"none": torch.ones_like(d), "token": kappa, "sequence": product}[config.truncate]
    if config.truncate != "none":
        weight = weight.clamp(max=config.truncate_at)
    kept = mask
    # by kappa before it was truncated: a truncated one never leaves the bounds above
    if config.mask != "none":
        low, high = config.bounds
        bounded = {"token": kappa, "sequence": product, "geometric": geometric}[config.mask]
        kept = kept & (bounded >= low) & (bounded <= high)
    if config.veto_below > 0.0:
        # one such token is a sign that another model sampled the sequence than the one that learns:
        # other weights, tokens or temperature
        bad = mask & (kappa < config.veto_below)
        kept = kept & (rows.sums(bad.to(d.dtype)) == 0.0)[:, None]
    dropped = mask & ~kept
    # dropped tokens stay in the denominators: dividing by what is left would give the kept ones of
    # a bad batch more weight than those of a good one
    return Correction(torch.where(kept, weight, 0.0), _diagnostics(d, mask, dropped, rows))


def _diagnostics(
    d: Tensor, mask: Tensor, dropped: Tensor, rows: SequencesOfRows
) -> MismatchDiagnostics:
    # float64: chi2 and the effective share are differences of sums that nearly cancel if engine and
    # trainer agree, beside squared products of whole sequences of up to e^40
    d, weight = d.double(), mask.double()
    kappa = d.exp()
    has_tokens = rows.by_sequence(weight) > 0
    squares = (2.0 * rows.by_sequence(d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    return MismatchDiagnostics(
        num_tokens=weight.sum(),
        num_sequences=has_tokens.double().sum(),
        abs_sum=d.abs().sum(),
        abs_max=d.abs().max() if d.numel() else weight.sum(),
        d_sum=d.sum(),
        kappa_sum=(kappa * weight).sum(),
        kappa_square_sum=(kappa.square() * weight).sum(),
        sequence_square_sum=torch.where(has_tokens, squares, 0.0).sum(),
        num_dropped=dropped.double().sum(),
    )
