"""Several policies that learn in one run, each from the decisions of its own agent, together or in
turns.

    trajectories ─► decisions of "solver"  ─► its learner  ─┐ one version for all of them:
                └─► decisions of "checker" ─► its learner  ─┘ agents that do not learn keep their weights

Each class here has the methods of its members (learner, critic, reference), so that a pipeline
works with any number of policies.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learning.critic import Critic, Judged
from vla_rl.learning.learner import Learner, UpdateReport
from vla_rl.learning.rows import Advantage
from vla_rl.learning.scoring import Reference
from vla_rl.learning.training import TeamState, TrainingState
from vla_rl.types import AgentPart, Trajectory, agents_of, parts_of

T = TypeVar("T")


class LearnerTeam:
    """A learner for each agent.

    Args:
        learners: learners by the name of the agent whose policy they train; all at one weight
            version.
        updates_per_turn: number of updates in which one agent learns and the others keep their
            weights, before the next agent's turn, in the order of `learners`. None: all agents
            learn in every update.
    """

    def __init__(
        self, learners: Mapping[str, Learner], updates_per_turn: int | None = None
    ) -> None:
        if not learners or (updates_per_turn is not None and updates_per_turn < 1):
            raise ConfigError(
                f"{len(learners)} learners and updates_per_turn={updates_per_turn}, expected at "
                "least 1 of each; "
                "updates_per_turn=None lets all of them learn in every update"
            )
        self._learners, self._updates_per_turn = dict(learners), updates_per_turn

    @property
    def weight_version(self) -> int:
        """Number of updates, counting for every agent also those in which it did not learn."""
        return min(learner.weight_version for learner in self._learners.values())

    def learning(self, version: int) -> tuple[str, ...]:
        """Return the agents that learn in the update from `version` to the next version."""
        names = tuple(self._learners)
        if self._updates_per_turn is None:
            return names
        return (names[version // self._updates_per_turn % len(names)],)

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update each agent whose turn it is from its own decisions, one after another; arguments
        as in `Learner.update`.

        An agent's metrics begin with its name. Raises: ConfigError for a decision of an agent
        without a learner.
        """
        require_known(trajectories, self._learners)
        turn = self.learning(self.weight_version)
        metrics: dict[str, float] = {}
        for name, learner in self._learners.items():
            parts = parts_of(trajectories, name) if name in turn else []
            if not parts:
                report = await learner.stand_still()
            else:
                references = None
                if reference_log_probs is not None:
                    references = [
                        [reference_log_probs[part.row][place] for place in part.decisions]
                        for part in parts
                    ]
                report = await learner.update(
                    [part.trajectory for part in parts],
                    [_part_advantage(advantages[part.row], part) for part in parts],
                    references,
                )
            metrics |= {f"{name}/{key}": value for key, value in report.metrics.items()}
        return UpdateReport(self.weight_version, metrics)

    async def stand_still(self) -> UpdateReport:
        """Publish the same weights of all agents as a new version."""
        reports = {name: await learner.stand_still() for name, learner in self._learners.items()}
        metrics = {
            f"{name}/{key}": value
            for name, report in reports.items()
            for key, value in report.metrics.items()
        }
        return UpdateReport(self.weight_version, metrics)

    async def snapshot(self) -> TeamState:
        """Copy all state that the next update depends on, between two updates."""
        return TeamState(
            {name: await learner.snapshot() for name, learner in self._learners.items()}
        )

    async def restore(self, state: TrainingState | TeamState) -> None:
        """Continue from a snapshot.

        Raises: CheckpointError if it is of a single policy, or of other agents.
        """
        found = sorted(state.members) if isinstance(state, TeamState) else "one policy"
        if not isinstance(state, TeamState) or state.members.keys() != self._learners.keys():
            raise CheckpointError(
                f"the checkpoint is of {found}, expected the policies of agents "
                f"{sorted(self._learners)}; resume with the "
                "recipe and settings that made it."
            )
        for name, learner in self._learners.items():
            await learner.restore(state.members[name])


