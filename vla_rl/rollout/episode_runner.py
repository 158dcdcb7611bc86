"""Episode runners: who runs an episode, here or on other hosts.

    EpisodeScheduler ──► EpisodeRunner.run_episode(episode) ──► Trajectory
                            LocalEpisodeRunner   a pool, an engine and an agent of this process
                            HostEpisodeRunner    runners on other hosts (`vla_rl.remote_rollout.host_runner`)

The scheduler knows nothing else of where episodes run. `run_episode` is one attempt at one episode in this
process: it leases an environment, runs the agent, and tells losses, which are repeated, from errors.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from vla_rl.errors import ActorDied, ActorFrozen, AgentError, VlaRlError
from vla_rl.rollout.agents import check_decisions, check_trajectory, describe_value
from vla_rl.rollout.episode_tasks import run_agent
from vla_rl.rollout.policies import AnyEngine, DecisionCounter, DecisionCounts, EngineTeam
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Trajectory
from vla_rl.util.tasks import is_being_cancelled


class EpisodeLost(VlaRlError):
    """An episode was lost to a fault outside of it: run the same one again in another environment.

    Args:
        episode: the episode that was running.
        kind: `"died"`, `"frozen"` or `"timed_out"`; losses are counted under it.
        what: what happened, in words.
        with_host: whether all episodes of a host were lost with it.
    """

    def __init__(
        self, episode: EpisodeSpec, kind: str, what: str, *, with_host: bool = False
    ) -> None:
        self.episode, self.kind, self.what, self.with_host = episode, kind, what, with_host
        super().__init__(f"{describe_episode(episode)} was lost: {what}")


def describe_episode(episode: EpisodeSpec) -> str:
    """Describe an episode in words, with all that is needed to run it alone."""
    return (
        f"episode {episode.episode_id} ({episode.task}, member {episode.member} of group "
        f"{episode.group_id}, seed {episode.seed}, options {episode.options}, attempt "
        f"{episode.attempt + 1})"
    )


async def run_episode(
    pool: EnvPool,
    engine: AnyEngine,
    agent: Agent,
    episode: EpisodeSpec,
    *,
    timeout_s: float | None = None,
    counter: DecisionCounter | None = None,
    is_trained_on: bool = False,
) -> Trajectory:
    """Run `episode` once. If it `is_trained_on`, its decisions are checked too.

    Raises: EpisodeLost if a process died or froze, or the episode took longer than `timeout_s` from
    its lease on; RuntimeError if what the agent awaited was cancelled by another part; AgentError
    if the agent is not async, or returned anything but the trajectory of this episode, with at
    least one step; all other errors of the agent or the environment, with a note that names the
    episode.
    """
    team = EngineTeam.from_engine(engine)
    policy = team.make_policies(episode, counter)
    deadline = asyncio.timeout(None)
    try:
        async with pool.lease(episode) as env, deadline:
            if timeout_s is not None:
                # From the lease on: an episode that waits for a free environment is not slow.
                deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
            returned: Any = await run_agent(
                lambda: agent(env, policy), episode.episode_id, describe_episode(episode)
            )
    except asyncio.CancelledError as error:
        # a CancelledError of what the agent awaits would end this task as if the run had stopped:
        # the episode would stay in flight for ever, and no error would say why
        if is_being_cancelled():
            raise
        raise RuntimeError(
            f"the agent raised CancelledError in {describe_episode(episode)}, but the episode was not "
            "cancelled; catch it where the agent awaits a task that it cancelled"
        ) from error
    except ActorDied as death:
        raise _make_loss(death, episode) from death
    except TimeoutError as error:
        if not deadline.expired():
            error.add_note(f"while running {describe_episode(episode)}")
            raise
        raise EpisodeLost(
            episode, "timed_out", f"it took longer than episode_timeout_s={timeout_s}"
        ) from error
    except ExceptionGroup as errors:  # of an agent that runs tasks of its own
        deaths, others = errors.split(ActorDied)
        if deaths is not None and others is None:
            raise _make_loss(_first_exit(deaths), episode) from errors
        errors.add_note(f"while running {describe_episode(episode)}")
        raise
    except Exception as error:
        # Errors of the policy name the episode themselves, and twice is harder to read.
        if describe_episode(episode) not in str(error):
            error.add_note(f"while running {describe_episode(episode)}")
        raise
    return _check_returned(returned, episode, team if is_trained_on else None)


def _check_returned(returned: Any, episode: EpisodeSpec, team: EngineTeam | None) -> Trajectory:
    """Return what the agent returned, if it is the trajectory of this episode, and if `team` can
    be trained on it.

    Raises: AgentError if it is not.
    """
    if not isinstance(returned, Trajectory):
        hint = "; is a `return` missing?" if returned is None else ""
        raise AgentError(
            f"the agent returned {describe_value(returned)}, expected the Trajectory of "
            f"{describe_episode(episode)}{hint}"
        )
    if returned.episode.episode_id != episode.episode_id:
        raise AgentError(
            f"the agent returned the Trajectory of episode {returned.episode.episode_id}, expected "
            f"that of {describe_episode(episode)}; use env.episode"
        )
    if not returned.steps:
        raise AgentError(
            f"the agent returned a Trajectory without steps for {describe_episode(episode)}, expected at "
            "least one decision; an agent that cannot decide has to raise an error that explains "
            "why"
        )
    check_trajectory(returned, describe_episode(episode))
    if team is not None:
        check_decisions(returned, describe_episode(episode), team.get_token_ids)
    return returned


def _make_loss(death: ActorDied, episode: EpisodeSpec) -> EpisodeLost:
    return EpisodeLost(episode, "frozen" if isinstance(death, ActorFrozen) else "died", str(death))


def _first_exit(deaths: ExceptionGroup[ActorDied]) -> ActorDied:
    first = deaths.exceptions[0]
    return first if isinstance(first, ActorDied) else _first_exit(first)


class EpisodeRunner(Protocol):
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
    def pending_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        ...

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        """Run `episode` once. Raises: as `run_episode`."""
        ...

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory of an earlier process can be made whole here."""
        ...

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        """Return a metadata-only trajectory of this runner with all its arrays, or what stands for them.

        Call it once. Raises: EpisodeLost if they are gone with their host.
        """
        ...

    def drop_arrays(self, trajectory: Trajectory) -> None:
        """Let the arrays of a trajectory be dropped where they are, if they are not here."""
        ...

    def decisions(self, now: float) -> DecisionCounts:
        """Return counts of the policy's decisions, up to `now` of the loop's clock."""
        ...

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        """Call `call` in this loop each time that `num_slots` or `weight_version` has grown.

        It need not be called for a `weight_version` that was never behind `pending_version`.
        """
        ...


