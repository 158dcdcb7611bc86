"""Correction and metrics for an engine and a trainer that disagree about log-probs.

    kappa_t = exp(proximal_log_prob - behavior_log_prob)   under the acting weights: trainer's / engine's

Two programs never compute the same log-probs to the last bit, and a quantised or differently
batched engine differs more. A correction weighs or drops tokens by kappa, a constant: gradients
flow through log_prob / proximal_log_prob. It is computed once over a whole update, because
sequences may span rows and micro-batches.
"""

from dataclasses import dataclass

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.ratio_levels import MAX_LOG_RATIO
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.term_configs import CorrectionConfig
from vla_rl.algorithms.precision import full_precision


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
    if config.mask != "none":
        low, high = config.bounds
        judged = {"token": kappa, "sequence": product, "geometric": geometric}[config.mask]
        kept = kept & (judged >= low) & (judged <= high)
    if config.veto_below > 0.0:
        bad = mask & (kappa < config.veto_below)
        kept = kept & (rows.sums(bad.to(d.dtype)) == 0.0)[:, None]
    dropped = mask & ~kept
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
