"""How a batch of embedded trajectories becomes rewards: the rule, its clusters, and what is carried over."""

from typing import Final

from vla_rl.algorithms.choices import check_choice
from vla_rl.types import Config

RULES: Final = ("aligned", "paper", "released")
CLUSTERINGS: Final = ("hdbscan", "k_distance")


class SrpoConfig(Config, frozen=True, kw_only=True):
    """How distances to the references become rewards."""

    rule: str = "aligned"
    """`aligned`: the share of its nearest success that a failure retraced (ours). `paper`: distance of whole trajectories,
    z-score, sigmoid, alpha. `released`: the authors' code with its fixed constants."""

    alpha: float = 0.8
    """Weight of a failure's progress under `paper` and `aligned`, in [0, 1]; 0 is the plain success reward."""

    clusters: str = "k_distance"
    """How `paper` groups successes into references. `k_distance`: DBSCAN with a radius from the data. `hdbscan`: clusters
    of any density, for dozens of successes a task."""

    radius_scale: float = 1.5
    """Radius of `k_distance`, in multiples of the usual distance between neighbouring successes; > 0."""

    carry_over: int = 16
    """Successes of each task kept for updates in which nobody solves it, the newest ones; 0 keeps none."""

    def __post_init__(self) -> None:
        check_choice(RULES, self.rule, "SrpoConfig.rule")
        check_choice(CLUSTERINGS, self.clusters, "SrpoConfig.clusters")
        self.require(0.0 <= self.alpha <= 1.0, "alpha", "a weight in [0, 1]")
        self.require(0.0 < self.radius_scale < float("inf"), "radius_scale", "a finite factor > 0")
        self.require(self.carry_over >= 0, "carry_over", "at least 0 successes a task")
