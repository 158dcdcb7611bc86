"""Reduction of one loss per token to one number, with the denominators of the whole update.

The denominators are counted once over the whole batch (all micro-batches, all ranks), and every
micro-batch divides by them. The micro-batches' results then add up to the result of the whole
batch, and so do their gradients, however rows are split, packed or ordered. A sequence is a
trajectory; its tokens may be in several rows (one row per chunk).

For several ranks, pass the sums of all ranks to `over_ranks`, and add the ranks' gradients. If
gradients are averaged instead (DDP, FSDP), multiply the loss by the number of ranks.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.util.imports import choose


@dataclass(frozen=True)
class Denominators:
    """Divisors of the losses of one update.

    Over several ranks, `num_tokens` and `num_sequences` are the sums.

    Attributes:
        num_tokens: number of unmasked tokens of the whole update.
        num_sequences: number of sequences with at least one unmasked token; empty ones do not
            count.
        sequence_tokens: int64 [B], for each row the number of unmasked tokens of the whole sequence
            that it belongs to.
        length: divisor of `seq_mean_token_sum_norm`: a constant of the run, such as the number of
            tokens of the longest possible trajectory. A counted length would weigh updates
            differently.
    """

    num_tokens: int
    num_sequences: int
    sequence_tokens: Tensor
    length: float | None = None

    def over_ranks(self, num_tokens: int, num_sequences: int) -> "Denominators":
        """Return the same rows with the counts of all ranks together.

        A sequence has to be on one rank.
        """
        return dataclasses.replace(self, num_tokens=num_tokens, num_sequences=num_sequences)

    def rows(self, index: Tensor | slice) -> "Denominators":
        """Return the same denominators for some of the rows: a micro-batch."""
        return dataclasses.replace(self, sequence_tokens=self.sequence_tokens[index])


Aggregation: TypeAlias = Callable[[Tensor, Tensor, Denominators], Tensor]
"""Function from (losses [B, T], mask bool [B, T], denominators with B rows) to []."""


def count_denominators(
    mask: Tensor, sequence: Tensor | None = None, length: float | None = None
) -> Denominators:
    """Count the denominators of a whole batch.

    Args:
        mask: bool [B, T], True where the policy chose the token.
        sequence: int64 [B], id of the sequence (trajectory) that each row belongs to; None: one row
            each.
        length: the constant of `seq_mean_token_sum_norm`, > 0; other aggregations do not need it.

    Returns: the denominators, on the device of `mask`.

    Example:
        Two trajectories, the first in two rows of 3 and 2 tokens, the second in one of 4:

        Denominators(num_tokens=9, num_sequences=2, sequence_tokens=torch.tensor([5, 5, 4]))
    """
    if length is not None and not length > 0.0:
        raise ValueError(
            f"length is {length}, expected a number of tokens above 0, the same for every update."
        )
    # counted from the mask and not from the padded shape, or an update would depend on how long the
    # longest of its rows is
    row_tokens = mask.sum(dim=1)
    if sequence is None:
        sequence_tokens = row_tokens
        num_sequences = int((row_tokens > 0).sum())
    else:
        if sequence.shape != row_tokens.shape:
            raise ValueError(
                f"sequence is {list(sequence.shape)}, expected {list(row_tokens.shape)}: one id "
                "per row of mask."
            )
        # a trajectory may have its tokens in several rows and micro-batches; its length has to be
        # that of all of them
        ids, position = torch.unique(sequence.to(mask.device), return_inverse=True)
        totals = torch.zeros(len(ids), dtype=row_tokens.dtype, device=mask.device).index_add_(
            0, position, row_tokens
        )
        sequence_tokens = totals[position]
        num_sequences = int((totals > 0).sum())
    return Denominators(int(row_tokens.sum()), num_sequences, sequence_tokens, length)


def token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Mean over all tokens of the update: long trajectories weigh more.

    DAPO, arXiv:2503.14476, section 3.3.

    L = sum_{b,t} m * loss / num_tokens
    """
    _require(denominators.num_tokens)
    return torch.where(mask, losses, 0.0).sum() / denominators.num_tokens


def seq_mean_token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Mean over a trajectory's tokens, then over trajectories: each weighs the same.

    GRPO, arXiv:2402.03300, eq. 3.

    L = sum_b [sum_t m * loss / tokens of b's sequence] / num_sequences
    """
    _require(denominators.num_sequences)
    # `where` and not a product with the mask: 0 times the NaN of a padded token is NaN
    row_sums = torch.where(mask, losses, 0.0).sum(dim=1)
    return (row_sums / denominators.sequence_tokens.clamp(min=1)).sum() / denominators.num_sequences


def seq_mean_token_sum(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Sum over a trajectory's tokens, mean over trajectories.

    This is the plain policy gradient, without a length bias.

    L = sum_{b,t} m * loss / num_sequences
    """
    _require(denominators.num_sequences)
    return torch.where(mask, losses, 0.0).sum() / denominators.num_sequences


def seq_mean_token_sum_norm(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Sum over a trajectory's tokens divided by a constant, mean over trajectories.

    Dr. GRPO (arXiv:2503.20783): no length bias, and the size of a token mean.

    L = sum_{b,t} m * loss / length / num_sequences

    Other systems divide by the padded length of a batch, which changes from update to update.
    Raises: ValueError without `length`.
    """
    # others divide by the padded length of the batch, which changes from update to update, and with
    # it the size of a step
    if denominators.length is None:
        raise ValueError(
            "seq_mean_token_sum_norm needs Denominators.length, a constant of the run; pass "
            "count_denominators it."
        )
    return seq_mean_token_sum(losses, mask, denominators) / denominators.length


AGGREGATIONS: Final = MappingProxyType[str, Aggregation](
    {
        "token_mean": token_mean,
        "seq_mean_token_mean": seq_mean_token_mean,
        "seq_mean_token_sum": seq_mean_token_sum,
        "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    }
)
"""Aggregations by the name that a config uses."""


def aggregation(name: str) -> Aggregation:
    """Return the aggregation of this name. Raises: ConfigError naming the nearest match."""
    return choose(AGGREGATIONS, name, "aggregation")


def _require(denominator: int) -> None:
    # a divisor that is held at 1 would let an empty update pass as one with a gradient of 0, and
    # Adam's momentum would still move the weights
    if denominator < 1:
        raise ValueError(
            "the update has no unmasked token; expected at least one; skip the update instead."
        )
