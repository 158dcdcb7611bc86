"""Hosts in simulated time that run episodes and learn, as a layout says who does what."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.hosts.measured import ACTED_PER_S, LEARNED_PER_S, num_decisions
from benchmarks.hosts.simulated_host import SimulatedHost
from vla_rl.cluster import Host, Layout
from vla_rl.types import ActionChunk, EpisodeSpec, Observation, Step, StopReason, Trajectory

_NOTHING: Observation = {}


class SimulatedHosts:
    """The hosts of a layout: runs an episode on the freest host, learns on the ranks.

    It is a pool of environments and the engine at once, because an episode is one event here.

    Args:
        layout: who does what.
        hosts: hosts of `layout`, with their cores.

    Attributes:
        weight_version: version that acts.
    """

    def __init__(self, layout: Layout, hosts: Sequence[Host]) -> None:
        self._slots = [layout.num_simulators_on(host.name) for host in hosts]
        self._hosts = [
            SimulatedHost(seed, host.resources.num_cores) for seed, host in enumerate(hosts)
        ]
        by_name = {host.name: simulated for host, simulated in zip(hosts, self._hosts, strict=True)}
        acting = {(device.host, gpu) for device in layout.engines for gpu in device.gpus}
        learning = [(device.host, device.gpu) for device in layout.ranks]
        gpus = {
            device: by_name[device[0]].add_gpu(acts=device in acting)
            for device in dict.fromkeys([*learning, *acting])
        }
        self._gpus = tuple(gpus.values())
        self._ranks = [gpus[device] for device in learning]
        self.num_envs = sum(self._slots)
        self._num_running = [0] * len(hosts)
        self._freest = [(0.0, number) for number, slots in enumerate(self._slots) if slots]
        self.weight_version = 0
        self._step_of_version: dict[int, Step] = {}

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[Any]:
        """Lease a slot on any host."""
        yield SimpleNamespace(episode=episode)

    async def run_episode(self, env: Any, policy: object) -> Trajectory:
        """Run the episode of `env` on the freest host."""
        episode: EpisodeSpec = env.episode
        length, step, host = num_decisions(episode.policy_seed), self._step(), self._take_freest()
        over = asyncio.Event()
        self._hosts[host].run_decisions(length, over.set)
        try:
            await over.wait()
        finally:
            self._count(host, -1)
        return Trajectory(
            episode=episode,
            steps=(step,) * length,
            final_observation=_NOTHING,
            stop_reason=StopReason.SUCCESS,
        )

    async def learn(self, passes: Sequence[Sequence[Tensor]]) -> None:
        """Compute the micro-batches of each rank; the slowest rank is waited for."""
        await asyncio.gather(
            *(
                rank.learn([len(rows) for rows in of_rank])
                for rank, of_rank in zip(self._ranks, passes, strict=True)
            )
        )

    def work_s(self) -> float:
        """Return the seconds that all GPUs together need for what they computed so far."""
        return sum(
            gpu.num_acted / ACTED_PER_S + gpu.num_learned / LEARNED_PER_S for gpu in self._gpus
        )

    def _take_freest(self) -> int:
        while True:
            load, host = heapq.heappop(self._freest)
            # a count that has changed since has an entry of its own
            if load == self._num_running[host] / self._slots[host]:
                self._count(host, 1)
                return host

    def _count(self, host: int, change: int) -> None:
        self._num_running[host] += change
        heapq.heappush(self._freest, (self._num_running[host] / self._slots[host], host))

    def _step(self) -> Step:
        """Return a decision of the version that acts: one object for all of them."""
        version = self.weight_version
        if version not in self._step_of_version:
            nothing = np.zeros(1, np.float32)
            self._step_of_version[version] = Step(
                observation=_NOTHING,
                chunk=ActionChunk(
                    actions=np.zeros((1, 1), np.float32),
                    tokens=np.zeros(1, np.int64),
                    log_probs=nothing,
                    weight_version=version,
                ),
                rewards=nothing,
            )
        return self._step_of_version[version]
