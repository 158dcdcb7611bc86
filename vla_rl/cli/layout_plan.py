"""The layout that `--dry-run` prints for a run on several hosts: who does what on which GPU."""

import sys
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vla_rl.actors import KeyPair, RemoteHost
from vla_rl.cli.plan import MIB, EpisodeFootprint
from vla_rl.cluster import Gpu, Host, HostResources, Needs, layout_table
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.gpus import gpus_of_this_host
from vla_rl.cluster.host_file import HERE, read_host_file
from vla_rl.cluster.hosts import resources_of_this_host
from vla_rl.cluster.layout import Layout
from vla_rl.cluster.listed import ListedHosts
from vla_rl.cluster.rank_places import learner_ranges
from vla_rl.cluster.run_layout import layout_of_run
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.host_recipe import run_shape
from vla_rl.team.members import Team

ANSWER_WITHIN_S: Final = 5.0
"""Time in which hosts must answer a dry run; then it takes what the file declares."""


async def layout_plan(
    config: LearningConfig, footprint: EpisodeFootprint, team: Team
) -> tuple[Layout, str]:
    """Return the layout, and as a table.

    Args:
        config: configuration of a run with other hosts.
        footprint: memory that its episodes need.
        team: the policies, whose weights each host holds.

    Raises: ConfigError with the inequality if the run cannot be placed.
    """
    here = Host(
        name="this host", resources=replace(resources_of_this_host(), gpus=gpus_of_this_host())
    )
    others, note = await _others(config.cluster)
    needs = Needs(acting_bytes=team.num_bytes[0], simulator_bytes=footprint.simulator_mb * MIB)
    layout = layout_of_run([here, *others], run_shape(config, team), needs)
    num_envs = sum(place.num_simulators for place in layout.simulators)
    config.scheduler.require_feasible(num_envs=num_envs, group_size=config.episodes_per_group)
    return layout, layout_table(layout) + note


async def _others(config: ClusterConfig) -> tuple[list[Host], str]:
    """Return the other hosts, and a note if they are not as they say themselves."""
    if config.hosts is None:
        return _of_ray(config), "\nas reserved; the cluster itself is asked when the run starts"
    path = Path(config.hosts)
    try:
        async with ListedHosts(path, answer_within_s=ANSWER_WITHIN_S) as listed:
            return [host for host in listed.hosts() if host.placement is not None], ""
    except ConfigError as error:
        note = f"\nnot every host answered, so this is what {path} declares:\n{error}"
        return _declared(path), note


def _of_ray(cluster: ClusterConfig) -> list[Host]:
    """Return the nodes that are reserved; of their names, those that learn are known."""
    config = cluster.ray
    named = [part.host for part in learner_ranges(cluster.learners) if part.host != HERE]
    names = [*named, *(f"node {number}" for number in range(config.num_hosts))]
    gpus = tuple(Gpu(name="a GPU", memory_bytes=sys.maxsize) for _ in range(config.gpus_per_host))
    resources = HostResources(num_cores=config.cores_per_host, memory_bytes=sys.maxsize, gpus=gpus)
    nobody = KeyPair(public="", secret="")
    placement = RemoteHost(address="tcp://", server_public_key="", client_keys=nobody)
    return [
        Host(name=name, resources=resources, placement=placement)
        for name in names[: config.num_hosts]
    ]


def _declared(path: Path) -> list[Host]:
    """Return the hosts as the file alone knows them; what it leaves out counts as enough."""
    unknown = HostResources(num_cores=1, memory_bytes=sys.maxsize)
    return [
        Host(
            name=known.listed.name,
            resources=known.listed.declared(unknown),
            placement=known.placement,
        )
        for known in read_host_file(path)
    ]
