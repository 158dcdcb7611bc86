"""Probability ratios at the level at which they are clipped: token, control step, row, or sequence.

The loss of a control step or a row is divided equally among its unmasked tokens. So the sum of
losses over tokens is the sum over control steps or rows, and if the policies agree (ratio 1) the
gradient is the plain policy gradient at every level: the level changes what is clipped together,
not the size of a step. Other systems average over control steps instead, which multiplies the
gradient by the number of tokens.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.token_batch import TokenBatch

RatioLevel: TypeAlias = Literal["token", "action", "chunk", "sequence"]
"""Unit whose probability ratio is clipped: one token, all tokens of one control step, all tokens of
one row (an action chunk), or the whole sequence, length-normalised."""

# exp(20) = 5e8 is far outside every trust region and still finite in float32, also when it is
# squared for a metric; exp overflows above 88, which the sum over a chunk of tokens can reach
MAX_LOG_RATIO: Final = 20.0
"""Bound on |log-ratio| before `exp`; a clamped token has no gradient."""

MAX_SEQUENCE_LOG_RATIO: Final = 10.0
"""Upper bound of length-normalised log-ratios (GSPO, as in other systems)."""


@dataclass(frozen=True)
class Ratios:
    """Attributes:
    token_log_ratio: float [B, T], log_prob - behavior_log_prob, 0 where masked, clamped.
    log_ratio: float [B, T], at the level; every token carries that of its control step, row or
        sequence.
    share: float [B, T], the part of that unit's loss that the token carries, or 1.0.
    """

    token_log_ratio: Tensor
    log_ratio: Tensor
    share: Tensor | float

    @property
    def ratio(self) -> Tensor:
        """Ratio, float [B, T], with the gradient."""
        return self.log_ratio.exp()


def token_log_ratio(batch: TokenBatch) -> Tensor:
    """Compute log_prob - behavior_log_prob, float [B, T], clamped to +-20, 0 where masked."""
    # masking the inputs, not the result, keeps inf and NaN of padding out of the gradient
    log_ratio = batch.masked_log_prob - batch.constant("behavior_log_prob", "a probability ratio")
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratios(batch: TokenBatch, level: RatioLevel = "token") -> Ratios:
    """Compute the ratios of the current policy to the one that acted.

        token      log rho_t = l_t,              l_t = log_prob - behavior_log_prob
        action     log rho_t = sum of l over the tokens of t's control step
        chunk      log rho_t = sum of l over the row
        sequence   log rho_t = sg(mean of l over the sequence) + log_prob_t - sg(log_prob_t)  (GSPO, arXiv:2507.18071)

    Raises: ValueError for the level "action" without `action_tokens`.
    """
    by_token = token_log_ratio(batch)
    if level == "token":
        return Ratios(by_token, by_token, 1.0)
    if level == "sequence":
        through = by_token - by_token.detach()
        mean = sequence_mean(batch, by_token)
        return Ratios(by_token, (mean + through).clamp(max=MAX_SEQUENCE_LOG_RATIO), 1.0)
    if level == "action" and batch.action_tokens is None:
        raise ValueError(
            "the ratio level 'action' needs TokenBatch.action_tokens, the tokens of "
            "one control step."
        )
    num_rows, num_tokens = batch.mask.shape
    size = max((batch.action_tokens if level == "action" else num_tokens) or 1, 1)
    units = (num_rows, num_tokens // size, size)
    total = by_token.reshape(units).sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    count = batch.mask.reshape(units).sum(dim=-1, keepdim=True).clamp(min=1)
    spread = torch.ones_like(by_token).reshape(units)
    return Ratios(
        by_token, (total * spread).reshape_as(by_token), (spread / count).reshape_as(by_token)
    )


def sequence_mean(batch: TokenBatch, by_token: Tensor) -> Tensor:
    """Average a log-ratio over the sequence: float [B, 1], constant.

    The mean is over the row, or given by `TokenBatch.sequence_log_ratio`. Tokens that a correction
    drops do not count, as in verl and AReaL.
    """
    if batch.sequence_log_ratio is not None:
        return batch.sequence_log_ratio.detach()
    return SequencesOfRows(batch.mask, None).means(by_token.detach(), batch.counted)