class LocalEpisodeRunner:
    """Runs episodes in this process: one in each environment of a pool.

    Args:
        pool: environments; the caller opens and closes it.
        engine: the policy.
        agent: runs one episode.
    """

    def __init__(self, pool: EnvPool, engine: AnyEngine, agent: Agent) -> None:
        self._pool, self._engine, self._agent = pool, EngineTeam.from_engine(engine), agent
        self._counter = DecisionCounter()

    @property
    def num_slots(self) -> int:
        """Number of environments."""
        return self._pool.num_envs

    @property
    def weight_version(self) -> int:
        """Weight version of the engine that is furthest behind."""
        return self._engine.weight_version

    @property
    def pending_version(self) -> int:
        """The same, once weights have arrived at engines in other processes."""
        return self._engine.pending_version

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        """Run `episode` once. Raises: as `run_episode`."""
        return await run_episode(
            self._pool,
            self._engine,
            self._agent,
            episode,
            timeout_s=timeout_s,
            counter=self._counter,
            is_trained_on=True,
        )

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        """Return whether all of it is here."""
        return trajectory.episode_ref is None

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory: all of it is here."""
        return trajectory

    def drop_arrays(self, trajectory: Trajectory) -> None:
        """Do nothing: all of it is here."""

    def decisions(self, now: float) -> DecisionCounts:
        """Return counts of the decisions of all episodes."""
        return self._counter.counts(now)

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        """Call `call` each time that engines which were behind have new weights."""
        self._engine.on_weights_applied(call)
