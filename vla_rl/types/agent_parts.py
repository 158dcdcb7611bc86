"""The decisions of one agent, taken out of episodes that several agents share.

    solver ─► solver ─► checker ─► solver       the part of "solver": decisions 0, 1, 3

Advantages are computed and policies are trained on such parts: each agent is compared with itself,
and trained on its own decisions.
"""

from collections.abc import Iterable, Sequence

import msgspec

from vla_rl.types.trajectory import StopReason, Trajectory


class AgentPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one agent in one episode."""

    row: int
    """Position of the episode among those that were given."""

    decisions: tuple[int, ...]
    """Positions of its decisions in the whole episode, in order."""

    trajectory: Trajectory
    """The episode with only its decisions. If another agent decided last, this agent had no
    decision left, so its part counts as ended and not as cut off."""


def agents_of(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the names of agents with a decision, in order of their first decisions."""
    return list(
        dict.fromkeys(step.agent for trajectory in trajectories for step in trajectory.steps)
    )


def parts_of(trajectories: Sequence[Trajectory], agent: str) -> list[AgentPart]:
    """Return the part of one agent in each episode in which it has a decision, in their order."""
    parts = []
    for row, trajectory in enumerate(trajectories):
        decisions = tuple(
            number for number, step in enumerate(trajectory.steps) if step.agent == agent
        )
        if decisions:
            parts.append(
                AgentPart(row=row, decisions=decisions, trajectory=_alone(trajectory, decisions))
            )
    return parts


def _alone(trajectory: Trajectory, decisions: tuple[int, ...]) -> Trajectory:
    if len(decisions) == len(trajectory.steps):
        return trajectory
    steps = tuple(trajectory.steps[number] for number in decisions)
    reason = trajectory.stop_reason
    if decisions[-1] != len(trajectory.steps) - 1:
        reason = StopReason.SUCCESS if trajectory.is_success else StopReason.TERMINATED
    return msgspec.structs.replace(trajectory, steps=steps, stop_reason=reason)
