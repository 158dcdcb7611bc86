"""Publication of weights to the engines of four hosts over that to the engine of one.

`python -m benchmarks.hosts.publication [--rounds 5]`; the last line is JSON:

    publish_4_hosts_vs_1    time over time, cables as fast as the cores; goal 1.3
    bare_4_hosts_vs_1       the same for bare ZeroMQ sockets with CURVE
    publish_vs_bare         the first over the second
    limited_4_hosts_vs_1    all cables limited to the same, the sender's too, so that cores wait for them
    copies_sent             copies of the weights that leave the sender for four hosts; goal 1
    seconds                 of a publication to one host and to four; and bare, limited

Network namespaces stand in for hosts. What two cores cannot show: every copy is encrypted by its sender
and decrypted by its receiver, so four hosts are four times the work of one for the same two cores, which
five machines would share. With limited cables the cores wait for them, as they do for a network, and
the ratio shows what is done at the same time.
"""

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.hosts.bare_copies import BareCopies
from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.rollouts import config_for, rollout_over
from benchmarks.hosts.sleeping_policy import SleepingPolicy, learn, sleeping_policy
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.errors import ActorDied
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.host_recipe import PIECE_BYTES
from vla_rl.remote_rollout.weight_publication import HostWeights
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import SOLE_MEMBER, AgentNames

NUM_HOSTS: Final = 4
HIDDEN: Final = (512,) * 61
"""Layers of a policy of 67 MB."""

CABLE_MB_PER_S: Final = 10.0
"""Limit of a cable: the encryption of what four of them carry takes a sixteenth of a core."""

_LOST_AFTER_S: Final = 60.0


class Publication:
    """Publishes to one host, or to all, of those that a rollout has brought up."""

    def __init__(self, rollout: HostFleet, model: SleepingPolicy, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._network, self._version = model.network, 0
        self.num_bytes = sum(each.nbytes for each in self._network.parameters())
        self._weights: dict[int, HostWeights] = {}
        for number in (1, NUM_HOSTS):
            weights = HostWeights(
                AgentNames([SOLE_MEMBER]), 0, _must_not_be_lost, _ignored, _ignored
            )
            weights.hosts.update(list(rollout.weights.hosts.items())[:number])
            weights.open(self._start)
            self._weights[number] = weights

    async def publish(self, num_hosts: int) -> None:
        """Publish the next version, as a learner does."""
        self._version += 1
        learn(self._network)
        weights = self._weights[num_hosts]
        await asyncio.to_thread(
            weights.sinks[SOLE_MEMBER].apply_weights, self._network, self._version
        )
        await weights.wait_applied()
        self._publishing.result()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self._publishing = self._tasks.create_task(work, name=name)
        return self._publishing


class Times:
    """Seconds of one way to one host and to four, which take turns."""

    def __init__(self, name: str, send: Callable[[int], Awaitable[None]]) -> None:
        self.name, self._send = name, send
        self._seconds: dict[int, list[float]] = {1: [], NUM_HOSTS: []}

    async def round(self) -> None:
        """Send to one host, then to all."""
        for num_hosts, seconds in self._seconds.items():
            began = time.perf_counter()
            await self._send(num_hosts)
            seconds.append(time.perf_counter() - began)
        newest = [round(each[-1], 2) for each in self._seconds.values()]
        print(f"{self.name}: {newest} s to 1 and {NUM_HOSTS} hosts", file=sys.stderr, flush=True)

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        pairs = zip(self._seconds[NUM_HOSTS], self._seconds[1], strict=True)
        return statistics.median(many / one for many, one in pairs)

    @property
    def medians(self) -> list[float]:
        """Median seconds to one host, and to all."""
        return [round(statistics.median(each), 3) for each in self._seconds.values()]


async def measure(
    control: NamespaceHost, folder: Path, hosts: list[NamespaceRunner], rounds: int
) -> dict[str, object]:
    """Measure publications, bare copies, and publications through limited cables."""
    config = config_for(
        write_list(folder, hosts),
        num_envs=1,
        scheduler=SchedulerConfig(groups_per_update=NUM_HOSTS),
    )
    model = sleeping_policy(HIDDEN)
    machines = [host.namespace for host in hosts]
    async with rollout_over(config, model) as rollout, asyncio.TaskGroup() as tasks:
        publication = Publication(rollout, model, tasks)
        piece, number = secrets.token_bytes(PIECE_BYTES), publication.num_bytes // PIECE_BYTES
        with BareCopies(machines) as copies:

            async def copy(num_hosts: int) -> None:
                await asyncio.to_thread(copies.send, num_hosts, piece, number)

            ours, bare = Times("ours", publication.publish), Times("bare", copy)
            await publication.publish(NUM_HOSTS)
            for _ in range(rounds):
                await ours.round()
                await bare.round()
        before = control.carried_bytes()[1]
        await publication.publish(NUM_HOSTS)
        num_copies = (control.carried_bytes()[1] - before) / publication.num_bytes
        limited = Times("limited cables", publication.publish)
        for machine in (control, *machines):
            machine.limit_cable(CABLE_MB_PER_S)
        for _ in range(rounds):
            await limited.round()
    return {
        "publish_4_hosts_vs_1": ours.ratio,
        "bare_4_hosts_vs_1": bare.ratio,
        "publish_vs_bare": ours.ratio / bare.ratio,
        "limited_4_hosts_vs_1": limited.ratio,
        "copies_sent": num_copies,
        "seconds": {each.name: each.medians for each in (ours, bare, limited)},
        "sizes": f"{publication.num_bytes / 1e6:.0f} MB, limited cables {CABLE_MB_PER_S:g} MB/s",
    }


def _ignored(version: int) -> None:
    """Do nothing: no scheduler waits for a version."""


def _must_not_be_lost(name: str, death: ActorDied) -> None:
    raise death


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    try:
        with (
            network_namespaces(1 + NUM_HOSTS) as (control, *others),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as folder,
            start_hosts(others, Path(folder), _LOST_AFTER_S) as hosts,
            control.entered(),
        ):
            figures = uvloop.run(measure(control, Path(folder), hosts, options.rounds))
    except NamespacesRefused as reason:
        figures = {"publish_4_hosts_vs_1": None, "reason": str(reason)}
    print_table("publication to four hosts against one", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
