"""The columns of a token batch, each declared once.

A column has what it holds, its dtype, and the value that fills it.

    decision ─► parts of a row (`rows`) ─► padded columns (`decisions`) ─► rows of a rank, a mini-batch,
                                                                           a micro-batch ─► TokenBatch

To add a column, add a field to `TokenColumns`; if a loss reads it, add a field of the same name to
`TokenBatch`. Everything between follows from the declaration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import TokenBatch
from vla_rl.engines.policy_model import NO_TOKEN


class Recorded(NamedTuple):
    """A column that is recorded for every token, and built from the parts of its rows."""

    dtype: type[np.generic] | None
    """Type of its numbers; None: int64, or float32 if the first row has floats."""

    fill: int = 0
    """Value beyond a row's end, and of tokens that the policy did not choose."""

    narrows: bool = False
    """Whether it is kept as [N, 1] if all chosen tokens of each row have the same number."""


class ByRow(NamedTuple):
    """A column with one number for each row, which is an attribute of `rows.Row`."""


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Numbers of N rows with T tokens each: recorded by token, by row, or computed before the loss.

    N counts decisions, or conversations whose turns can be joined.
    """

    tokens: Annotated[Tensor, Recorded(None, fill=NO_TOKEN)]
    """Chosen tokens, int64 [N, T]; float32 from a policy that chooses numbers."""

    behavior_log_prob: Annotated[Tensor, Recorded(np.float32)]
    """Log-probs under the weights that acted, float32 [N, T]."""

    mask: Annotated[Tensor, Recorded(np.bool_)]
    """True if the policy chose the token and its control step ran, bool [N, T]."""

    advantage: Annotated[Tensor, Recorded(np.float32, narrows=True)]
    """Advantages, float32 [N, T], or [N, 1]."""

    weight_version: Annotated[Tensor, Recorded(np.int64, narrows=True)]
    """Version of the weights that chose each token, int64 [N, T], or [N, 1]."""

    reference_log_prob: Annotated[Tensor | None, Recorded(np.float32)] = None
    """Log-probs under the frozen reference policy, float32 [N, T]; None without a reference."""

    temperature: Annotated[Tensor, ByRow()]
    """Sampling temperature of the row's tokens, float32 [N]."""

    sequence: Annotated[Tensor, ByRow()]
    """Index of the row's trajectory, int64 [N]."""

    num_tokens: Annotated[Tensor, ByRow()]
    """Number of tokens without padding, int64 [N]."""

    num_read: Annotated[Tensor, ByRow()]
    """Number of tokens that a forward pass reads, int64 [N]: the row's own and its prompt's."""

    proximal_log_prob: Tensor | None = None
    """Log-probs under the learner's weights before the update, float32 [N, T]."""

    sequence_log_ratio: Tensor | None = None
    """Mean log-ratio over the row's whole trajectory, float32 [N, 1]."""

    sequence_drift: Tensor | None = None
    """Mean of engine's minus current log-prob over the row's whole trajectory, float32 [N, 1]."""

    correction_weight: Tensor | None = None
    """Weights of the engine correction or of decoupled_ppo over the whole update, float32 [N, T]."""

    chosen_tokens: Tensor | None = None
    """Tokens that the loss chose from the whole mini-batch, bool [N, T]."""

    action_tokens: int = 1
    """Number of tokens of one control step."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the columns that are present, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: column for name, column in named.items() if isinstance(column, Tensor)}

    def token_batch(self, log_prob: Tensor) -> TokenBatch:
        """Return the input of a policy loss, given the log-probs under the current weights."""
        return TokenBatch(
            log_prob=log_prob, **{name: getattr(self, name) for name in _READ_BY_LOSSES}
        )


def narrowed(column: Tensor, mask: Tensor) -> Tensor:
    """Return a column [N, T] as [N, 1] if the masked-in tokens of each row have one number."""
    least, most = _limits(column.dtype)
    low = torch.where(mask, column, most).amin(dim=1, keepdim=True)
    high = torch.where(mask, column, least).amax(dim=1, keepdim=True)
    return low if bool((low == high).all()) else column


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _declared() -> Iterator[tuple[str, object]]:
    for name, hint in get_type_hints(TokenColumns, include_extras=True).items():
        yield from ((name, how) for how in getattr(hint, "__metadata__", ()))


RECORDED: Final = MappingProxyType(
    {name: how for name, how in _declared() if isinstance(how, Recorded)}
)
"""Columns that are recorded for every token, by name."""

BY_ROW: Final = tuple(name for name, how in _declared() if isinstance(how, ByRow))
"""Columns with one number for each row."""

_READ_BY_LOSSES: Final = tuple(
    sorted(
        {each.name for each in fields(TokenColumns)} & {each.name for each in fields(TokenBatch)}
    )
)
