"""Weights from learner ranks on one host to engines on two others: what the control process carries.

`python -m benchmarks.hosts.ranks_to_hosts [--updates 3]`; the last line is JSON:

    ranks_to_hosts_copies_through_control   bytes of an update that its cable carries, both directions
                                            together, over the bytes of the weights
    ranks_to_hosts_control_peak_mb          most private memory of the control process, beyond that
                                            before the first update
    ranks_to_hosts_s                        seconds of an update, whose learning takes next to none,
                                            until both hosts act with its weights
    ranks_to_hosts_waited_s                 seconds of them in which the learner waited
    received_and_sent_...                   the same if the control process receives the weights from
                                            the ranks and sends them on, as for one process that learns
    slow_host_...                           as ranks_to_hosts_..., with a cable of the second host that
                                            carries 10 MB/s
    slow_host_waited_share                  share of its seconds in which the learner waited

Network namespaces stand in for four machines: the control process, two ranks, and two that act.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import uvloop
from torch import nn

from benchmarks.hosts.measured import GROUP_SIZE
from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.publication import HIDDEN
from benchmarks.hosts.rollouts import STARTS, config_for, rollout_over
from benchmarks.hosts.sleeping_policy import SleepingPolicy, sleeping_policy
from benchmarks.interleaved import print_json_line, print_table
from benchmarks.sharded_learning import private_mb
from vla_rl.actors import Runtime
from vla_rl.cluster.host_file import read_host_file
from vla_rl.engines import DeviceLane
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.rollout import EpisodeScheduler, GroupSource, SchedulerConfig
from vla_rl.types import SOLE_MEMBER, Trajectory

NUM_RANKS: Final = 2
_LOST_AFTER_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.002
SLOW_MB_PER_S: Final = 10.0


class ThroughControl:
    """A receiver of weights that takes them from the control process alone."""

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink

    @property
    def network(self) -> nn.Module:
        """Those of the receiver."""
        return self._sink.network

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and version."""
        self._sink.apply_weights(network, weight_version)


class MostPrivate:
    """Looks at the private memory of this process while its block is open."""

    def __init__(self) -> None:
        self.before_mb = self.most_mb = private_mb(os.getpid())
        self._ends = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._looking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._looking.join()

    @property
    def extra_mb(self) -> float:
        """Most of it, beyond that before."""
        return self.most_mb - self.before_mb

    def _look(self) -> None:
        while not self._ends.wait(_LOOK_EVERY_S):
            self.most_mb = max(self.most_mb, private_mb(os.getpid()))


async def run_episodes(rollout: HostFleet) -> Sequence[Trajectory]:
    """Return episodes that the hosts have run."""
    source, config = GroupSource(STARTS, GROUP_SIZE, seed=0), SchedulerConfig(groups_per_update=1)
    async with EpisodeScheduler(rollout.runner, source, config) as scheduler:
        groups = [group async for group in scheduler.groups_for_update(0)]
    return groups[0].trajectories[:2]


async def measured_updates(
    control: NamespaceHost,
    learns: NamespaceRunner,
    hosts: Path,
    list_of_learner: Path,
    num_updates: int,
    *,
    through_control: bool,
) -> dict[str, float]:
    """Make updates, each after all hosts have the last one; return copies, memory and seconds."""
    model = sleeping_policy(HIDDEN)
    config = config_for(hosts, num_envs=1, scheduler=SchedulerConfig(groups_per_update=1))
    async with rollout_over(config, model) as rollout, Runtime() as runtime, DeviceLane(1) as lane:
        sink: Any = rollout.weights.sinks[SOLE_MEMBER]
        trajectories = await run_episodes(rollout)
        learner = learner_of(
            model, runtime, lane, ThroughControl(sink) if through_control else sink
        )
        learner.assign_ranks(assign_ranks(learns, list_of_learner))
        async with learner:
            num_bytes = sum(each.nbytes for each in model.network.parameters())
            seconds, waited, copies = [], [], []
            with MostPrivate() as memory:
                for _ in range(num_updates):
                    before, began = sum(control.carried_bytes()), time.perf_counter()
                    await learner.update(trajectories, [1.0, -1.0])
                    waited.append(time.perf_counter() - began)
                    await rollout.weights.wait_applied()
                    seconds.append(time.perf_counter() - began)
                    copies.append((sum(control.carried_bytes()) - before) / num_bytes)
    return {
        "copies_through_control": statistics.median(copies),
        "control_peak_mb": memory.extra_mb,
        "s": statistics.median(seconds),
        "waited_s": statistics.median(waited),
    }


def learner_of(
    model: SleepingPolicy, runtime: Runtime, lane: DeviceLane, sink: WeightSink
) -> ShardedLearner:
    """Make the learner."""
    optimizer = OptimizerConfig(lr=1e-5, warmup_steps=0)
    config = LearnerConfig(optimizer=optimizer, ranks=NUM_RANKS)
    return ShardedLearner(model, runtime, lane, config, [sink])


def assign_ranks(learns: NamespaceRunner, listed: Path) -> RankAssignments:
    """Assign all ranks to one host."""
    (known,) = read_host_file(listed)
    assignment = RankAssignment(
        "cpu", host=learns.name, placement=known.placement, address=learns.namespace.address
    )
    return RankAssignments((assignment,) * NUM_RANKS)


async def measure(
    control: NamespaceHost, folder: Path, hosts: list[NamespaceRunner], num_updates: int
) -> dict[str, float]:
    """Measure both ways, and the first one with a slow host."""
    learns, *acting = hosts
    listed = write_list(folder, [learns]).rename(folder / "learner.toml")
    figures: dict[str, float] = {}
    for name, through_control in (
        ("ranks_to_hosts", False),
        ("received_and_sent", True),
        ("slow_host", False),
    ):
        if name == "slow_host":
            acting[-1].namespace.limit_cable(SLOW_MB_PER_S)
        found = await measured_updates(
            control,
            learns,
            write_list(folder, acting),
            listed,
            num_updates,
            through_control=through_control,
        )
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    share = figures["slow_host_waited_s"] / figures["slow_host_s"]
    return figures | {"slow_host_waited_share": share}


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    try:
        with (
            network_namespaces(4) as (control, *others),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as folder,
            start_hosts(others, Path(folder), _LOST_AFTER_S) as hosts,
            control.entered(),
        ):
            figures |= uvloop.run(measure(control, Path(folder), hosts, options.updates))
    except NamespacesRefused as reason:
        figures = {"ranks_to_hosts_copies_through_control": None, "reason": str(reason)}
    print_table("weights from ranks to hosts", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
