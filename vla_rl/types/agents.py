"""Agents: the functions that run an episode, what they get, which policy acts for each.

The decisions of one agent are taken out of episodes that several agents share:

    solver ─► solver ─► checker ─► solver       the part of "solver": decisions 0, 1, 3

Advantages are computed on such parts, as is the training of policies: each agent is compared with itself.

A run always trains a team, whose members are policies by name. If it has one policy, the team's only member
is `policy`, which acts for every agent whatever that agent's name; its metrics, files, seeds carry no
member's name. In any other team, each member acts for the agent of its own name.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.types.episode import EpisodeSpec, Sampling, derive_seed
from vla_rl.types.language import DEFAULT_AGENT, LanguagePolicies, LanguagePolicy
from vla_rl.types.observation import Info, Observation
from vla_rl.types.trajectory import ActionChunk, ChunkOutcome, StopReason, Trajectory


class Env(Protocol):
    """One environment, leased for one episode, in any process."""

    @property
    def episode(self) -> EpisodeSpec:
        """The episode that this lease is for."""
        ...

    async def reset(self) -> tuple[Observation, Info]:
        """Reset the environment to the start of its episode."""
        ...

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step. Return observation, reward, terminated, truncated and info."""
        ...

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Run the rows of float32 [H, D] open loop, with one message each way.

        Stops when all have run or the episode ends.

        With `frames_every` = k, `ChunkOutcome.frames` holds a frame after every k-th control step
        of the episode.
        """
        ...


class Policy(Protocol):
    """A policy that chooses actions; it batches the requests that wait."""

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk.

        Without `sampling`, the episode's own is used. The seed is always this decision's.
        """
        ...


class EnvPool(Protocol):
    """Environments for episodes. A lease waits for a free one; the pool replaces dead ones."""

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        ...

    def lease(self, episode: EpisodeSpec) -> AbstractAsyncContextManager[Any]:
        """Lease an environment (`Env` or `TextEnv`) for this episode.

        Leaving the context frees it, in any state.

        The environment's methods raise `ActorDied` if its process dies or freezes, `EnvError` if it
        breaks its contract.
        """
        ...


Agent: TypeAlias = Callable[[Any, Any], Awaitable[Trajectory]]
"""An agent, `async def agent(env, policy) -> Trajectory`: robots, chat, tools, several policies in
one episode.

It gets an `Env` and a `Policy`, or a `TextEnv` and a `LanguagePolicy`, or one policy by agent name
if several agents share an episode."""


class AgentPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one agent in one episode.

    Example:
        The part of "solver" in the drawing above: AgentPart(row=0, decisions=(0, 1, 3), trajectory=...)
    """

    row: int
    """Position of the episode among those that were given."""

    decisions: tuple[int, ...]
    """Positions of its decisions in the whole episode, in order."""

    trajectory: Trajectory
    """The episode with only its decisions. If another agent decided last, this agent had no
    decision left, so its part counts as ended and not as cut off."""


def list_agents(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the names of agents with a decision, in order of their first decisions."""
    return list(
        dict.fromkeys(step.agent for trajectory in trajectories for step in trajectory.steps)
    )


def split_by_agent(trajectories: Sequence[Trajectory], agent: str) -> list[AgentPart]:
    """Return the part of one agent in each episode in which it has a decision, in their order."""
    parts = []
    for row, trajectory in enumerate(trajectories):
        decisions = tuple(
            number for number, step in enumerate(trajectory.steps) if step.agent == agent
        )
        if decisions:
            parts.append(
                AgentPart(
                    row=row,
                    decisions=decisions,
                    trajectory=_select_decisions(trajectory, decisions),
                )
            )
    return parts


def _select_decisions(trajectory: Trajectory, decisions: tuple[int, ...]) -> Trajectory:
    # The same object for the one agent of most runs: copying would double the memory of a batch.
    if len(decisions) == len(trajectory.steps):
        return trajectory
    steps = tuple(trajectory.steps[number] for number in decisions)
    reason = trajectory.stop_reason
    # A value must not bootstrap behind a decision after which this agent earned nothing more.
    if decisions[-1] != len(trajectory.steps) - 1:
        reason = StopReason.SUCCESS if trajectory.is_success else StopReason.TERMINATED
    return msgspec.structs.replace(trajectory, steps=steps, stop_reason=reason)


SOLE_MEMBER: Final = DEFAULT_AGENT
"""Name of the member of a team of one, which acts for every agent."""


class AgentNames:
    """The names of a team's members, in order.

    Args:
        names: the names; `SOLE_MEMBER` alone is a member that acts for every agent.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __eq__(self, other: object) -> bool:
        # As sets: a resume may name the members in another order, and means the same team.
        return isinstance(other, AgentNames) and set(self.names) == set(other.names)

    def __hash__(self) -> int:
        return hash(frozenset(self.names))

    def __str__(self) -> str:
        return (
            "one policy for all agents"
            if self.acts_for_all
            else f"the policies of agents {sorted(self.names)}"
        )

    @property
    def acts_for_all(self) -> bool:
        """Whether the team has one policy, for agents of any name."""
        return self.names == (SOLE_MEMBER,)

    def get_member(self, agent: str) -> str:
        """Return the name of the member that acts for an agent. Raises: KeyError if none does."""
        if self.acts_for_all:
            return SOLE_MEMBER
        if agent not in self.names:
            raise KeyError(agent)
        return agent

    def get_prefix(self, name: str) -> str:
        """Return the beginning of a member's metrics and tensors: "" in a team of one."""
        # runs of one policy were written before there were teams; their names have to stay
        return "" if self.acts_for_all else f"{name}/"

    def derive_seed(self, seed: int, name: str) -> int:
        """Return a member's own seed below `seed`: `seed` itself in a team of one."""
        return seed if self.acts_for_all else derive_seed(seed, name)

    def split_by_member(self, trajectories: Sequence[Trajectory], name: str) -> list[AgentPart]:
        """Return a member's part in each episode in which it decided."""
        if not self.acts_for_all:
            return split_by_agent(trajectories, name)
        return [
            AgentPart(row=row, decisions=tuple(range(len(each.steps))), trajectory=each)
            for row, each in enumerate(trajectories)
        ]

    def require_members(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise ConfigError for a decision of an agent that no member acts for."""
        # Found before an update: decisions that nobody learns from would vanish without a line.
        unknown = sorted(set(list_agents(trajectories)) - set(self.names))
        if unknown and not self.acts_for_all:
            raise ConfigError(
                f"agent {unknown[0]!r} has no policy, there are policies for "
                f"{sorted(self.names)}; expected one for each agent that the environment names"
            )


def key_by_member(policies: LanguagePolicies) -> Mapping[str, LanguagePolicy]:
    """Return policies by member name; one policy for all agents is a team of one."""
    return policies if isinstance(policies, Mapping) else {SOLE_MEMBER: policies}
