"""Settings of SRPO's rewards: the rule, its clusters, and successes of earlier updates."""

from collections.abc import Mapping
from typing import Final

from vla_rl.algorithms.choices import check_choice
from vla_rl.types import Config

RULES: Final = ("aligned", "paper", "released")
CLUSTERINGS: Final = ("hdbscan", "k_distance")
REFERENCES: Final = ("group", "task")


class SrpoConfig(Config, frozen=True, kw_only=True):
    """Settings of the rewards that distances to the references become."""

    rule: str = "aligned"
    """Reward rule of failures. `aligned`: the share of the nearest success that the failure
    retraced (ours). `paper`: distances between whole trajectories, z-score, sigmoid, alpha.
    `released`: the authors' code with its fixed constants."""

    references: str = "task"
    """Successes that a failure is compared with. `task`: those of its task, from all groups of the
    update, as in the paper. `group`: those of its own group, for tasks whose starts show different
    places; a group without a success gets rewards of 0."""

    alpha: float = 0.8
    """Weight of a failure's progress for `paper` and `aligned`, in [0, 1]; 0 gives the plain
    success reward."""

    clusters: str = "k_distance"
    """Clustering of successes into references, for `paper`. `k_distance`: DBSCAN with a radius
    computed from the data. `hdbscan`: clusters of any density; needs dozens of successes per
    task."""

    radius_scale: float = 1.5
    """Radius of `k_distance`, in multiples of the median distance between neighbouring successes; >
    0."""

    carry_over: int = 16
    """Number of the newest successes kept per task as references for updates in which the task is
    not solved; 0 keeps none."""

    def __post_init__(self) -> None:
        check_choice(RULES, self.rule, "SrpoConfig.rule")
        check_choice(REFERENCES, self.references, "SrpoConfig.references")
        check_choice(CLUSTERINGS, self.clusters, "SrpoConfig.clusters")
        self.require(0.0 <= self.alpha <= 1.0, "alpha", "a weight in [0, 1]")
        self.require(0.0 < self.radius_scale < float("inf"), "radius_scale", "a finite factor > 0")
        self.require(self.carry_over >= 0, "carry_over", "at least 0 successes a task")

    def unread(self) -> Mapping[str, str]:
        """Return the options of other rules and references."""
        of_rule = {"aligned": ("clusters", "radius_scale"), "paper": ()}
        others = of_rule.get(self.rule, ("alpha", "clusters", "radius_scale"))
        found = dict.fromkeys(others, f"srpo.rule is {self.rule!r}")
        if self.rule == "paper" and self.clusters != "k_distance":
            found["radius_scale"] = f"srpo.clusters is {self.clusters!r}"
        if self.references == "group":
            found["carry_over"] = "srpo.references is 'group'"
        return found
