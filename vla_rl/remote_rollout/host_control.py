"""One rollout host, as the control process sees it: started, kept running, given episodes.

spawn ─► new: the policies' files ─► open ─┐
   └───► one that waits for this run ──────┴─► newest weights ─► episodes ─► its process dies ─► spawn
                                                 └ too often, or it cannot run them: left alone until it joins again
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from vla_rl.actors import RemoteHost, RestartPolicy, Runtime, Takeover
from vla_rl.actors.placement import Intensity
from vla_rl.cluster import Host
from vla_rl.errors import ActorDied, CheckpointError, ConfigError, EnvError, RemoteError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.episode_store import lacks_observed, materialise
from vla_rl.remote_rollout.host_recipe import EnvironmentShare, HostRecipe, HostStatus, read_pieces
from vla_rl.remote_rollout.image_routes import ImageRoute
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.rollout import DecisionCounts, EpisodeLost, copy_arrays
from vla_rl.types import EpisodeRef, EpisodeSpec, Trajectory

START_WITHIN_S: Final = 300.0
"""Longest start of the process on a host, which imports torch and the policies' code."""

OPEN_WITHIN_S: Final = 1800.0
"""Longest start of a host: reading the policies, and building all simulators."""

WEIGHTS_WITHIN_S: Final = 300.0
"""Longest time for one message of weights, and for their digest."""

DEADLINES_S: Final = {
    "open": OPEN_WITHIN_S,
    **dict.fromkeys(
        (
            "put_file",
            "begin_weights",
            "put_weights",
            "share_rows",
            "num_received",
            "check_weights",
            "share_weights",
            "open_weights",
            "apply_weights",
            "renew_weights",
            "take_arrays",
        ),
        WEIGHTS_WITHIN_S,
    ),
}
"""Episodes have none of their own: simulators have theirs, and a lost host ends its calls. Weights
that are taken from a peer end with its life and by its silence."""


@dataclass(frozen=True)
class StartedHost:
    """An actor that is ready for the newest weights."""

    actor: RolloutHost
    status: HostStatus
    is_new: bool
    """False if it was taken over, with its simulators, its weights and some arrays."""


