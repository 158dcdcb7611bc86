"""Hosts with environments: in this loop with an episode store, or servers of their own that can be killed."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.actors import make_keys, read_keys
from vla_rl.actors.host import HostServer
from vla_rl.errors import ActorDied
from vla_rl.remote_rollout.episode_store import EpisodeStore, materialise
from vla_rl.remote_rollout.host_pace import ANY_KIND
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.rollout import (
    EpisodeLost,
    EpisodeScheduler,
    LocalEpisodeRunner,
    SchedulerConfig,
    embodied_agent,
)
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import EpisodeSpec, Group, ImageCacheRef, Trajectory


class RemoteHostRunner:
    """A host with a pool of its own, which can be cut off, and whose episode store may outlive it.

    Args:
        mean_s: how long decisions take.
        episode store: its arrays; None for an episode store without room.
        kept: keys of the arrays that it was taken over with; none for a new host.
    """

    def __init__(
        self,
        engine: CountingEngine,
        num_slots: int = 2,
        mean_s: float = 0.01,
        store: EpisodeStore | None = None,
        kept: tuple[int, ...] = (),
    ) -> None:
        self.store = store if store is not None else EpisodeStore("far", 0)
        self._kept = self.store.keep_only(kept)
        self.pool = LatencyPool(num_slots, seed=num_slots, mean_s=mean_s)
        self._runner = LocalEpisodeRunner(self.pool, engine, embodied_agent)
        self._cut = asyncio.Event()
        self.num_run = self.num_dropped = 0
        self.has_run, self.is_asked_for_arrays = asyncio.Event(), asyncio.Event()
        self.is_slow_to_send = False

    @property
    def num_slots(self) -> int:
        return self._runner.num_slots

    @property
    def weight_version(self) -> int:
        return self._runner.weight_version

    @property
    def pending_version(self) -> int:
        return self._runner.weight_version

    def cut(self) -> None:
        self._cut.set()

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        running = asyncio.ensure_future(self._runner.run_episode(episode, timeout_s=timeout_s))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((running, cut), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ActorDied("far", 0, "host unreachable for 1.2 s")
            self.num_run += 1
            self.has_run.set()
            return self.store.put_arrays(running.result())
        finally:
            for task in (running, cut):
                task.cancel()
            await asyncio.wait((running, cut))

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        return trajectory.episode_ref is None or trajectory.episode_ref.key in self._kept

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        if self._cut.is_set():
            raise ActorDied("far", 0, "host unreachable for 1.2 s")
        assert trajectory.episode_ref is not None
        self.is_asked_for_arrays.set()
        if self.is_slow_to_send:
            await asyncio.Event().wait()
        arrays = self.store.take_arrays(trajectory.episode_ref.key)
        if arrays is None:
            raise EpisodeLost(trajectory.episode, "died", "far was started again since")
        return materialise(trajectory, arrays)

    def drop_arrays(self, trajectory: Trajectory) -> None:
        assert trajectory.episode_ref is not None
        self.store.drop_episode(trajectory.episode_ref.key)
        self.num_dropped += 1

    def decisions(self, now: float) -> DecisionCounts:
        return self._runner.decisions(now)

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        pass


class Cluster:
    """A scheduler of 4 groups of 4 per update over hosts that share an engine."""

    def __init__(
        self,
        keep: Callable[[Group], bool] | None = None,
        drop_images: Callable[[ImageCacheRef], None] | None = None,
        kind_of: Callable[[EpisodeSpec], str] = lambda episode: ANY_KIND,
        **settings: object,
    ) -> None:
        self.engine = CountingEngine()
        self.runner = HostEpisodeRunner(0, drop_images, kind_of)
        config = SchedulerConfig(**{"groups_per_update": 4, "max_staleness": 1, **settings})
        self.scheduler = EpisodeScheduler(self.runner, source(), config, keep=keep)

    async def update(self) -> list[Group]:
        version = self.scheduler.version
        groups = [group async for group in self.scheduler.groups_for_update(version)]
        self.engine.weight_version = version + 1
        self.runner.mark_published(version + 1)
        self.scheduler.mark_trained(groups, version + 1)
        return groups


@asynccontextmanager
async def loopback_hosts(folder: Path, number: int = 1) -> AsyncIterator[Path]:
    """Serve `far1`, `far2`, ... at ports of this machine; yield the list of hosts."""
    make_keys(folder / "keys")
    keys, client = (read_keys(folder / f"keys/{name}.key") for name in ("server", "client"))
    lines = ['client_key = "keys/client.key"\n']
    async with AsyncExitStack() as stack:
        for k in range(1, number + 1):
            opened = HostServer("tcp://127.0.0.1:0", keys, [client.public], lost_after_s=20.0)
            server = await stack.enter_async_context(opened)
            # a busy machine may hold up any thread for seconds; a closed connection is seen at once
            lines.append(
                f'[[host]]\nname = "far{k}"\naddress = "{server.address}"\n'
                'public_key = "keys/server.pub"\nlost_after_s = 20.0\n'
            )
        path = folder / "hosts.toml"
        path.write_text("".join(lines))
        yield path


class ServedHost:
    """`vla-rl host` at an address, `host:port`; `popen` starts it there."""

    def __init__(
        self,
        name: str,
        address: str,
        keys: Path,
        popen: Callable[..., "subprocess.Popen[Any]"] = subprocess.Popen,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._address, self._keys, self._popen = name, address, keys, popen
        self._env = env
        self.table = ""

    def start(self) -> None:
        """Start it, and keep the lines that it prints for the list of hosts."""
        command = [sys.executable, "-m", "vla_rl.cli.host", "--keys", str(self._keys)]
        bind = ["--bind", f"tcp://{self._address}", "--lost-after", "30"]
        self.server = self._popen(
            [*command, *bind], stdout=subprocess.PIPE, text=True, env=self._env
        )
        assert self.server.stdout is not None
        lines: list[str] = []
        for line in self.server.stdout:
            if line.startswith("serving"):
                break
            lines.append(line)
        first = lines.index("[[host]]\n")
        # a busy machine may hold up any thread for seconds; a closed connection is seen at once
        self.table = "".join(lines[first:]) + "lost_after_s = 20.0\n"
        self.table = self.table.replace(self._address.partition(":")[0], self.name, 1)

    def kill(self) -> None:
        """Kill it, as if the machine had lost its power."""
        self.server.kill()
        self.server.communicate()


def on_loopback(name: str, keys: Path, env: Mapping[str, str] | None = None) -> ServedHost:
    """A host at a free port of this machine, not started; `env` is its environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return ServedHost(name, f"127.0.0.1:{probe.getsockname()[1]}", keys, env=env)


def start_and_list(hosts: Sequence[ServedHost], folder: Path) -> Path:
    """Start these hosts, and write their list."""
    for host in hosts:
        host.start()
    path = folder / "hosts.toml"
    tables = "".join(host.table for host in hosts)
    path.write_text(f'client_key = "{folder}/keys/client.key"\n{tables}')
    return path
