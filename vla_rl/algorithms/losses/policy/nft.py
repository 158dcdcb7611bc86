"""Loss of flow policies that needs no likelihood: pi-StepNFT.

    velocities v (policy), v_old (acted) ─► v_old + b c (v - v_old)  better    ┐ predictions of what was reached,
                                       └──► v_old - b c (v - v_old)  worse     ┘ and their weighed errors E+ and E-

A good decision lowers E+ against E-, a bad one raises it: pi-StepNFT, as RLinf 0.3.0 computes it, after
DiffusionNFT (Zheng et al. 2025, arXiv:2509.16117). Predictions are linear in the velocity, so both come
from the policy's prediction and that of the weights that acted, without another pass.
"""

from typing import Literal, NamedTuple

from vla_rl.algorithms.losses.declaration import LossResult, declare_loss, diagnose
from vla_rl.algorithms.losses.token_batch import Predicted, TokenBatch, token_log_ratio
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config, NonNegativeFloat, PositiveFloat

SMALLEST_VARIANCE = 1e-4
"""Added to the variance of a step before errors are divided by it, as in RLinf."""


class NftLossConfig(Config, frozen=True, kw_only=True):
    """Predictions that are compared, and the size of the step between them."""

    predicts: Predicted = "next_state"
    """Target of the predictions: the state after the decision's stochastic step, or the actions at the end of
    the flow."""

    form: Literal["dpo", "mse"] = "dpo"
    """dpo: a logistic loss of E+ - E-; mse: E+ of good and E- of bad decisions themselves."""

    nft_level: Literal["chunk", "action"] = "chunk"
    """Unit of the errors: the whole chunk, or one control step."""

    step_size: PositiveFloat = 1.0
    """Factor b of the change of velocity in the better and the worse prediction."""

    preference_scale: PositiveFloat = 1.0
    """Factor of E+ - E- in the logistic loss. Read by form dpo alone."""

    max_drift: PositiveFloat = 0.5
    """Largest length of the change of velocity; longer ones are shortened to it."""

    max_advantage: PositiveFloat = 1.0
    """Advantages are cut at this size, which counts as certainly good; minus it as certainly bad."""

    error_weight: Literal["noise", "none"] = "noise"
    """noise: divide squared errors by the variance of the step, or by the mean size of the error if the step has
    no noise; none: leave them."""

    negative_weight: NonNegativeFloat = 1.0
    """Weight of bad decisions against good ones. Read by form mse alone."""

    scales_by_step: bool = False
    """Multiply by max_advantage / step_size, as RLinf does since August 2026. Read by form mse alone."""

    nft_clip_ratio: PositiveFloat | None = None
    """Largest change of velocity as a share of the old velocity's length, as in RLinf since August 2026: beyond it, a
    loss that the change lowers gives no gradient. none: no such limit. Read by form mse alone."""

    def __post_init__(self) -> None:
        is_mse = self.form == "mse"
        self.require(is_mse or self.negative_weight == 1.0, "negative_weight", "1 with form dpo")
        self.require(is_mse or not self.scales_by_step, "scales_by_step", "False with form dpo")
        is_read = is_mse or self.nft_clip_ratio is None
        self.require(is_read, "nft_clip_ratio", "none with form dpo")
        fits = not is_mse or self.preference_scale == 1.0
        self.require(fits, "preference_scale", "1 with form mse")


