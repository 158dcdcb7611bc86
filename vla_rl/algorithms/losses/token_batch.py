"""Tokens of a micro-batch, from which a policy loss computes probability ratios.

Ratios are taken at the level at which they are clipped: token, control step, row, or sequence. The
loss of a control step or a row is divided equally among its unmasked tokens. So the sum of losses
over tokens is the sum over control steps or rows, and if the policies agree (ratio 1) the gradient is
the plain policy gradient at every level: the level changes what is clipped together, not the size of
a step. Other systems average over control steps instead, which multiplies the gradient by the number
of tokens.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from vla_rl.algorithms.tensors import Tensor, full_precision, torch

Predicted: TypeAlias = Literal["next_state", "actions"]
"""Target of a flow policy's prediction: the state after the stochastic step, or the actions at the end."""


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
        prediction: float [B, T], a flow's prediction of `reached` under the current weights, with a
            gradient; None from other policies.
        behavior_prediction: float [B, T], the same under the weights that acted.
        reached: float [B, T], the number that was reached: the token, or the action at the flow's end.
        step_std: float [B, 1], standard deviation of the decision's stochastic step; 0 without noise.
        velocity_weight: float [B, 1], derivative of a prediction by the velocity.
        behavior_velocity: float [B, T], the velocity under the weights that acted.

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
    prediction: Tensor | None = None
    behavior_prediction: Tensor | None = None
    reached: Tensor | None = None
    step_std: Tensor | None = None
    velocity_weight: Tensor | None = None
    behavior_velocity: Tensor | None = None

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
            "prediction",
            "behavior_prediction",
            "reached",
            "behavior_velocity",
        ):
            self._check_shape(name, full)
        for name in ("step_std", "velocity_weight"):
            self._check_shape(name, column)
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
        # masked before it is used and not after: NaN in padding would come back through the
        # gradient of the product with 0
        return torch.where(self.mask, tensor, 0.0).detach()

    def predicted(self, needed_by: str) -> Tensor:
        """Return the prediction: float [B, T], 0 where masked, with a gradient elsewhere.

        Raises: ValueError if it is None.
        """
        if self.prediction is None:
            raise ValueError(
                f"{needed_by} needs TokenBatch.prediction, but it is None; take a flow policy, whose "
                "method `predict` gives it."
            )
        return torch.where(self.mask, self.prediction, 0.0)

    def by_row(self, name: str, needed_by: str) -> Tensor:
        """Return a column of numbers by row: float [B, 1], constant. Raises: ValueError if it is None."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"{needed_by} needs TokenBatch.{name}, but it is None.")
        return tensor.detach()

    def rows(self, index: Tensor | slice) -> "TokenBatch":
        """Return some of the rows: a micro-batch."""
        chosen: dict[str, Any] = {name: tensor[index] for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **chosen)


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

    Example:
        One chunk of three tokens, of which the last control step did not run:

        TokenBatch(
            log_prob=torch.tensor([[-0.9, -1.2, -2.0]]),
            behavior_log_prob=torch.tensor([[-1.0, -1.2, -2.1]]),
            advantage=torch.tensor([[0.7]]),
            mask=torch.tensor([[True, True, False]]),
        )
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
    # clamped again: each token is within 20, and the sum over a chunk of 56 tokens may be a
    # thousand
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


class SequencesOfRows:
    """Assignment of rows to sequences.

    Args:
        mask: bool [B, T], for the number of rows and the device.
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.

    Raises: ValueError if there are not as many ids as rows.
    """

    def __init__(self, mask: Tensor, sequence: Tensor | None) -> None:
        if sequence is None:
            # not by `unique`, which on a GPU waits for the number of ids
            self.position, self.size = torch.arange(len(mask), device=mask.device), len(mask)
            return
        if sequence.shape != mask.shape[:1]:
            raise ValueError(
                f"sequence is {list(sequence.shape)}, expected {list(mask.shape[:1])}: one id per "
                "row of mask."
            )
        # ids of any size and order: those of the rows of one rank or one mini-batch have gaps
        ids, self.position = torch.unique(sequence.to(mask.device), return_inverse=True)
        self.size = len(ids)

    def by_sequence(self, values: Tensor) -> Tensor:
        """Sum float [B, T] over each sequence: [sequences]."""
        return values.new_zeros(self.size).index_add_(0, self.position, values.sum(dim=1))

    def sums(self, values: Tensor) -> Tensor:
        """Sum float [B, T] over the whole sequence of each row: [B]."""
        return self.by_sequence(values)[self.position]

    def means(self, values: Tensor, counted: Tensor) -> Tensor:
        """Average float [B, T] over the counted tokens of each row's sequence: [B, 1].

        0 if none is counted.
        """
        sums = self.sums(torch.where(counted, values, 0.0))
        return (sums / self.sums(counted.to(values.dtype)).clamp(min=1))[:, None]
