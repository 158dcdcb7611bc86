"""What stands beside a policy loss: the reference penalty, the critic's loss, and the engine's correction. No torch."""

from typing import Literal

from vla_rl.algorithms.choices import check_choice
from vla_rl.errors import ConfigError
from vla_rl.types import Config


class KlLossConfig(Config, frozen=True, kw_only=True):
    """A penalty on the distance from the reference policy, added to the policy loss."""

    coef: float = 0.0
    """Its weight; 0 leaves it out, and the reference policy is then not computed at all."""

    estimator: str = "k3_plus"
    """k1, abs, k2, k3, or k3_plus, which has the value of k3 and the gradient of k2; or importance_weighted_k3, for samples
    of older weights."""

    def __post_init__(self) -> None:
        self.require(0.0 <= self.coef < float("inf"), "coef", "a finite weight >= 0")
        check_choice(
            ("k1", "abs", "k2", "k3", "k3_plus", "importance_weighted_k3"), self.estimator, "KlLossConfig.estimator"
        )


class ValueLossConfig(Config, frozen=True, kw_only=True):
    """The critic's loss."""

    clip: float | None = 0.5
    """A new value is held this near to the old one; none leaves the clip out."""

    huber_delta: float | None = None
    """Errors larger than this count linearly; none squares all of them."""

    def __post_init__(self) -> None:
        self.require(self.clip is None or self.clip > 0.0, "clip", "above 0, or none")
        self.require(self.huber_delta is None or self.huber_delta > 0.0, "huber_delta", "above 0, or none")


class CorrectionConfig(Config, frozen=True, kw_only=True):
    """What is done about the engine that acted and the trainer disagreeing on the same weights' log-probs.

    kappa = exp(proximal_log_prob - behavior_log_prob), the trainer's view of the acting weights against the engine's.
    """

    truncate: Literal["none", "token", "sequence"] = "none"
    """Weigh losses by min(kappa, truncate_at): of each token, or the product over its sequence."""

    truncate_at: float = 2.0
    """Largest weight, above 0."""

    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Drop tokens (token) or whole sequences (their product, or their geometric mean) with kappa outside the bounds."""

    mask_low: float | None = None
    """Lower bound; none takes 0.5, or 0.99 for `geometric`."""

    mask_high: float | None = None
    """Upper bound; none takes 2.0, or 1.01 for `geometric`."""

    veto_below: float = 0.0
    """Drop every sequence in which one token's kappa is below this (others use 1e-4); 0 leaves it out."""

    def __post_init__(self) -> None:
        self.require(self.truncate_at > 0.0, "truncate_at", "a weight above 0")
        low, high = self.bounds
        if not 0.0 <= low <= 1.0 <= high:
            raise ConfigError(
                f"CorrectionConfig keeps ratios in [{low}, {high}], expected 0 <= mask_low <= 1 <= mask_high, so that a "
                "trainer and an engine that agree lose nothing."
            )
        self.require(0.0 <= self.veto_below < 1.0, "veto_below", "in [0, 1)")

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval of kappa that `mask` keeps."""
        low, high = (0.99, 1.01) if self.mask == "geometric" else (0.5, 2.0)
        return low if self.mask_low is None else self.mask_low, high if self.mask_high is None else self.mask_high

    @property
    def is_active(self) -> bool:
        """Whether it does anything."""
        return self.truncate != "none" or self.mask != "none" or self.veto_below > 0.0
