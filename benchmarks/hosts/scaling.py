"""Decisions per second of eight hosts over eight times those of one, and bytes to the control process.

`python -m benchmarks.hosts.scaling [--seconds 60]`; the last line is JSON:

    scaling_8                  decisions/s of eight hosts over eight times those of one; goal 0.95
    control_bytes_per_episode  bytes that the control process receives for an episode; goal 20,000
    learner_bytes_per_episode  the same with the arrays of the episodes that are trained on: the
                               learner is in the control process
    control_cpu_ms             CPU of the control process for an episode, without and with the arrays
    share_of_ideal             decisions/s over those of policies that never wait, by window
    machine_load               processes that wanted a core, from the kernel

Network namespaces stand in for hosts, each with `vla-rl host`, an engine and simulators that sleep
(`benchmarks.hosts.measured`). A host has the pace of a sixteenth of a GPU, because two cores share the
work of all hosts; so it sleeps nearly all of the time, and one that waits for the control process
shows. One host is measured, then seven join, then they are killed and one is measured again. Each
update, a group of eight episodes for each host, publishes the weights to all hosts.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from benchmarks.hosts.measured import ACTED_PER_S
from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.rollouts import config_for, rollout_over
from benchmarks.hosts.sleeping_policy import HOSTS_PER_GPU, sleeping_policy
from benchmarks.hosts.updates import Updates
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import Group, Trajectory

NUM_HOSTS: Final = 8
SLOTS: Final = 4
"""Simulators of a host: with a chunk of 20 ms and a decision of 205 ms, its policy never waits."""

IDEAL_PER_S: Final = ACTED_PER_S / HOSTS_PER_GPU
"""Decisions of one host in a second if its policy never waits."""

_WARM_UP_S: Final = 15.0
_CHANGE_WITHIN_S: Final = 400.0
_LOST_AFTER_S: Final = 60.0
"""Silence of a lost host. A machine at its limit holds up any process for seconds; that is no lost host here."""


class Window(NamedTuple):
    """Figures of some seconds."""

    decisions_per_s: float
    """Decisions per second of each host."""

    bytes_per_episode: float
    cpu_ms_per_episode: float


class Watched:
    """Updates over the hosts that are there, measured for some seconds at a time.

    Args:
        rollout: over the hosts.
        here: namespace of this process, whose cable carries all that it receives.
    """

    def __init__(self, rollout: HostFleet, control: NamespaceHost) -> None:
        self._runner, self._control = rollout.runner, control
        self._updates = Updates(rollout)
        self._ended: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._num_decisions = 0

    async def until(self, num_hosts: int) -> None:
        """Wait until `num_hosts` hosts run episodes."""
        async with asyncio.timeout(_CHANGE_WITHIN_S):
            while len(self._runner.hosts) != num_hosts:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)

    async def window(self, seconds: float, keep: Callable[[Group], bool] | None = None) -> Window:
        """Measure after a warm-up; arrays of groups that are not kept stay where they are."""
        num_hosts = len(self._runner.hosts)
        config = SchedulerConfig(groups_per_update=num_hosts)
        async with self._updates.running(config, self._note, keep):
            await asyncio.sleep(_WARM_UP_S)
            self._ended.clear()
            began = (self._control.carried_bytes()[0], time.process_time())
            await asyncio.sleep(seconds)
            ended = (self._control.carried_bytes()[0], time.process_time())
            num_episodes = sum(map(len, self._ended.values()))
            rates = [_decisions_per_s(of_host) for of_host in self._ended.values()]
        found = Window(
            sum(rates) / num_hosts,
            (ended[0] - began[0]) / num_episodes,
            1000 * (ended[1] - began[1]) / num_episodes,
        )
        print(f"{num_hosts} hosts: {found.decisions_per_s:.2f} decisions/s on each", flush=True)
        return found

    def _note(self, trajectory: Trajectory) -> None:
        """Note what its host has decided since the last episode that ended there."""
        now = asyncio.get_running_loop().time()
        before, self._num_decisions = (
            self._num_decisions,
            self._runner.decisions(now).num_decisions,
        )
        assert trajectory.episode_ref is not None, "the episode stores have room"
        self._ended[trajectory.episode_ref.host].append((now, self._num_decisions - before))


def _decisions_per_s(ended: list[tuple[float, int]]) -> float:
    """Return the rate of a host from its first end of an episode to the last one, which is exact."""
    (began_s, _), *others = ended
    return sum(number for _, number in others) / (others[-1][0] - began_s)


async def measure(
    control: NamespaceHost, folder: Path, hosts: list[NamespaceRunner], seconds: float
) -> dict[str, object]:
    """Measure one host, eight hosts, and one again."""
    config = config_for(
        write_list(folder, hosts[:1]),
        num_envs=SLOTS,
        scheduler=SchedulerConfig(groups_per_update=1),
    )
    async with rollout_over(config, sleeping_policy()) as opened:
        watched = Watched(opened, control)
        before = await watched.window(seconds)
        write_list(folder, hosts)
        await watched.until(NUM_HOSTS)
        eight = await watched.window(seconds)
        light = await watched.window(seconds, keep=lambda group: False)
        for host in hosts[1:]:
            host.kill()
        await watched.until(1)
        after = await watched.window(seconds)
    one = statistics.mean((before.decisions_per_s, after.decisions_per_s))
    shares = [each.decisions_per_s / IDEAL_PER_S for each in (before, eight, light, after)]
    return {
        "scaling_8": eight.decisions_per_s / one,
        "control_bytes_per_episode": light.bytes_per_episode,
        "learner_bytes_per_episode": eight.bytes_per_episode,
        "control_cpu_ms": [round(each.cpu_ms_per_episode, 2) for each in (light, eight)],
        "share_of_ideal": [round(share, 3) for share in shares],
        "machine_load": round(os.getloadavg()[0], 1),
        "sizes": f"{SLOTS} simulators a host, {IDEAL_PER_S:g} decisions/s, windows of {seconds:g} s",
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
            network_namespaces(1 + NUM_HOSTS) as (control, *others),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as name,
            start_hosts(others, Path(name), _LOST_AFTER_S) as hosts,
            control.entered(),
        ):
            figures = uvloop.run(measure(control, Path(name), hosts, options.seconds))
    except NamespacesRefused as reason:
        figures = {"scaling_8": None, "control_bytes_per_episode": None, "reason": str(reason)}
    print_table("eight hosts against one", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
