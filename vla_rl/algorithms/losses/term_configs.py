"""Configurations of the terms beside a policy loss. No torch.

They are the reference penalty, the critic's loss and the engine correction.
"""

from collections.abc import Mapping
from typing import Literal

from vla_rl.algorithms.choices import check_choice
from vla_rl.errors import ConfigError
from vla_rl.types import Config


class KlLossConfig(Config, frozen=True, kw_only=True):
    """Penalty on the distance from the reference policy, added to the policy loss."""

    coef: float = 0.0
    """Weight of the penalty; 0 turns it off, and the reference policy is not computed."""

    estimator: str = "k3_plus"
    """Estimator of the KL divergence: k1, abs, k2, k3, k3_plus (value of k3, gradient of k2), or
    importance_weighted_k3 for samples of older weights."""

    def __post_init__(self) -> None:
        self.require(0.0 <= self.coef < float("inf"), "coef", "a finite weight >= 0")
        check_choice(
            ("k1", "abs", "k2", "k3", "k3_plus", "importance_weighted_k3"),
            self.estimator,
            "KlLossConfig.estimator",
        )

    def unread(self) -> Mapping[str, str]:
        """Return the options of the penalty, if it is turned off."""
        return {} if self.coef > 0.0 else {"estimator": "learner.loss.kl.coef is 0"}


class ValueLossConfig(Config, frozen=True, kw_only=True):
    """Settings of the critic's loss."""

    clip: float | None = 0.5
    """Maximum change of a value from its old one before the loss is clipped; none turns clipping
    off."""

    huber_delta: float | None = None
    """Errors above this count linearly instead of squared (Huber loss); none squares every
    error."""

    def __post_init__(self) -> None:
        self.require(self.clip is None or self.clip > 0.0, "clip", "above 0, or none")
        self.require(
            self.huber_delta is None or self.huber_delta > 0.0, "huber_delta", "above 0, or none"
        )


class CorrectionConfig(Config, frozen=True, kw_only=True):
    """Correction of the difference between the engine's and the trainer's log-probs.

    kappa = exp(proximal_log_prob - behavior_log_prob), the trainer's view of the acting weights
    against the engine's.
    """

    truncate: Literal["none", "token", "sequence"] = "none"
    """Weigh losses by min(kappa, truncate_at); kappa is taken for each token, or as the product
    over its sequence. none does not weigh."""

    truncate_at: float = 2.0
    """Largest weight of `truncate`, above 0."""

    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Drop what has a kappa outside the bounds: single tokens (`token`), or whole sequences by the
    product (`sequence`) or the geometric mean (`geometric`) of their tokens' kappas. none drops
    nothing."""

    mask_low: float | None = None
    """Lower bound of `mask`, at most 1; none takes 0.5, or 0.99 for `geometric`."""

    mask_high: float | None = None
    """Upper bound of `mask`, at least 1; none takes 2.0, or 1.01 for `geometric`."""

    veto_below: float = 0.0
    """Drop every sequence that has a token with a kappa below this, in [0, 1); 0 turns it off.
    Others use 1e-4."""

    def __post_init__(self) -> None:
        self.require(self.truncate_at > 0.0, "truncate_at", "a weight above 0")
        low, high = self.bounds
        if not 0.0 <= low <= 1.0 <= high:
            raise ConfigError(
                f"CorrectionConfig keeps ratios in [{low}, {high}], expected 0 <= mask_low <= 1 <= "
                "mask_high, so that a trainer and an engine that agree lose nothing."
            )
        self.require(0.0 <= self.veto_below < 1.0, "veto_below", "in [0, 1)")

    def unread(self) -> Mapping[str, str]:
        """Return the options of a truncation or mask that is turned off."""
        off = {} if self.truncate != "none" else {"truncate_at": "truncate is 'none'"}
        return off | (
            {}
            if self.mask != "none"
            else dict.fromkeys(("mask_low", "mask_high"), "mask is 'none'")
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval of kappa that `mask` keeps."""
        low, high = (0.99, 1.01) if self.mask == "geometric" else (0.5, 2.0)
        return (
            low if self.mask_low is None else self.mask_low,
            high if self.mask_high is None else self.mask_high,
        )

    @property
    def is_active(self) -> bool:
        """Whether the correction does anything."""
        return self.truncate != "none" or self.mask != "none" or self.veto_below > 0.0
