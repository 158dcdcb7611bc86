"""Seconds until a host that joins runs episodes, and until those of a lost host run elsewhere.

`python -m benchmarks.hosts.coming_and_going [--rounds 3]`; the last line is JSON:

    join_to_playing_s     from `vla-rl host` ready to the first decision of an episode there; goal 5
    loss_to_replay_s      the worse of the next two; goal 5
    killed_to_replay_s    from kill -9 of `vla-rl host` to the first decision of the last of its
                          episodes elsewhere
    pulled_to_replay_s    the same from `ip link set down` of its cable
    noticed_s             from either to the host's end for the run
    plugged_to_playing_s  from the cable's return to the first decision of an episode there
    machine_load          processes that wanted a core, from the kernel

Medians of the rounds. Network namespaces stand in for two hosts, with the settings of a user. A host
is struck while the other has free slots: what a replay waits for a slot is no cost of the loss. The
run looks for hosts once a second.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespacesRefused, network_namespaces
from benchmarks.hosts.rollouts import config_for, rollout_over
from benchmarks.hosts.sleeping_policy import FIRST_DECISION, sleeping_policy
from benchmarks.hosts.updates import Updates
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.actors.placement import LOST_AFTER_S
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.rollout import EpisodeScheduler, SchedulerConfig
from vla_rl.types import Trajectory

SLOTS: Final = 4
"""Simulators of each of the two hosts, which run the eight episodes of a group."""

_ONE_GROUP: Final = SchedulerConfig(groups_per_update=1, max_staleness=0)
"""So that slots are free while the group's last episodes run."""

_WITHOUT_END: Final = SchedulerConfig(groups_per_update=2, max_staleness=1)
"""So that episodes always wait for a slot."""

_ANSWER_WITHIN_S: Final = 20.0
"""Longest start of a process on a host, which is a user's."""

_WITHIN_S: Final = 120.0


class Watched:
    """Updates over two hosts, one of which is struck.

    Args:
        rollout: over both.
        victim: the host that is struck.
    """

    def __init__(self, rollout: HostFleet, victim: NamespaceRunner) -> None:
        self._rollout, self._victim = rollout, victim
        self._updates = Updates(rollout)
        self._ended: list[Trajectory] = []

    async def loss(self, strike: Callable[[], None]) -> tuple[float, float]:
        """Strike; return the seconds until the host was lost, and until all its episodes run again."""
        async with self._updates.running(_ONE_GROUP, self._ended.append) as scheduler:
            await self._until(lambda: self._num_connected >= 2 and self._num_running <= SLOTS)
            lost_before, struck_s = _num_lost(scheduler), time.monotonic()
            await asyncio.to_thread(strike)
            await self._until(lambda: not self._is_connected)
            noticed_s = time.monotonic()
            await self._until(lambda: _num_lost(scheduler) > lost_before)
            # those whose arrays it had are missed later, when their group is complete
            lost = _num_lost(scheduler) - lost_before
            await self._until(lambda: len(self._replays_since(struck_s)) >= lost)
        return noticed_s - struck_s, sorted(self._replays_since(struck_s))[lost - 1] - struck_s

    async def return_(self, begin: Callable[[], float]) -> float:
        """Let the host come back; return the seconds until it runs an episode.

        Args:
            begin: returns when it was ready, by the clock of the machine.
        """
        async with self._updates.running(_WITHOUT_END, self._ended.append):
            ready_s = await asyncio.to_thread(begin)
            await self._until(lambda: bool(self._decisions_since(ready_s)))
        return min(self._decisions_since(ready_s)) - ready_s

    @property
    def _is_connected(self) -> bool:
        return self._victim.name in self._rollout.runner.hosts

    @property
    def _num_connected(self) -> int:
        """Number of episodes that run on the host."""
        name = f"hosts/{self._victim.name}/episodes_running"
        return int(self._rollout.runner.metrics().get(name, 0.0))

    @property
    def _num_running(self) -> int:
        metrics = self._rollout.runner.metrics()
        return int(sum(n for name, n in metrics.items() if name.endswith("/episodes_running")))

    def _replays_since(self, struck_s: float) -> list[float]:
        """Return when each episode that was run again had its first decision."""
        firsts = [each.info[FIRST_DECISION] for each in self._ended if each.episode.attempt > 0]
        return [first for first in firsts if first > struck_s]

    def _decisions_since(self, ready_s: float) -> list[float]:
        """Return when episodes on the host had their first decision."""
        name = self._victim.name
        firsts = [
            each.info[FIRST_DECISION]
            for each in self._ended
            if each.episode_ref is not None and each.episode_ref.host == name
        ]
        return [first for first in firsts if first > ready_s]

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_WITHIN_S):
            while not holds():  # noqa: ASYNC110 - metrics have no event
                await asyncio.sleep(0.01)


def _num_lost(scheduler: EpisodeScheduler) -> int:
    return int(scheduler.metrics().get("rollout/lost/died", 0.0))


async def measure(folder: Path, hosts: list[NamespaceRunner], rounds: int) -> dict[str, object]:
    """Strike one of two hosts in both ways, and let it come back, round after round."""
    stays, victim = hosts
    config = config_for(write_list(folder, [stays, victim]), num_envs=SLOTS, scheduler=_ONE_GROUP)
    noticed: list[float] = []
    killed: list[float] = []
    pulled: list[float] = []
    joined: list[float] = []
    plugged: list[float] = []

    def start() -> float:
        victim.begin()
        victim.until_ready()
        return victim.ready_at_s

    def plug_in() -> float:
        began = time.monotonic()
        victim.namespace.plug_in_cable()
        return began

    async with rollout_over(config, sleeping_policy(), answer_within_s=_ANSWER_WITHIN_S) as rollout:
        watched = Watched(rollout, victim)
        for number in range(1, rounds + 1):
            for strike, found in ((victim.kill, killed), (victim.namespace.pull_cable, pulled)):
                seen_s, replayed_s = await watched.loss(strike)
                noticed.append(seen_s)
                found.append(replayed_s)
                if found is killed:
                    joined.append(await watched.return_(start))
                else:
                    plugged.append(await watched.return_(plug_in))
            print(
                f"round {number}/{rounds}: killed {killed[-1]:.2f}, joined {joined[-1]:.2f}, "
                f"pulled {pulled[-1]:.2f}, plugged in {plugged[-1]:.2f} s",
                flush=True,
            )
    by_kill, by_cable = statistics.median(killed), statistics.median(pulled)
    return {
        "join_to_playing_s": statistics.median(joined),
        "loss_to_replay_s": max(by_kill, by_cable),
        "killed_to_replay_s": by_kill,
        "pulled_to_replay_s": by_cable,
        "noticed_s": [round(seconds, 2) for seconds in noticed],
        "plugged_to_playing_s": statistics.median(plugged),
        "machine_load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        with (
            network_namespaces(3) as (control, *others),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as folder,
            start_hosts(others, Path(folder), LOST_AFTER_S) as hosts,
            control.entered(),
        ):
            figures = uvloop.run(measure(Path(folder), hosts, options.rounds))
    except NamespacesRefused as reason:
        figures = {"join_to_playing_s": None, "loss_to_replay_s": None, "reason": str(reason)}
    print_table("hosts that come and go", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
