"""The hosts of a run: what knows them, what runs its episodes on them, where the learner's ranks are.

A run on one host imports nothing of this.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from vla_rl.cluster import Host, Hosts, RankDevice
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.host_file import LOCAL_HOST, read_interfaces
from vla_rl.cluster.hosts import OpenHosts, list_own_gpus
from vla_rl.cluster.run_layout import (
    VISIBLE,
    RunShape,
    limit_to_used,
    parse_learners,
    plan_run_layout,
)
from vla_rl.engines import DeviceLane, LanguageModel
from vla_rl.errors import LearnerHostLost
from vla_rl.graph import TaskGraph
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.learner.distributed.rendezvous import find_own_address
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.embodied_srpo import embed_group, reward_by_progress
from vla_rl.pipelines.nodes.advantages import (
    CriticAdvantage,
    GroupAdvantage,
    KlPenalty,
    OverlongPenalty,
)
from vla_rl.pipelines.nodes.rewards import GroupReward
from vla_rl.pipelines.nodes.run_parts import (
    Collect,
    EstimateValues,
    Learn,
    ReferenceLogProbs,
    Show,
    TrainCritic,
)
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.host_recipe import make_host_recipe, run_shape
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.rollout import LocalEpisodeRunner, TaskStart
from vla_rl.team.members import Team
from vla_rl.types import Agent, EpisodeRef

START_ANSWER_S: Final = 20.0
"""Time in which listed hosts must answer when a run starts."""

RESTART_ANSWER_S: Final = 10.0
"""The same at a restart, after which hosts that do not answer count as gone."""


def find_hosts(config: ClusterConfig, *, may_be_away: bool) -> Hosts:
    """Return what knows the hosts of a run.

    Args:
        config: its settings.
        may_be_away: whether a host that does not answer is looked for later.

    Raises: ConfigError for a list that is wrong.
    """
    if config.hosts is None:
        from vla_rl.cluster.ray_hosts import RayHosts

        wanted = {part.host for part in parse_learners(config.learners)}
        return RayHosts(config.ray, wanted=wanted, may_be_away=may_be_away)
    from vla_rl.cluster.listed_hosts import ListedHosts

    # a host that died with its ranks must not keep the others waiting for long
    answer_within_s = RESTART_ANSWER_S if may_be_away else START_ANSWER_S
    return ListedHosts(Path(config.hosts), answer_within_s=answer_within_s, may_be_away=may_be_away)


def make_host_fleet(
    config: LearningConfig,
    cluster: Hosts,
    starts: Sequence[TaskStart],
    team: Team,
    agent: Agent,
    lane: DeviceLane,
    local_runner: LocalEpisodeRunner | None,
    weight_version: int,
    episode_refs: Callable[[], Iterable[EpisodeRef]],
) -> HostFleet:
    """Make what runs the episodes on other hosts.

    Raises: ConfigError for a list of hosts that is wrong, or a run that they cannot run.
    """
    return HostFleet(
        OpenHosts(cluster),
        config,
        make_host_recipe(config, starts, team, agent),
        team,
        lane,
        local_runner=local_runner,
        weight_version=weight_version,
        episode_refs=episode_refs,
    )


async def assign_ranks(
    config: LearningConfig,
    team: Team,
    hosts: Sequence[Host],
    lost: Sequence[tuple[str, int]] = (),
    *,
    is_restart: bool = False,
) -> RankAssignments:
    """Return where the ranks of a run with `cluster.learners` are.

    Args:
        config: settings of the run.
        team: the policies.
        hosts: this host, then the others that are there.
        lost: GPUs that no rank may use: the host's name in `cluster.learners`, and its index.
        is_restart: whether all of these hosts were there before.

    Raises: ConfigError if the ranks cannot be placed; LearnerHostLost if a host that has had ranks is
        away.
    """
    cluster = config.cluster
    if cluster.hosts is None:
        interfaces = dict.fromkeys(
            ["", *(host.name for host in hosts)], cluster.ray.interface or ""
        )
    else:
        interfaces = await asyncio.to_thread(read_interfaces, Path(cluster.hosts))
    names = {LOCAL_HOST, *(host.name for host in hosts)}
    for part in parse_learners(cluster.learners):
        if is_restart and part.host not in names:
            raise LearnerHostLost(f"the host {part.host!r}, which has ranks, is away", part.host)
    # asked again, as the hosts' own report was made before a rank took a GPU here
    gpus = await asyncio.to_thread(list_own_gpus)
    local = replace(hosts[0], resources=replace(hosts[0].resources, gpus=gpus))
    shape = replace(run_shape(config, team), lost=tuple(lost))
    all_hosts = [local, *hosts[1:]]
    layout = plan_run_layout(all_hosts, shape)
    return RankAssignments(
        tuple(_rank_assignments(layout.ranks, all_hosts, shape, interfaces)), cluster.ranks_port
    )


def _rank_assignments(
    devices: Sequence[RankDevice],
    hosts: Sequence[Host],
    shape: RunShape,
    interfaces: dict[str, str],
) -> list[RankAssignment]:
    by_name = {host.name: limit_to_used(host, shape) for host in hosts}
    remote = [
        host_address(host)
        for host in hosts
        if any(host.name == assigned.host for assigned in devices)
    ]
    # the interface that reaches one host is taken for all: ranks need a network that all of them
    # share
    towards = next((address for address in remote if address), "127.0.0.1")
    return [
        _rank_assignment(assigned, by_name[assigned.host], devices, towards, interfaces)
        for assigned in devices
    ]


def _rank_assignment(
    assigned: RankDevice,
    host: Host,
    devices: Sequence[RankDevice],
    towards: str,
    interfaces: dict[str, str],
) -> RankAssignment:
    gpus = host.resources.gpus
    if host.placement is None:
        return RankAssignment(
            device="cpu" if assigned.gpu is None else f"cuda:{assigned.gpu}",
            address=find_own_address(towards),
            interface=interfaces[""],
            gpu=assigned.gpu,
            gpu_bytes=None if assigned.gpu is None else gpus[assigned.gpu].memory_bytes,
        )
    # all ranks of a host see the same GPUs, so that NCCL can connect them directly
    learning = [each.gpu for each in devices if each.host == host.name and each.gpu is not None]
    visible = ",".join(gpus[gpu].device or str(gpu) for gpu in learning)
    env = dict(host.placement.env) | ({VISIBLE: visible} if learning else {})
    return RankAssignment(
        device="cpu" if assigned.gpu is None else f"cuda:{learning.index(assigned.gpu)}",
        host=host.name,
        placement=replace(host.placement, env=env),
        address=host_address(host),
        interface=interfaces.get(host.name, ""),
        gpu=assigned.gpu,
        gpu_bytes=None if assigned.gpu is None else gpus[assigned.gpu].memory_bytes,
    )


def host_address(host: Host) -> str:
    """Return the IP address or name by which others know a host; empty for this one."""
    if host.placement is None:
        return ""
    return urlsplit(host.placement.address).hostname or ""


READ_NO_IMAGES: Final = (
    Collect,
    CriticAdvantage,
    GroupAdvantage,
    EstimateValues,
    KlPenalty,
    Learn,
    TrainCritic,
    OverlongPenalty,
    ReferenceLogProbs,
    Show,
)
"""Node functions that get groups, and leave images to the ranks, or to the process that has them."""


def choose_image_route(
    config: LearningConfig, graph: TaskGraph, team: Team, hosts: HostFleet
) -> None:
    """Let images go to the learner's ranks directly, if nothing in this process reads them."""
    learners = [member.learner or config.learner for member in team.members.values()]
    # a process alone reads the images itself
    if all(learner.ranks == 1 for learner in learners):
        return
    reader = _image_reader(graph, team, hosts)
    if config.cluster.episode_store_gib == 0:
        reader = "with cluster.episode_store_gib = 0, whole episodes come here"
    if reader:
        hosts.image_route = f"images go through this process: {reader}"
        return
    hosts.images = ImageRoutes(round(config.cluster.episode_store_gib * (1 << 30)))
    hosts.image_route = "images go from the hosts to the learner ranks directly"


def _image_reader(graph: TaskGraph, team: Team, hosts: HostFleet) -> str:
    """Return what reads images here, in words; empty if nothing does."""
    if any(isinstance(member.model, LanguageModel) for member in team.members.values()):
        return "those of conversations are compared here"
    nodes = graph.nodes.values()
    collected = {name for node in nodes if isinstance(node.func, Collect) for name in node.writes}
    if not collected:
        return "the pipeline collects episodes in a way of its own"
    for node in nodes:
        if collected & set(node.reads.values()) and not _reads_no_images(node.func, hosts):
            return f"the node {node.id!r} may read them"
    return ""


def _reads_no_images(function: Callable[..., Any] | str, hosts: HostFleet) -> bool:
    if type(function) is GroupReward:
        # a function of one's own may read anything, unless it says that it does not
        return not function.may_read_images
    if function is embed_group:
        return hosts.embeds
    return function is reward_by_progress or type(function) in READ_NO_IMAGES
