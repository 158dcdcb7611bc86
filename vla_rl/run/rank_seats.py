"""The seats of learner ranks on the hosts of a run, from the run's layout."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from vla_rl.cluster import Host, RankPlace
from vla_rl.cluster.gpus import gpus_of_this_host
from vla_rl.cluster.host_file import HERE, interfaces_of
from vla_rl.cluster.rank_places import learner_ranges
from vla_rl.cluster.run_layout import VISIBLE, RunShape, layout_of_run, usable
from vla_rl.errors import LearnerHostLost
from vla_rl.learner.distributed.meeting import address_towards
from vla_rl.learner.distributed.seats import RankSeat, Seating
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.environments import shape_of
from vla_rl.team.members import Team


async def seating_of(
    config: LearningConfig,
    team: Team,
    hosts: Sequence[Host],
    lost: Sequence[tuple[str, int]] = (),
    *,
    is_restart: bool = False,
) -> Seating:
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
        interfaces = await asyncio.to_thread(interfaces_of, Path(cluster.hosts))
    there = {HERE, *(host.name for host in hosts)}
    for part in learner_ranges(cluster.learners):
        if is_restart and part.host not in there:
            raise LearnerHostLost(f"the host {part.host!r}, which has ranks, is away", part.host)
    gpus = await asyncio.to_thread(gpus_of_this_host)
    here = replace(hosts[0], resources=replace(hosts[0].resources, gpus=gpus))
    shape = replace(shape_of(config, team), lost=tuple(lost))
    all_hosts = [here, *hosts[1:]]
    layout = layout_of_run(all_hosts, shape)
    return Seating(tuple(_seats(layout.ranks, all_hosts, shape, interfaces)), cluster.ranks_port)


def _seats(
    places: Sequence[RankPlace],
    hosts: Sequence[Host],
    shape: RunShape,
    interfaces: dict[str, str],
) -> list[RankSeat]:
    by_name = {host.name: usable(host, shape) for host in hosts}
    far = [address_of(host) for host in hosts if any(host.name == place.host for place in places)]
    towards = next((address for address in far if address), "127.0.0.1")
    return [_seat(place, by_name[place.host], places, towards, interfaces) for place in places]


def _seat(
    place: RankPlace,
    host: Host,
    places: Sequence[RankPlace],
    towards: str,
    interfaces: dict[str, str],
) -> RankSeat:
    gpus = host.resources.gpus
    if host.placement is None:
        return RankSeat(
            device="cpu" if place.gpu is None else f"cuda:{place.gpu}",
            address=address_towards(towards),
            interface=interfaces[""],
            gpu=place.gpu,
            gpu_bytes=None if place.gpu is None else gpus[place.gpu].memory_bytes,
        )
    # all ranks of a host see the same GPUs, so that NCCL can connect them directly
    learning = [each.gpu for each in places if each.host == host.name and each.gpu is not None]
    visible = ",".join(gpus[gpu].device or str(gpu) for gpu in learning)
    env = dict(host.placement.env) | ({VISIBLE: visible} if learning else {})
    return RankSeat(
        device="cpu" if place.gpu is None else f"cuda:{learning.index(place.gpu)}",
        host=host.name,
        placement=replace(host.placement, env=env),
        address=address_of(host),
        interface=interfaces.get(host.name, ""),
        gpu=place.gpu,
        gpu_bytes=None if place.gpu is None else gpus[place.gpu].memory_bytes,
    )


def address_of(host: Host) -> str:
    """Return the IP address or name by which others know a host; empty for this one."""
    if host.placement is None:
        return ""
    return urlsplit(host.placement.address).hostname or ""