class HostStarter:
    """Starts the actors on the hosts of a run.

    Args:
        runtime: owns them.
        config: settings of the run.
        recipe: what a host needs.
        shares: environments of the hosts that have several engines, by the name of a seat.
        policies: folder with the policies' files, in one folder for each.
        owner: name by which hosts know the run; empty if nothing is taken over.
        episode_refs: returns the references to the arrays that the run still needs.
        has_weights: whether a host that has other weights can be given the newest ones.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: LearningConfig,
        recipe: HostRecipe,
        shares: Mapping[str, EnvironmentShare],
        policies: Path,
        owner: str,
        episode_refs: Callable[[], Iterable[EpisodeRef]],
        has_weights: Callable[[], bool],
    ) -> None:
        self._runtime, self._config, self._recipe = runtime, config, recipe
        self._shares, self._policies, self._owner = shares, policies, owner
        self._episode_refs, self._has_weights = episode_refs, has_weights

    async def start_host(self, host: Host) -> StartedHost:
        """Start the actor on a host. Raises: ActorDied, TimeoutError; what `open` raises."""
        actor = await self._spawned(host)
        try:
            recipe = await actor.found()
            if recipe is not None and (reason := self.misfit(host.name, recipe)):
                print(f"host {host.name} starts anew: {reason}", flush=True)
                await self._runtime.kill(actor)
                actor, recipe = await self._spawned(host), None
            if recipe is None:
                return StartedHost(actor, await self._opened(host.name, actor), is_new=True)
            needed = [each.key for each in self._episode_refs() if each.host == host.name]
            return StartedHost(actor, await actor.resume(needed), is_new=False)
        except BaseException:
            await self._runtime.kill(actor)
            raise

    def misfit(self, name: str, recipe: str) -> str:
        """Return why a process that waited for this run cannot go on; empty if it can.

        Args:
            name: of the host.
            recipe: digest of the recipe by which it runs episodes; empty if it runs none.
        """
        if not recipe:
            return "its process was lost before it was ready, or has failed since"
        if recipe != self._recipe_for(name).recipe_digest:
            return "its process has other settings, or a policy with other frozen weights"
        if not self._has_weights():
            return "no weights have been saved or published yet that its process could get"
        return ""

    async def _spawned(self, host: Host) -> RolloutHost:
        """Start the actor on a host, or take over the one that waits there for this run."""
        assert isinstance(host.placement, RemoteHost)
        within_s = self._config.cluster.resume_within_s
        return await self._runtime.spawn(
            RolloutHost,
            host.name,
            int(self._config.cluster.episode_store_gib * 2**30),
            name=f"rollout on {host.name}",
            placement=replace(
                host.placement,
                env={**host.placement.env, "OMP_NUM_THREADS": str(self._config.run.torch_threads)},
                takeover=Takeover(owner=self._owner, name=host.name, within_s=within_s)
                if self._owner
                else None,
            ),
            deadlines_s=DEADLINES_S,
            # every running episode is a call without an answer; the rest: weights and arrays
            mailbox=2 * self._config.num_envs + 16,
            start_timeout_s=START_WITHIN_S,
        )

    async def _opened(self, name: str, actor: RolloutHost) -> HostStatus:
        pieces = read_pieces(self._policies)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await actor.put_file(*piece)
        return await actor.open(self._recipe_for(name))

    def _recipe_for(self, name: str) -> HostRecipe:
        return replace(self._recipe, share=self._shares.get(name))


logger = logging.getLogger(__name__)

RESTARTS: Final = RestartPolicy(max_restarts=3, within_s=120.0)
"""Deaths of the process on a host that stays, after which it is left alone until it rejoins."""


class HostRestarter:
    """Keeps one host.

    Args:
        host: the host.
        bring_up: lets the actor on it run episodes, and returns that actor.
        gone: called with its name once it runs no episode any more.
        kill: ends the actor.
    """

    def __init__(
        self,
        host: Host,
        bring_up: Callable[[Host], Awaitable[RolloutHost]],
        gone: Callable[[str], None],
        kill: Callable[[RolloutHost], Awaitable[None]],
    ) -> None:
        self.host = host
        self._bring_up, self._gone, self._kill = bring_up, gone, kill
        self._actor: RolloutHost | None = None

    async def begin(self) -> None:
        """Bring it up at the start of the run.

        If its process or the connection dies, `supervise` tries again. Raises: any other error.
        """
        try:
            self._actor = await self._bring_up(self.host)
        except (ActorDied, TimeoutError) as death:
            logger.warning("host %s is tried again: %s", self.host.name, death)

    async def supervise(self) -> None:
        """Keep it running episodes until cancelled, because it left, or until it fails too often."""
        deaths = Intensity(RESTARTS)
        # waits for                                   woken by
        # its actor to be up, with newest weights     the actor, or TimeoutError
        # its death (`stay` has no other end)         ActorDied, once its host or the connection is lost
        try:
            while True:
                try:
                    self._actor = self._actor or await self._bring_up_late()
                    if self._actor is None:
                        return
                    await self._actor.stay()
                except (ActorDied, TimeoutError) as death:
                    self._gone(self.host.name)
                    if not deaths.admit_restart(time.monotonic()):
                        leave_alone(self.host, death)
                        return
                    self._actor = None
        finally:
            self._gone(self.host.name)
            if self._actor is not None:
                await self._kill(self._actor)

    async def _bring_up_late(self) -> RolloutHost | None:
        """Bring it up during the run; return None if it cannot run the episodes.

        Those that were there at the start could, so the run goes on without it.
        """
        try:
            return await self._bring_up(self.host)
        except TimeoutError:  # an OSError too, but one that may pass
            raise
        except (ConfigError, EnvError, CheckpointError, RemoteError, OSError) as error:
            leave_alone(self.host, error)
            return None


def leave_alone(host: Host, error: Exception) -> None:
    """Say that a host runs no episodes until it joins again, and why."""
    logger.warning(
        "host %s is left alone until it joins again; its last failure: %s", host.name, error
    )


class RolloutHostRunner:
    """Runs episodes on another host, whose large arrays stay there, as far as there is room.

    Args:
        host: the actor there, open.
        status: what it offers.
        evaluates: run episodes as evaluations do, with clipped actions, and not by the run's agent.
        route: the way of its images past this process; None if they come here.
    """

    def __init__(
        self,
        host: RolloutHost,
        status: HostStatus,
        *,
        evaluates: bool = False,
        route: ImageRoute | None = None,
    ) -> None:
        self._host, self._status, self._evaluates, self._route = host, status, evaluates, route
        self._counts = DecisionCounts(0, 0, 0.0)
        self._dropped: list[int] = []

    @property
    def num_slots(self) -> int:
        """Number of environments there."""
        return self._status.num_slots

    @property
    def weight_version(self) -> int:
        """Version of the weights when it joined; it serves all later ones too."""
        return self._status.weight_version

    @property
    def pending_version(self) -> int:
        """The same: it joins with the newest version."""
        return self._status.weight_version

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        """Run `episode` there. Raises: ActorDied if the host is gone; else as `run_episode`."""
        dropped, self._dropped = self._dropped, []
        finished = await self._host.run_episode_once(episode, timeout_s, dropped, self._evaluates)
        self._counts = finished.counts
        if finished.loss is not None:
            raise EpisodeLost(episode, finished.loss.kind, finished.loss.what)
        assert finished.trajectory is not None, "an episode that is not lost has a trajectory"
        return _copy_arrays(finished.trajectory, episode)

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        """Return whether its arrays were there when the host was taken over."""
        episode_ref = trajectory.episode_ref
        return episode_ref is None or episode_ref.key in self._status.kept

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        """Return a metadata-only trajectory with all its arrays, or with places in an image cache for its images.

        Raises: ActorDied; EpisodeLost; RankFailed if the image cache is gone.
        """
        episode_ref = trajectory.episode_ref
        if episode_ref is None:
            return trajectory
        route = self._route if lacks_observed(trajectory) else None
        # the images first: what is taken from the host is no longer there
        found = None if route is None else await route.fetch(episode_ref)
        arrays = None
        try:
            arrays = await self._host.take_arrays(episode_ref.key, found is not None)
        finally:
            if arrays is None and route is not None and found is not None:
                route.drop_images(found[0])
        if arrays is None:
            what = f"host {episode_ref.host!r} was started again since, and lacks its arrays"
            raise EpisodeLost(trajectory.episode, "died", what)
        if route is not None and found is None:
            route.note_local()
        cached_images, images = (None, {}) if found is None else found
        materialised = materialise(trajectory, {**copy_arrays(arrays), **images})
        return msgspec.structs.replace(materialised, cached_images=cached_images)

    def drop_arrays(self, trajectory: Trajectory) -> None:
        """Let the arrays be dropped there, with the next episode's message."""
        if trajectory.episode_ref is not None:
            self._dropped.append(trajectory.episode_ref.key)

    def decisions(self, now: float) -> DecisionCounts:
        """Return the counts as of the last episode that ended there."""
        return self._counts

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        """Do nothing: a host's environments are as many as ever."""


def _copy_arrays(trajectory: Trajectory, episode: EpisodeSpec) -> Trajectory:
    """Copy the arrays, which are read-only and lie in the message's frames."""
    steps = tuple(
        msgspec.structs.replace(
            step,
            **{
                name: copy_arrays(getattr(step, name))
                for name in ("observation", "rewards", "frames", "intervened", "expert_actions")
            },
            chunk=msgspec.structs.replace(
                step.chunk,
                **{
                    name: copy_arrays(getattr(step.chunk, name))
                    for name in ("actions", "tokens", "log_probs", "weight_versions", "drawn")
                },
            ),
        )
        for step in trajectory.steps
    )
    return msgspec.structs.replace(
        trajectory,
        episode=episode,
        steps=steps,
        final_observation=copy_arrays(trajectory.final_observation),
        info=copy_arrays(trajectory.info),
    )
