"""The hosts that run a run's episodes: brought up, dropped when they are gone, and brought up again.

Hosts.changes ─► Joined: restarter  bring up ─► policies, simulators, newest weights ─► run episodes
                 Left: its end           ▲                                                      │
                                         └──── the process there died, the host did not ◄───────┘
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from msgspec.structs import replace

from vla_rl.actors import RemoteHost, Runtime
from vla_rl.algorithms import EmbeddingConfig, TrajectoryEncoder
from vla_rl.cluster import Host, Hosts, Joined, Needs
from vla_rl.cluster.host_file import LOCAL_HOST
from vla_rl.cluster.run_layout import RunShape, assign_engines, require_memory_to_act
from vla_rl.engines import DeviceLane
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.host_control import (
    HostRestarter,
    HostStarter,
    RolloutHostRunner,
    StartedHost,
    leave_alone,
)
from vla_rl.remote_rollout.host_pace import ANY_KIND
from vla_rl.remote_rollout.host_recipe import (
    EnvironmentShare,
    HostRecipe,
    HostStatus,
    environment_kind,
    fixed_digest,
    run_key,
    run_shape,
    save_encoder,
)
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.remote_rollout.weight_publication import HostWeights
from vla_rl.remote_rollout.weight_sources import WeightHost
from vla_rl.rollout import EpisodeRunner
from vla_rl.team.members import Team
from vla_rl.types import EpisodeRef
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.stalls import note_progress, waiting
from vla_rl.util.tasks import gather_all, leave_group

logger = logging.getLogger(__name__)

FILES_PREFIX: Final = "vla_rl-hosts-"
"""Beginning of the name of the folder with the policy's files for the hosts."""


