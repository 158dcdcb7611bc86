"""The layout that `--dry-run` prints for a run on several hosts: who does what on which GPU."""

import sys
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vla_rl.cluster import Host, HostResources, Needs, layout_table
from vla_rl.cluster.gpus import gpus_of_this_host
from vla_rl.cluster.host_file import read_host_file
from vla_rl.cluster.hosts import resources_of_this_host
from vla_rl.cluster.listed import ListedHosts
from vla_rl.cluster.run_layout import layout_of_run
from vla_rl.commands.plan import MIB, EpisodeFootprint
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.training.hosts.environments import shape_of

ANSWER_WITHIN_S: Final = 5.0
"""Time in which hosts must answer a dry run; then it takes what the file declares."""


async def layout_plan(config: LearningConfig, footprint: EpisodeFootprint, weights: int) -> str:
    """Return the layout as a table.

    Args:
        config: configuration of a run with `cluster.hosts`.
        footprint: memory that its episodes need.
        weights: bytes of the policy's weights, which every engine holds.

    Raises: ConfigError with the inequality if the run cannot be placed.
    """
    path, note = Path(str(config.cluster.hosts)), ""
    here = Host(
        name="this host", resources=replace(resources_of_this_host(), gpus=gpus_of_this_host())
    )
    try:
        async with ListedHosts(path, answer_within_s=ANSWER_WITHIN_S) as listed:
            others = [host for host in listed.hosts() if host.placement is not None]
    except ConfigError as error:
        others = _declared(path)
        note = f"\nnot every host answered, so this is what {path} declares:\n{error}"
    needs = Needs(acting_bytes=weights, simulator_bytes=footprint.simulator_mb * MIB)
    layout = layout_of_run([here, *others], shape_of(config), needs)
    num_envs = sum(place.num_simulators for place in layout.simulators)
    config.scheduler.require_feasible(num_envs=num_envs, group_size=config.episodes_per_group)
    return layout_table(layout) + note


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
