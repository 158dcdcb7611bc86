"""Settings of the episode scheduler.

Combinations that cannot work are rejected before anything starts.
"""

from vla_rl.errors import ConfigError
from vla_rl.types import Config


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """Settings for the groups of an update, the staleness of episodes, and lost episodes."""

    groups_per_update: int
    """Groups that each update trains on; >= 1."""

    max_staleness: int = 1
    """Most updates between the dispatch of a group and its training; >= 0. 0 is synchronous
    training."""

    max_outstanding_groups: int | None = None
    """Most groups in flight, buffered or in training at the same time. None: as many as staleness
    allows. Lower it to save memory."""

    deterministic: bool = False
    """Hand groups over in order of `group_id`, so that a run can be repeated exactly. Needs
    `max_staleness=0`, and an engine whose answers do not depend on their batch."""

    max_attempts: int = 3
    """Times an episode is started, at most. If the last attempt too is lost to a dead or frozen
    process, the run fails. Losses of whole hosts do not count."""

    episode_timeout_s: float | None = None
    """Most seconds from the lease of an environment to the end of its episode; an episode that
    takes longer counts as lost. None: no limit."""

    max_filtered_in_a_row: int | None = 1000
    """Groups filtered in a row, with none kept, after which the run fails instead of continuing for
    ever. None: never."""

    def __post_init__(self) -> None:
        self.require(self.groups_per_update >= 1, "groups_per_update", ">= 1 group")
        self.require(
            self.max_staleness >= 0, "max_staleness", ">= 0 updates; 0 is synchronous training"
        )
        self.require(self.max_attempts >= 1, "max_attempts", ">= 1")
        self.require(
            self.episode_timeout_s is None or self.episode_timeout_s > 0,
            "episode_timeout_s",
            "> 0 s or none",
        )
        self.require(
            self.max_filtered_in_a_row is None or self.max_filtered_in_a_row >= 1,
            "max_filtered_in_a_row",
            ">= 1",
        )
        if self.deterministic and self.max_staleness > 0:
            raise ConfigError(
                f"deterministic=True with max_staleness={self.max_staleness}: the weights that act "
                "would depend on timing; expected max_staleness=0"
            )

    @property
    def group_capacity(self) -> int:
        """Most groups in flight, buffered or in training at the same time."""
        by_staleness = (self.max_staleness + 1) * self.groups_per_update
        return (
            by_staleness
            if self.max_outstanding_groups is None
            else min(by_staleness, self.max_outstanding_groups)
        )

    def require_feasible(self, *, num_envs: int, group_size: int) -> None:
        """Raise `ConfigError` if updates could never fill, or environments never be used.

        The error has the inequality.
        """
        if self.group_capacity < self.groups_per_update:
            raise ConfigError(
                f"max_outstanding_groups={self.max_outstanding_groups} < "
                f"groups_per_update={self.groups_per_update}: no update could ever be filled; "
                "raise max_outstanding_groups"
            )
        episodes = self.group_capacity * group_size
        if episodes < num_envs:
            limit = "(max_staleness + 1) * groups_per_update"
            values = f"({self.max_staleness} + 1) * {self.groups_per_update}"
            if self.group_capacity < (self.max_staleness + 1) * self.groups_per_update:
                limit, values = "max_outstanding_groups", str(self.max_outstanding_groups)
            raise ConfigError(
                f"{limit} * group_size = {values} * {group_size} = {episodes} < num_envs = "
                f"{num_envs}: {num_envs - episodes} environments would never be used; use num_envs "
                f"<= {episodes}, or larger updates"
            )
