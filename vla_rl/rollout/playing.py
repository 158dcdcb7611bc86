"""One attempt at one episode: lease an environment, run the agent, tell losses from errors."""

import asyncio
from typing import Any

from vla_rl.errors import ActorDied, ActorFrozen, AgentError, VlaRlError
from vla_rl.rollout.agent_task import run_agent, shown
from vla_rl.rollout.owned_tasks import is_being_cancelled
from vla_rl.rollout.policies import AnyEngine, DecisionGauge, EngineTeam
from vla_rl.rollout.trajectory_checks import check_decisions, check_trajectory
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Trajectory


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
        super().__init__(f"{describe(episode)} was lost: {what}")


def describe(episode: EpisodeSpec) -> str:
    """Describe an episode in words, with all that is needed to run it alone."""
    return (
        f"episode {episode.episode_id} ({episode.task}, member {episode.member} of group "
        f"{episode.group_id}, seed {episode.seed}, options {episode.options}, attempt "
        f"{episode.attempt + 1})"
    )


async def play_episode(
    pool: EnvPool,
    engine: AnyEngine,
    agent: Agent,
    episode: EpisodeSpec,
    *,
    timeout_s: float | None = None,
    gauge: DecisionGauge | None = None,
    is_trained_on: bool = False,
) -> Trajectory:
    """Run `episode` once. If it `is_trained_on`, its decisions are checked too.

    Raises: EpisodeLost if a process died or froze, or the episode took longer than `timeout_s` from
    its lease on; RuntimeError if what the agent awaited was cancelled by another part; AgentError
    if the agent is not async, or returned anything but the trajectory of this episode, with at
    least one step; all other errors of the agent or the environment, with a note that names the
    episode.
    """
    team = EngineTeam.of(engine)
    policy = team.policies_of(episode, gauge)
    deadline = asyncio.timeout(None)
    try:
        async with pool.lease(episode) as env, deadline:
            if timeout_s is not None:
                deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
            returned: Any = await run_agent(
                lambda: agent(env, policy), episode.episode_id, describe(episode)
            )
    except asyncio.CancelledError as error:
        # a CancelledError of what the agent awaits would end this task as if the run had stopped:
        # the episode would stay in flight for ever, and no error would say why
        if is_being_cancelled():
            raise
        raise RuntimeError(
            f"the agent raised CancelledError in {describe(episode)}, but the episode was not "
            "cancelled; catch it where the agent awaits a task that it cancelled"
        ) from error
    except ActorDied as death:
        raise _process_loss(death, episode) from death
    except TimeoutError as error:
        if not deadline.expired():
            error.add_note(f"while running {describe(episode)}")
            raise
        raise EpisodeLost(
            episode, "timed_out", f"it took longer than episode_timeout_s={timeout_s}"
        ) from error
    except ExceptionGroup as errors:  # of an agent that runs tasks of its own
        deaths, others = errors.split(ActorDied)
        if deaths is not None and others is None:
            raise _process_loss(_first_death(deaths), episode) from errors
        errors.add_note(f"while running {describe(episode)}")
        raise
    except Exception as error:
        if describe(episode) not in str(error):
            error.add_note(f"while running {describe(episode)}")
        raise
    return _checked(returned, episode, team if is_trained_on else None)


def _checked(returned: Any, episode: EpisodeSpec, team: EngineTeam | None) -> Trajectory:
    """Return what the agent returned, if it is the trajectory of this episode, and if `team` can
    be trained on it.

    Raises: AgentError if it is not.
    """
    if not isinstance(returned, Trajectory):
        hint = "; is a `return` missing?" if returned is None else ""
        raise AgentError(
            f"the agent returned {shown(returned)}, expected the Trajectory of "
            f"{describe(episode)}{hint}"
        )
    if returned.episode.episode_id != episode.episode_id:
        raise AgentError(
            f"the agent returned the Trajectory of episode {returned.episode.episode_id}, expected "
            f"that of {describe(episode)}; use env.episode"
        )
    if not returned.steps:
        raise AgentError(
            f"the agent returned a Trajectory without steps for {describe(episode)}, expected at "
            "least one decision; an agent that cannot decide has to raise an error that explains "
            "why"
        )
    check_trajectory(returned, describe(episode))
    if team is not None:
        check_decisions(returned, describe(episode), team.token_ids)
    return returned


def _process_loss(death: ActorDied, episode: EpisodeSpec) -> EpisodeLost:
    return EpisodeLost(episode, "frozen" if isinstance(death, ActorFrozen) else "died", str(death))


def _first_death(deaths: ExceptionGroup[ActorDied]) -> ActorDied:
    first = deaths.exceptions[0]
    return first if isinstance(first, ActorDied) else _first_death(first)