@declare_loss("nft", needs_predictions=True)
def step_nft(batch: TokenBatch, config: NftLossConfig) -> LossResult:
    """Compare a better and a worse prediction with what was reached.

        c  = min(1, max_drift / |v - v_old|);   r = (clip(A) + max_advantage) / (2 max_advantage)
        E+ = sum w (p_old + b c (p - p_old) - reached)^2, E- with -b;  w = 1 / (s^2 + 1e-4)
        dpo   softplus(preference_scale / 2 * (2 r - 1) * (E+ - E-))
        mse   r E+ + negative_weight (1 - r) E-
        with nft_clip_ratio: the greater of that and the same with v - v_old shortened to the ratio of |v_old|,
        which then has no gradient; the weights of the errors stay

    A unit's loss is divided equally among its unmasked tokens, as in every loss of a ratio.

    Args:
        batch: with `prediction`, `behavior_prediction`, `reached`, `step_std`, `velocity_weight` and, for
            `nft_clip_ratio`, `behavior_velocity`; the advantage of a unit is the mean over its tokens.
        config: the step between the predictions.

    Raises: ValueError without the predictions, or for the level action without `action_tokens`.
    """
    mask, units = batch.mask, _shape_units(batch, config)
    behavior = batch.constant("behavior_prediction", "nft")
    prediction = batch.predicted("nft")
    error = (behavior - batch.constant("reached", "nft")).reshape(units)
    moved = (prediction - behavior).reshape(units)
    is_counted = mask.reshape(units)
    std, weight = (
        batch.by_row(name, "nft")[:, :, None] for name in ("step_std", "velocity_weight")
    )
    # with its gradient, as in RLinf; in units of velocity, so that one bound holds for all steps of the chain
    length = moved.norm(dim=-1, keepdim=True) / weight.abs()
    shortening = (config.max_drift / length.clamp(min=1e-8)).clamp(max=1.0)
    change = config.step_size * shortening * moved
    num = is_counted.sum(dim=-1, keepdim=True).clamp(min=1)
    advantage = batch.masked_advantage.reshape(units).sum(dim=-1, keepdim=True) / num
    limit = config.max_advantage
    goodness = (advantage.clamp(-limit, limit) + limit) / (2.0 * limit)
    weights = tuple(
        _weigh_errors(error + each, is_counted, std, config) for each in (change, -change)
    )
    comparison = _Comparison(error, weights, goodness)
    if config.form == "dpo":
        better, worse = comparison.sum_errors(change)
        preference = 0.5 * config.preference_scale * (2.0 * goodness - 1.0) * (better - worse)
        loss = torch.nn.functional.softplus(preference)
    else:
        loss = comparison.mix(change, config)
        if config.nft_clip_ratio is not None:
            old = batch.constant("behavior_velocity", "nft").reshape(units)
            clipped = _clip_change(change, old * config.step_size * weight.abs(), config)
            loss = torch.maximum(loss, comparison.mix(clipped, config))
        if config.scales_by_step:
            loss = loss * (config.max_advantage / config.step_size)
    losses = torch.where(mask, (loss / num).expand(units).reshape_as(mask), 0.0)
    is_short = (shortening < 1.0).expand(units).reshape_as(mask)
    return losses, diagnose(token_log_ratio(batch), mask, clipped=is_short)


class _Comparison(NamedTuple):
    """Errors of the weights that acted, the weights of the errors of both predictions, and how good the decision
    was: [B, units, ...].
    """

    error: Tensor
    weights: tuple[Tensor, ...]
    goodness: Tensor

    def sum_errors(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return E+ and E-, [B, units, 1]."""
        better, worse = (
            weight * (self.error + each).square().sum(dim=-1, keepdim=True)
            for each, weight in zip((change, -change), self.weights, strict=True)
        )
        return better, worse

    def mix(self, change: Tensor, config: NftLossConfig) -> Tensor:
        """Return E+ of good and E- of bad decisions."""
        better, worse = self.sum_errors(change)
        return self.goodness * better + config.negative_weight * (1.0 - self.goodness) * worse


def _shape_units(batch: TokenBatch, config: NftLossConfig) -> tuple[int, int, int]:
    """Return the shape [B, units, tokens of a unit]."""
    num_rows, num_tokens = batch.mask.shape
    if config.nft_level == "chunk":
        return num_rows, 1, num_tokens
    if batch.action_tokens is None:
        raise ValueError(
            "the level 'action' of nft needs TokenBatch.action_tokens, the tokens of one control step."
        )
    return num_rows, num_tokens // batch.action_tokens, batch.action_tokens


def _clip_change(change: Tensor, old: Tensor, config: NftLossConfig) -> Tensor:
    """Return a change that is at most `nft_clip_ratio` of the old velocity; a shortened one has no gradient.

    Args:
        change: float [B, units, tokens of a unit], of the prediction.
        old: the old velocity in the same units.
        config: the ratio.
    """
    assert config.nft_clip_ratio is not None
    allowed = config.nft_clip_ratio * old.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    share = (allowed / change.norm(dim=-1, keepdim=True).clamp(min=1e-8)).clamp(max=1.0)
    return torch.where(share < 1.0, (share * change).detach(), change)


def _weigh_errors(error: Tensor, is_counted: Tensor, std: Tensor, config: NftLossConfig) -> Tensor:
    """Return the weights of the squared errors of each unit: [B, units, 1]."""
    if config.error_weight == "none":
        return torch.ones_like(std)
    num = is_counted.sum(dim=-1, keepdim=True).clamp(min=1)
    size = error.detach().abs().sum(dim=-1, keepdim=True) / num
    return torch.where(
        std > 0.0, 1.0 / (std.square() + SMALLEST_VARIANCE), 1.0 / size.clamp(min=1e-8)
    )
