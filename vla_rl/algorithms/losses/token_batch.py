"""What a policy loss is given, once a micro-batch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vla_rl.algorithms.losses.diagnostics import Diagnostics


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one micro-batch. Axes: B rows (decisions, or whole responses), T tokens.

    Masked entries may hold anything, NaN included: they add exact zeros to losses and gradients.

    Attributes:
        log_prob: float [B, T], current policy; the only input that carries a gradient.
        behavior_log_prob: float [B, T], under the weights that acted, as the engine reported them.
        advantage: float [B, T], or [B, 1] for one number a row.
        mask: bool [B, T], True where the policy chose the token; ends at the exact step that ended the episode.
        proximal_log_prob: float [B, T], the trainer's weights before this update, computed by the trainer.
        reference_log_prob: float [B, T], frozen reference policy.
        sequence_log_ratio: float [B, 1], detached mean of log_prob - behavior_log_prob over the whole sequence that the row
            belongs to; needed only where a sequence spans several rows. With a correction, and for decoupled_ppo, it is
            taken against `proximal_log_prob`, as the ratio is.
        action_tokens: tokens of one control step, for the ratio level "action"; adjacent, and T is a multiple of it.
        correction_weight: float [B, T], constant factor of the losses, from `engine_correction` over the whole update; None
            computes it from this micro-batch, which is the same where every row is a whole sequence.
        chosen_tokens: bool [B, T], those that clip_cov, kl_cov or m2po treat in another way, from `chosen_tokens` over the
            whole mini-batch; None chooses among those of this micro-batch.

    Raises: ValueError for shapes or a mask dtype that do not fit.
    """

    log_prob: Tensor
    behavior_log_prob: Tensor
    advantage: Tensor
    mask: Tensor
    proximal_log_prob: Tensor | None = None
    reference_log_prob: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    action_tokens: int | None = None
    correction_weight: Tensor | None = None
    chosen_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mask.ndim != 2 or self.mask.dtype is not torch.bool:
            raise ValueError(
                f"mask is {self.mask.dtype} {list(self.mask.shape)}, expected torch.bool [B, T]; use mask != 0."
            )
        full, column = self.mask.shape, (self.mask.shape[0], 1)
        for name in ("log_prob", "behavior_log_prob", "proximal_log_prob", "reference_log_prob", "correction_weight"):
            self._check_shape(name, full)
        self._check_shape("chosen_tokens", full)
        self._check_shape("advantage", full, column)
        self._check_shape("sequence_log_ratio", column)
        if self.action_tokens is not None and (self.action_tokens < 1 or self.mask.shape[1] % self.action_tokens):
            raise ValueError(
                f"a row has {self.mask.shape[1]} tokens and action_tokens is {self.action_tokens}, expected a divisor."
            )

    def _check_shape(self, name: str, *expected: tuple[int, ...]) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is not None and tensor.shape not in expected:
            shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected))
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {shapes}, as mask is {list(self.mask.shape)}.")

    @property
    def masked_advantage(self) -> Tensor:
        """float [B, T], constant, 0 where masked."""
        return torch.where(self.mask, self.advantage.expand_as(self.mask), 0.0).detach()

    @property
    def masked_log_prob(self) -> Tensor:
        """float [B, T], 0 where masked, with a gradient elsewhere."""
        return torch.where(self.mask, self.log_prob, 0.0)

    def constant(self, name: str, needed_by: str) -> Tensor:
        """The log-probs of another policy: float [B, T], constant, 0 where masked. Raises: ValueError if absent."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(
                f"{needed_by} needs TokenBatch.{name}, but it is None; have it computed before the update."
            )
        return torch.where(self.mask, tensor, 0.0).detach()

    def rows(self, index: Tensor | slice) -> "TokenBatch":
        """Some of the rows: a micro-batch."""
        tensors: dict[str, Any] = {
            field.name: value[index]
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)


PolicyLoss: TypeAlias = Callable[[TokenBatch], tuple[Tensor, Diagnostics]]
"""Losses float [B, T], exact zeros where masked, and diagnostics that add up over micro-batches."""