class CriticTeam:
    """A critic for each agent, which estimates the values of that agent's observations.

    Args:
        critics: critics by agent name.
    """

    def __init__(self, critics: Mapping[str, Critic]) -> None:
        self._critics = dict(critics)

    async def values(self, trajectories: Sequence[Trajectory]) -> list[Judged]:
        """Compute the values of all decisions of all trajectories.

        The last agent's critic values the final observation.
        """
        require_known(trajectories, self._critics)

        async def judged(name: str, parts: Sequence[AgentPart]) -> list[Judged]:
            return await self._critics[name].values([part.trajectory for part in parts])

        values = [np.zeros(len(trajectory.steps), np.float32) for trajectory in trajectories]
        bootstraps = [0.0] * len(trajectories)
        for part, found in await _each_part(self._critics, trajectories, judged):
            values[part.row][list(part.decisions)] = found.values
            if part.decisions[-1] == len(trajectories[part.row].steps) - 1:
                bootstraps[part.row] = found.bootstrap
        return [Judged(*pair) for pair in zip(values, bootstraps, strict=True)]

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[Judged],
        returns: Sequence[np.ndarray],
        *,
        number: int | None = None,
    ) -> dict[str, float]:
        """Fit each critic to the returns of its agent's decisions.

        An agent's metrics begin with its name.
        """
        metrics: dict[str, float] = {}
        for name, critic in self._critics.items():
            parts = parts_of(trajectories, name)
            if not parts:
                continue
            own = [(judged[part.row], list(part.decisions)) for part in parts]
            report = await critic.update(
                [part.trajectory for part in parts],
                [Judged(each.values[places], each.bootstrap) for each, places in own],
                [returns[part.row][list(part.decisions)] for part in parts],
                number=number,
            )
            metrics |= {f"{name}/{key}": value for key, value in report.items()}
        return metrics

    async def snapshot(self) -> dict[str, Tensor]:
        """Copy all state that the next update depends on to the CPU, by name."""
        tensors: dict[str, Tensor] = {}
        for name, critic in self._critics.items():
            tensors |= {
                f"{name}/{key}": tensor for key, tensor in (await critic.snapshot()).items()
            }
        return tensors

    async def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a snapshot. Raises: CheckpointError if it is of other critics."""
        for name, critic in self._critics.items():
            start = f"{name}/"
            await critic.restore(
                {key[len(start) :]: each for key, each in tensors.items() if key.startswith(start)}
            )


class ReferenceTeam:
    """The frozen policy of each agent, which scores that agent's decisions.

    Args:
        references: references by agent name.
    """

    def __init__(self, references: Mapping[str, Reference]) -> None:
        self._references = dict(references)

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Compute the log-probs, for each trajectory float32 [T] of each decision."""
        require_known(trajectories, self._references)

        async def scored(name: str, parts: Sequence[AgentPart]) -> list[list[np.ndarray]]:
            return await self._references[name].log_probs([part.trajectory for part in parts])

        rows = [[np.zeros(0, np.float32)] * len(trajectory.steps) for trajectory in trajectories]
        for part, found in await _each_part(self._references, trajectories, scored):
            for place, log_probs in zip(part.decisions, found, strict=True):
                rows[part.row][place] = log_probs
        return rows


def require_known(trajectories: Sequence[Trajectory], members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a decision of an agent that is not in the team."""
    unknown = sorted(set(agents_of(trajectories)) - members.keys())
    if unknown:
        raise ConfigError(
            f"agent {unknown[0]!r} has no policy, there are policies for {sorted(members)}; "
            "expected one for each agent "
            "that the environment names"
        )


async def _each_part(
    members: Mapping[str, Any],
    trajectories: Sequence[Trajectory],
    ask: Callable[[str, Sequence[AgentPart]], Coroutine[Any, Any, list[T]]],
) -> list[tuple[AgentPart, T]]:
    """Call `ask` with the parts of each member, member by member.

    Return each part with its answer.
    """
    answers: list[tuple[AgentPart, T]] = []
    for name in members:
        parts = parts_of(trajectories, name)
        if parts:
            answers += zip(parts, await ask(name, parts), strict=True)
    return answers


def _part_advantage(advantage: Advantage, part: AgentPart) -> Advantage:
    """Return the advantage of a part: a single number as it is, or the numbers of the part's
    decisions.
    """
    return advantage if np.ndim(advantage) == 0 else np.asarray(advantage)[list(part.decisions)]
