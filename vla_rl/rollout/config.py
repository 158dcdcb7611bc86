"""How episodes are scheduled, and the settings that cannot work together, refused before anything starts."""

from vla_rl.errors import ConfigError
from vla_rl.types import Config


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """How many groups make an update, how far ahead generation may run, and what happens when an episode is lost."""

    groups_per_update: int
    """Groups that each update trains on."""

    max_staleness: int = 1
    """Oldest group still trained on, in updates from its dispatch to its training. 0 is synchronous training."""

    max_outstanding_groups: int | None = None
    """Groups in flight, buffered or in training at the same time, to bound memory; by default what staleness allows."""

    deterministic: bool = False
    """Hand groups over in order of `group_id`, whatever their timing. Needs `max_staleness=0`, and an engine that does not
    let an answer depend on its batch."""

    max_attempts: int = 3
    """How often an episode is begun before its loss to a dead or frozen process fails the run."""

    episode_timeout_s: float | None = None
    """Longest an episode may take from the lease of its environment to its end; then it counts as lost."""

    max_filtered_in_a_row: int | None = 1000
    """Groups filtered one after the other, without one kept, that fail the run instead of playing for ever. None: never."""

    def __post_init__(self) -> None:
        self.require(self.groups_per_update >= 1, "groups_per_update", ">= 1 group")
        self.require(self.max_staleness >= 0, "max_staleness", ">= 0 updates; 0 is synchronous training")
        self.require(self.max_attempts >= 1, "max_attempts", ">= 1")
        self.require(self.episode_timeout_s is None or self.episode_timeout_s > 0, "episode_timeout_s", "> 0 s or none")
        self.require(
            self.max_filtered_in_a_row is None or self.max_filtered_in_a_row >= 1, "max_filtered_in_a_row", ">= 1"
        )
        if self.deterministic and self.max_staleness > 0:
            raise ConfigError(
                f"deterministic=True with max_staleness={self.max_staleness}: which weights act would depend on timing; "
                "expected max_staleness=0"
            )

    @property
    def group_capacity(self) -> int:
        """Most groups in flight, buffered or in training at the same time."""
        by_staleness = (self.max_staleness + 1) * self.groups_per_update
        return by_staleness if self.max_outstanding_groups is None else min(by_staleness, self.max_outstanding_groups)

    def require_feasible(self, *, num_envs: int, group_size: int) -> None:
        """Raise `ConfigError`, with the inequality, if updates could never fill or environments could never all play."""
        if self.group_capacity < self.groups_per_update:
            raise ConfigError(
                f"max_outstanding_groups={self.max_outstanding_groups} < groups_per_update={self.groups_per_update}: "
                "no update could ever be filled; raise max_outstanding_groups"
            )
        episodes = self.group_capacity * group_size
        if episodes < num_envs:
            limit = "(max_staleness + 1) * groups_per_update"
            values = f"({self.max_staleness} + 1) * {self.groups_per_update}"
            if self.group_capacity < (self.max_staleness + 1) * self.groups_per_update:
                limit, values = "max_outstanding_groups", str(self.max_outstanding_groups)
            raise ConfigError(
                f"{limit} * group_size = {values} * {group_size} = {episodes} < num_envs = {num_envs}: "
                f"{num_envs - episodes} environments could never play; use num_envs <= {episodes}, or more groups per update"
            )
