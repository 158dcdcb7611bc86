"""The places of a run: what knows its hosts, and what runs its episodes on them.

A run on one host has neither, and imports nothing of them.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vla_rl.cluster import Hosts
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane
from vla_rl.pipelines.config import LearningConfig
from vla_rl.rollout import LocalPlayer, TaskStart
from vla_rl.team.members import Team
from vla_rl.types import Agent, Deposit

if TYPE_CHECKING:
    from vla_rl.remote_rollout.host_rollout import HostRollout

START_ANSWER_S: Final = 20.0
"""Time in which listed hosts must answer when a run starts."""

RESTART_ANSWER_S: Final = 10.0
"""The same at a restart, after which hosts that do not answer count as gone."""


def cluster_of(config: ClusterConfig, *, may_be_away: bool) -> Hosts | None:
    """Return what knows the hosts of a run; None if this is the only one.

    Args:
        config: its settings.
        may_be_away: whether a host that does not answer is looked for later.

    Raises: ConfigError for a list that is wrong.
    """
    if not config.has_hosts:
        return None
    if config.hosts is None:
        from vla_rl.cluster.rank_places import learner_ranges
        from vla_rl.cluster.ray_hosts import RayHosts

        wanted = {part.host for part in learner_ranges(config.learners)}
        return RayHosts(config.ray, wanted=wanted, may_be_away=may_be_away)
    from vla_rl.cluster.listed import ListedHosts

    answer_within_s = RESTART_ANSWER_S if may_be_away else START_ANSWER_S
    return ListedHosts(Path(config.hosts), answer_within_s=answer_within_s, may_be_away=may_be_away)


def hosts_of(
    config: LearningConfig,
    cluster: Hosts | None,
    starts: Sequence[TaskStart],
    team: Team,
    agent: Agent,
    lane: DeviceLane,
    here: LocalPlayer | None,
    weight_version: int,
    deposits: Callable[[], Iterable[Deposit]],
) -> "HostRollout | None":
    """Make what runs the episodes on other hosts; None if they run on this one.

    Raises: ConfigError for a list of hosts that is wrong, or a run that they cannot play.
    """
    if cluster is None:
        return None
    from vla_rl.cluster.lent import LentHosts
    from vla_rl.remote_rollout.host_rollout import HostRollout
    from vla_rl.remote_rollout.recipe import recipe_of

    return HostRollout(
        LentHosts(cluster),
        config,
        recipe_of(config, starts, team, agent),
        team,
        lane,
        here=here,
        weight_version=weight_version,
        deposits=deposits,
    )
