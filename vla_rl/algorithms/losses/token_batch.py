"""Input of a policy loss, once per micro-batch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.diagnostics import Diagnostics
from vla_rl.algorithms.precision import full_precision


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one micro-batch. Axes: B rows (decisions, or whole responses), T tokens.

    Masked entries may hold anything, NaN included: they add exact zeros to losses and gradients.
    bfloat16 and float16 tensors are converted to float32.

    Attributes:
        log_prob: float [B, T], current policy; the only input that carries a gradient.
        behavior_log_prob: float [B, T], under the weights that acted, as the engine reported them.
        advantage: float [B, T], or [B, 1] for one number per row.
        mask: bool [B, T], True where the policy chose the token; ends at the exact step that ended
            the episode.
        proximal_log_prob: float [B, T], the trainer's weights before this update, computed by the
            trainer.
        reference_log_prob: float [B, T], frozen reference policy.
        sequence_log_ratio: float [B, 1], detached mean of log_prob - behavior_log_prob over the
            whole sequence that the row belongs to; needed only if a sequence spans several rows.
            With a correction, and for decoupled_ppo, it is against `proximal_log_prob`, like the
            ratio, and over the tokens that are not dropped.
        action_tokens: number of tokens of one control step, for the ratio level "action"; they are
            adjacent, and T is a multiple of it.
        correction_weight: float [B, T], constant factor of the losses, from `engine_correction` or,
            for decoupled_ppo, `behavior_weights` over the whole update; None computes it from this
            micro-batch, which is the same if every row is a whole sequence.
        chosen_tokens: bool [B, T], tokens that clip_cov, kl_cov or m2po drop or penalise, from
            `chosen_tokens` over the whole mini-batch; None chooses from this micro-batch.
        sampler_log_prob: float [B, T], the engine's log-probs in a batch whose `behavior_log_prob`
            a correction replaced by the trainer's own; None: `behavior_log_prob` is the engine's.
        sequence_drift: float [B, 1], from `sequence_drift` over the whole sequence that the row
            belongs to; needed by opsm only, if a sequence spans several rows.

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
    sampler_log_prob: Tensor | None = None
    sequence_drift: Tensor | None = None

    def __post_init__(self) -> None:
        self._convert()
        if self.mask.ndim != 2 or self.mask.dtype is not torch.bool:
            raise ValueError(
                f"mask is {self.mask.dtype} {list(self.mask.shape)}, expected torch.bool [B, T]; "
                "use mask != 0."
            )
        full, column = self.mask.shape, (self.mask.shape[0], 1)
        for name in (
            "log_prob",
            "behavior_log_prob",
            "proximal_log_prob",
            "reference_log_prob",
            "sampler_log_prob",
        ):
            self._check_shape(name, full)
        self._check_shape("correction_weight", full)
        self._check_shape("chosen_tokens", full)
        self._check_shape("advantage", full, column)
        self._check_shape("sequence_log_ratio", column)
        self._check_shape("sequence_drift", column)
        if self.action_tokens is not None and (
            self.action_tokens < 1 or self.mask.shape[1] % self.action_tokens
        ):
            raise ValueError(
                f"a row has {self.mask.shape[1]} tokens and action_tokens is "
                f"{self.action_tokens}, expected a divisor."
            )

    def _convert(self) -> None:
        for name, tensor in self._tensors().items():
            object.__setattr__(self, name, full_precision(tensor))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _check_shape(self, name: str, *expected: tuple[int, ...]) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is not None and tensor.shape not in expected:
            shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected))
            raise ValueError(
                f"{name} is {list(tensor.shape)}, expected {shapes}, as mask is "
                f"{list(self.mask.shape)}."
            )

    @property
    def masked_advantage(self) -> Tensor:
        """Advantage, float [B, T], constant, 0 where masked."""
        return torch.where(self.mask, self.advantage.expand_as(self.mask), 0.0).detach()

    @property
    def masked_log_prob(self) -> Tensor:
        """Log-prob, float [B, T], 0 where masked, with a gradient elsewhere."""
        return torch.where(self.mask, self.log_prob, 0.0)

    @property
    def counted(self) -> Tensor:
        """Unmasked tokens that no correction drops, bool [B, T].

        A sequence's ratio is the mean over these.
        """
        return (
            self.mask
            if self.correction_weight is None
            else self.mask & (self.correction_weight != 0.0)
        )

    def constant(self, name: str, needed_by: str) -> Tensor:
        """Return another policy's log-probs: float [B, T], constant, 0 where masked.

        Raises: ValueError if they are None.
        """
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(
                f"{needed_by} needs TokenBatch.{name}, but it is None; have it computed before "
                "the update."
            )
        return torch.where(self.mask, tensor, 0.0).detach()

    def rows(self, index: Tensor | slice) -> "TokenBatch":
        """Return some of the rows: a micro-batch."""
        chosen: dict[str, Any] = {name: tensor[index] for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **chosen)


PolicyLoss: TypeAlias = Callable[[TokenBatch], tuple[Tensor, Diagnostics]]
"""Function that returns losses float [B, T], exact zeros where masked, and diagnostics that add up
over micro-batches."""