class HostFleet:
    """Runs the episodes of a run on other hosts while its `async with` block is open.

    Args:
        hosts: who is there.
        config: settings of the run.
        recipe: what a host needs.
        team: the policies; their files are saved when the block is entered.
        lane: computes with the policies.
        local_runner: runner of this host, if it runs episodes too.
        weight_version: number of updates applied to the policies' weights.
        episode_refs: returns the references to the arrays that the run still needs.
    """

    def __init__(
        self,
        hosts: Hosts,
        config: LearningConfig,
        recipe: HostRecipe,
        team: Team,
        lane: DeviceLane,
        *,
        local_runner: EpisodeRunner | None,
        weight_version: int,
        episode_refs: Callable[[], Iterable[EpisodeRef]] = tuple,
    ) -> None:
        self._hosts, self._config, self._recipe = hosts, config, recipe
        self._team, self._lane, self._local_runner = team, lane, local_runner
        self._episode_refs, self._owner = episode_refs, ""
        self._shape = run_shape(config, team)
        self._encoder: TrajectoryEncoder | None = None
        self._engines = EngineSplit(self._shape, team)
        self.images = ImageRoutes(0)
        """The ways of images past this process. Set others before `async with`."""

        self.image_route = ""
        """The way that images go, in words; empty if one process learns."""

        kind_of = environment_kind if self._shape.kinds else lambda episode: ANY_KIND
        self.runner = HostEpisodeRunner(
            weight_version, lambda cached_images: self.images.drop_images(cached_images), kind_of
        )
        """Runs episodes on the hosts that are there."""

        self.evaluators = HostEpisodeRunner(weight_version, kind_of=kind_of)
        """Runs held-out episodes on the same hosts."""

        self.weights = HostWeights(
            team.agent_names,
            weight_version,
            self._drop,
            self.runner.announce_version,
            self._published,
        )
        """Gets the learners' weights."""

        self._runtime = Runtime("rollout hosts")
        self._tasks = asyncio.TaskGroup()
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._came_or_went = asyncio.Event()
        self._opened_at = time.monotonic()

    def belong_to(self, run: Path) -> None:
        """Let a resume of the run in this folder take over the hosts. Call it before `async with`."""
        if self._config.cluster.resume_within_s > 0:
            self._owner = run_key(run)

    def embed_with(self, config: EmbeddingConfig, encoder: TrajectoryEncoder) -> None:
        """Let hosts embed the episodes that are fetched. Call it before `async with`."""
        self._encoder = encoder
        self._recipe = replace(self._recipe, embedding=config)

    @property
    def embeds(self) -> bool:
        """Whether the hosts embed the episodes that are fetched."""
        return self._encoder is not None

    async def __aenter__(self) -> Self:
        """Bring up all hosts that are there.

        Raises: ConfigError if a host cannot be used, or if they have more simulators than the run
        can use; what the policy or an environment raises there.
        """
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(remove_abandoned_folders, FILES_PREFIX)
            self._folder = await asyncio.to_thread(OwnedFolder, FILES_PREFIX)
            stack.push_async_callback(asyncio.to_thread, self._folder.remove_folder)
            # Saved once: a host that joins later gets these files too, and the newest weights over them.
            for name, member in self._team.members.items():
                policy: Any = member.model  # its recipe has been made, so it can be saved
                await self._lane.run(policy.save, self._policies / name)
            if self._encoder is not None:
                await self._lane.run(save_encoder, self._encoder, self._policies)
            await stack.enter_async_context(self._hosts)
            await stack.enter_async_context(self._runtime)
            await stack.enter_async_context(self.images)
            await self._bring_up_all()
            self._resources = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End everything on the hosts."""
        self.weights.close()
        for task in (*self._watching, *self._restarting.values()):
            task.cancel()
        try:
            await leave_group(self._tasks, kind, error, traceback)
        except BaseException as raised:
            # the block was cancelled by it: the others must not take that for a cancellation
            await self._resources.__aexit__(type(raised), raised, raised.__traceback__)
            raise
        await self._resources.__aexit__(kind, error, traceback)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of hosts and of the weights' way to them."""
        return {**self.runner.metrics(), **self.weights.metrics()}

    @property
    def busy_share(self) -> float:
        """Share of the time since all hosts were up in which a policy was asked, over the hosts."""
        return self.runner.asked_s / max(time.monotonic() - self._opened_at, 1e-9)

    @property
    def _policies(self) -> Path:
        return self._folder.path / "policies"

    async def _bring_up_all(self) -> None:
        others = [
            each
            for host in self._hosts.hosts()
            if host.placement
            for each in self._engines.split(host)
        ]
        self._starter = HostStarter(
            self._runtime,
            self._config,
            await self._newest_recipe(),
            self._engines.shares,
            self._policies,
            self._owner,
            self._episode_refs,
            lambda: self.weights.has_newest,
        )
        if self._local_runner is not None:
            self.runner.add_host(LOCAL_HOST, self._local_runner, self._shape.kinds)
        restarters = [self._make_restarter(host) for host in others]
        await gather_all(restarter.begin() for restarter in restarters)
        # Only now is it known how many environments there are: hosts say so when they are up.
        group_size = self._config.episodes_per_group
        self._config.scheduler.require_feasible(
            num_envs=self.runner.num_slots, group_size=group_size
        )
        self._opened_at = time.monotonic()
        await self._tasks.__aenter__()
        self.weights.open(lambda work, name: self._tasks.create_task(work, name=name))
        for restarter in restarters:
            self._run_restarter(restarter)
        self._watching = [
            self._tasks.create_task(self._follow(), name="follow the hosts"),
            self._tasks.create_task(self._require_hosts(), name="require a host"),
            self._tasks.create_task(self.images.stay(), name="hold images"),
        ]

    async def _newest_recipe(self) -> HostRecipe:
        """Return the recipe with the version and the digests of the policies as they are now."""
        members = dict(self._recipe.members)
        for name, member in self._team.members.items() if self._owner else ():
            fixed = await self._lane.run(fixed_digest, member.model)
            members[name] = replace(members[name], fixed=fixed)
        version = self.runner.weight_version
        return replace(self._recipe, members=members, weight_version=version)

    async def _follow(self) -> None:
        """Bring up hosts as they join, and drop those that leave."""
        async for change in self._hosts.changes():
            name = change.host.name
            if isinstance(change, Joined):
                print(f"host {name} joined", flush=True)
                try:
                    engine_hosts = self._engines.split(change.host)
                except ConfigError as error:
                    # One that is too small for the policy ends no run that others carry on.
                    leave_alone(change.host, error)
                    continue
                for each in engine_hosts:
                    self._run_restarter(self._make_restarter(each))
            else:
                print(f"host {name} left: {change.cause}", flush=True)
                tasks = [
                    self._restarting.pop(each)
                    for each in list(self._restarting)
                    if _is_on(each, name)
                ]
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)

    def _make_restarter(self, host: Host) -> HostRestarter:
        return HostRestarter(host, self._bring_up, self._gone, self._runtime.kill)

    def _run_restarter(self, restarter: HostRestarter) -> None:
        name = restarter.host.name
        task = self._tasks.create_task(restarter.supervise(), name=f"keep host {name} running")
        self._restarting[name] = task

    async def _bring_up(self, host: Host) -> RolloutHost:
        """Let the actor on a host run episodes. Raises: ActorDied, TimeoutError."""
        with waiting("the run", on=f"host {host.name!r} to start"):
            started: StartedHost | None = None
            try:
                started = await self._starter.start_host(host)
                await self._join(host, started)
            except BaseException as error:
                error.add_note(f"while host {host.name!r} was brought up")
                self._gone(host.name)
                if started is not None:
                    await self._runtime.kill(started.actor)
                raise
        return started.actor

    async def _join(self, host: Host, started: StartedHost) -> None:
        """Let a host that was started run episodes, with the newest weights."""
        name, actor, status = host.name, started.actor, started.status
        assert isinstance(host.placement, RemoteHost)
        address = host.placement.address.removeprefix("tcp://").rpartition(":")[0]
        weight_host = WeightHost(actor, address)
        route = await self.images.connect_host(name, actor)

        # Called once it has the newest weights: its first episode would act with those of the files.
        def admit(ready: HostStatus) -> None:
            slots = self._engines.kinds[name]
            self.runner.add_host(name, RolloutHostRunner(actor, ready, route=route), slots)
            self.evaluators.add_host(name, RolloutHostRunner(actor, ready, evaluates=True), slots)

        await self.weights.join(name, weight_host, status, is_new=started.is_new, admit=admit)
        if not started.is_new:
            print(
                f"host {name} was taken over: {status.num_slots} environments, its engine and "
                f"{len(status.kept)} finished episodes",
                flush=True,
            )
        note_progress("hosts")
        self._came_or_went.set()

    def _published(self, version: int) -> None:
        self.runner.mark_published(version)
        self.evaluators.mark_published(version)

    def _drop(self, name: str, death: ActorDied) -> None:
        logger.warning("host %s did not take the newest weights: %s", name, death)
        self._gone(name)

    def _gone(self, name: str) -> None:
        """Run no episode there any more; those that run there end with the actor."""
        # Weights first: hosts that take a version from there wait for it until they hear of its end.
        self.weights.leave(name)
        self.images.leave(name)
        self.runner.remove_host(name)
        self.evaluators.remove_host(name)
        self._came_or_went.set()

    # waits for: a host that runs episodes   woken by: `_join` and `_gone`, through `_came_or_went`; the
    #                                        clock, after `cluster.alone_s` without any host
    async def _require_hosts(self) -> None:
        """Raise ConfigError if no host runs episodes for too long."""
        limit_s = self._config.cluster.alone_s
        while True:
            self._came_or_went.clear()
            if self.runner.hosts:
                await self._came_or_went.wait()
                continue
            logger.warning("no host is left to run episodes; waiting %g s for one", limit_s)
            try:
                async with asyncio.timeout(limit_s):
                    while not self.runner.hosts:
                        self._came_or_went.clear()
                        await self._came_or_went.wait()
            except TimeoutError:
                raise ConfigError(
                    f"no host has run episodes for cluster.alone_s={limit_s:g} s; start one with "
                    "`vla-rl host`, and continue with --resume"
                ) from None


class EngineSplit:
    """Splits hosts into their engines, and knows the environments of each.

    Args:
        shape: settings of the run.
        team: the policies that every engine holds.
    """

    def __init__(self, shape: RunShape, team: Team) -> None:
        self._shape, self._team = shape, team
        self.kinds: dict[str, dict[str, int]] = {}
        """Environments of each kind, by the name of the engine's host."""

        self.shares: dict[str, EnvironmentShare] = {}
        """The same for engines that share a host."""

    def split(self, host: Host) -> list[Host]:
        """Return a host once for each engine that it gets.

        Raises: ConfigError with the inequality, if a GPU is smaller than the policies' weights or an
            engine would have no environment.
        """
        weights, _ = self._team.memory_bytes
        require_memory_to_act(host, self._shape, Needs(acting_bytes=weights))
        engines = assign_engines(host, self._shape)
        for each in engines:
            name = each.host.name
            self.kinds[name] = each.kinds
            if len(engines) > 1:
                self.shares[name] = EnvironmentShare(num_envs=each.num_envs, kinds=each.kinds)
        return [each.host for each in engines]


def _is_on(engine_host: str, host: str) -> bool:
    return engine_host.partition(":")[0] == host
