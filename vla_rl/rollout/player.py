"""Players: what runs an episode, here or on other hosts.

    EpisodeScheduler ──► EpisodePlayer.play(episode) ──► Trajectory
                            LocalPlayer   a pool, an engine and an agent of this process
                            HostPlayers   players on other hosts (`vla_rl.rollout.host_players`)

The scheduler knows nothing else of where episodes run.
"""

from collections.abc import Callable
from typing import Protocol

from vla_rl.rollout.playing import play_episode
from vla_rl.rollout.policies import AnyEngine, DecisionCounts, DecisionGauge, EngineTeam
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Trajectory


class EpisodePlayer(Protocol):
    """Runs episodes, several at the same time."""

    @property
    def num_slots(self) -> int:
        """Number of episodes that can run at the same time now."""
        ...

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that decide from now on."""
        ...

    @property
    def coming_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        ...

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        """Run `episode` once. Raises: as `play_episode`."""
        ...

    def holds(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory of an earlier process can be made whole here."""
        ...

    async def whole(self, trajectory: Trajectory) -> Trajectory:
        """Return a light trajectory of this player with all its arrays, or what stands for them.

        Call it once. Raises: EpisodeLost if they are gone with their host.
        """
        ...

    def drop(self, trajectory: Trajectory) -> None:
        """Let the arrays of a trajectory be dropped where they are, if they are not here."""
        ...

    def decisions(self, now: float) -> DecisionCounts:
        """Return counts of the policy's decisions, up to `now` of the loop's clock."""
        ...

    def when_more_may_begin(self, call: Callable[[], None]) -> None:
        """Call `call` in this loop each time that `num_slots` or `weight_version` has grown.

        It need not be called for a `weight_version` that was never behind `coming_version`.
        """
        ...


class LocalPlayer:
    """Runs episodes in this process: one in each environment of a pool.

    Args:
        pool: environments; the caller opens and closes it.
        engine: the policy.
        agent: runs one episode.
    """

    def __init__(self, pool: EnvPool, engine: AnyEngine, agent: Agent) -> None:
        self._pool, self._engine, self._agent = pool, EngineTeam.of(engine), agent
        self._gauge = DecisionGauge()

    @property
    def num_slots(self) -> int:
        """Number of environments."""
        return self._pool.num_envs

    @property
    def weight_version(self) -> int:
        """Weight version of the engine that is furthest behind."""
        return self._engine.weight_version

    @property
    def coming_version(self) -> int:
        """The same, once weights have arrived at engines in other processes."""
        return self._engine.coming_version

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        """Run `episode` once. Raises: as `play_episode`."""
        return await play_episode(
            self._pool,
            self._engine,
            self._agent,
            episode,
            timeout_s=timeout_s,
            gauge=self._gauge,
            is_trained_on=True,
        )

    def holds(self, trajectory: Trajectory) -> bool:
        """Return whether all of it is here."""
        return trajectory.deposit is None

    async def whole(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory: all of it is here."""
        return trajectory

    def drop(self, trajectory: Trajectory) -> None:
        """Do nothing: all of it is here."""

    def decisions(self, now: float) -> DecisionCounts:
        """Return counts of the decisions of all episodes."""
        return self._gauge.counts(now)

    def when_more_may_begin(self, call: Callable[[], None]) -> None:
        """Call `call` each time that engines which were behind have new weights."""
        self._engine.when_served(call)
