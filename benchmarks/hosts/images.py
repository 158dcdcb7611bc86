"""Bytes to the control process for an episode that is trained on, with images past it and through it.

`python -m benchmarks.hosts.images [--seconds 60]`; the last line is JSON:

    control_bytes_past     bytes that the control process receives for an episode whose images go
                           from its host to the host of the learner's ranks
    control_bytes_through  the same if they go through the control process
    control_cpu_ms         CPU of the control process for an episode, past it and through it
    picture_bytes          bytes of the images of an episode
    machine_load           processes that wanted a core, from the kernel

Network namespaces stand in for the control process's host, two that run episodes and one with learner
ranks, whose image cache fetches the images; what the ranks would compute is left out. Each decision has
an image of 224 x 224 pixels, 25 decisions an episode on average.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.rollouts import config_for, rollout_over
from benchmarks.hosts.sleeping_policy import sleeping_policy
from benchmarks.hosts.updates import Updates
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.actors import RemoteHost, read_keys, read_public_key
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.rollout import EpisodeScheduler, SchedulerConfig

SLOTS: Final = 4
"""Simulators of each host: with a chunk of 20 ms and a decision of 205 ms, its policy never waits."""

_CACHE_BYTES: Final = 4 << 30
_LOST_AFTER_S: Final = 60.0
_WITHIN_S: Final = 400.0


class Window(NamedTuple):
    """Figures of some seconds, for each episode that was trained on."""

    control_bytes: float
    cpu_ms: float
    images_through_control: float
    images_direct: float


async def window(rollout: HostFleet, control: NamespaceHost, seconds: float) -> Window:
    """Measure whole updates of one group, for `seconds` or a little longer."""
    updates, runner = Updates(rollout), rollout.runner
    async with updates.running(SchedulerConfig(groups_per_update=1), lambda _: None) as scheduler:
        await _next_update(scheduler)
        before, began_s = _counts(control, runner.metrics()), time.monotonic()
        trained = scheduler.state().ledger.trained
        while time.monotonic() - began_s < seconds:
            await _next_update(scheduler)
        after = _counts(control, runner.metrics())
        num_episodes = scheduler.state().ledger.trained - trained
    return Window(
        *((late - early) / num_episodes for early, late in zip(before, after, strict=True))
    )


async def _next_update(scheduler: EpisodeScheduler) -> None:
    version = scheduler.version
    async with asyncio.timeout(_WITHIN_S):
        while scheduler.version == version:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


def _counts(control: NamespaceHost, metrics: dict[str, float]) -> tuple[float, ...]:
    ways = (metrics[f"hosts/image_bytes_{way}"] for way in ("local", "cached"))
    return (control.carried_bytes()[0], 1000 * time.process_time(), *ways)


def assign_rank(host: NamespaceRunner, folder: Path) -> RankAssignments:
    """Assign a rank to a host."""
    placement = RemoteHost(
        address=f"tcp://{host.namespace.address}:7070",
        server_public_key=read_public_key(folder / "keys/server.pub"),
        client_keys=read_keys(folder / "keys/client.key"),
        lost_after_s=_LOST_AFTER_S,
    )
    return RankAssignments((RankAssignment("cpu", host.name, placement, host.namespace.address),))


async def measure(
    control: NamespaceHost, folder: Path, hosts: list[NamespaceRunner], seconds: float
) -> dict[str, object]:
    """Measure both ways; the last host has the ranks."""
    *acting, learning = hosts
    config = config_for(
        write_list(folder, acting),
        num_envs=SLOTS,
        scheduler=SchedulerConfig(groups_per_update=1),
    )
    routes = ImageRoutes(_CACHE_BYTES)
    routes.assign(assign_rank(learning, folder))
    async with rollout_over(config, sleeping_policy(), images=routes) as rollout:
        past = await window(rollout, control, seconds)
    async with rollout_over(config, sleeping_policy()) as rollout:
        through = await window(rollout, control, seconds)
    assert past.images_through_control == through.images_direct == 0
    return {
        "control_bytes_past": round(past.control_bytes),
        "control_bytes_through": round(through.control_bytes),
        "control_cpu_ms": [round(each.cpu_ms, 2) for each in (past, through)],
        "picture_bytes": [round(past.images_direct), round(through.images_through_control)],
        "machine_load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a window")
    options = parser.parse_args()
    try:
        with (
            network_namespaces(4) as (control, *others),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as name,
            start_hosts(others, Path(name), _LOST_AFTER_S) as hosts,
            control.entered(),
        ):
            figures = uvloop.run(measure(control, Path(name), hosts, options.seconds))
    except NamespacesRefused as reason:
        figures = dict.fromkeys(("control_bytes_past", "control_bytes_through"))
        figures["reason"] = str(reason)
    print_table("the way of images", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
