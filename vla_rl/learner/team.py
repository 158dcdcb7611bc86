"""The learners, critics and references of a team: several policies that learn in one run, or one.

    trajectories ─► decisions of "solver"  ─► its learner  ─┐ one version for all of them:
                └─► decisions of "checker" ─► its learner  ─┘ agents that do not learn keep their weights

Each class here has the methods of its members (learner, critic, reference), so that a pipeline
works with any number of policies. Which decisions are a member's is the roster's to say.
"""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.graph import Slice
from vla_rl.learner.checkpoint.state import StagedTensors, TeamState, TrainingState
from vla_rl.learner.critic import PolicyCritic
from vla_rl.learner.finiteness import TrajectoryValues
from vla_rl.learner.learner import UpdateReport
from vla_rl.learner.rows import Advantage
from vla_rl.learner.scoring import PolicyReference
from vla_rl.types import AgentNames, AgentPart, Trajectory

T = TypeVar("T")


class MemberLearner(Protocol):
    """The learner of one policy: `PolicyLearner`, or `OffPolicyLearner`."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        ...

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update the policy, and publish the new weights."""
        ...

    async def publish_unchanged(self) -> UpdateReport:
        """Publish the same weights as a new version."""
        ...

    def count_flops(self, peak_flops: float) -> None:
        """Measure MFU, if this learner has processes of its own."""
        ...

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on, between two updates."""
        ...

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it to the engines."""
        ...


class LearnerTeam:
    """A learner for each member.

    Args:
        learners: learners by member name; all at one weight version.
        updates_per_turn: number of updates in which one agent learns and the others keep their
            weights, before the next agent's turn, in the order of `learners`. None: all agents
            learn in every update.
        members: names of those that learn at all. None: all of them.
    """

    def __init__(
        self,
        learners: Mapping[str, MemberLearner],
        updates_per_turn: int | None = None,
        members: Collection[str] | None = None,
    ) -> None:
        if not learners or (updates_per_turn is not None and updates_per_turn < 1):
            raise ConfigError(
                f"{len(learners)} learners and updates_per_turn={updates_per_turn}, expected at "
                "least 1 of each; updates_per_turn=None lets all of them learn in every update"
            )
        self._learners, self._updates_per_turn = dict(learners), updates_per_turn
        self._members = tuple(name for name in learners if members is None or name in members)
        self._agent_names = AgentNames(learners)

    @property
    def weight_version(self) -> int:
        """Number of updates, counting for every agent also those in which it did not learn."""
        return min(learner.weight_version for learner in self._learners.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(self._learners)

    def member(self, name: str) -> MemberLearner:
        """Return the learner of an agent."""
        return self._learners[name]

    @property
    def with_processes(self) -> list[AbstractAsyncContextManager[Any]]:
        """The learners that compute in processes of their own, to be opened before they are used."""
        return [
            learner
            for learner in self._learners.values()
            if isinstance(learner, AbstractAsyncContextManager)
        ]

    def count_flops(self, peak_flops: float) -> None:
        """Measure the MFU of learners in processes of their own, by a device's operations per
        second.
        """
        for learner in self._learners.values():
            learner.count_flops(peak_flops)

    def learning(self, version: int) -> tuple[str, ...]:
        """Return the agents that learn in the update from `version` to the next version."""
        names = self._members
        if self._updates_per_turn is None:
            return names
        # from the version alone, so that a resumed run goes on with the agent whose turn it was
        return (names[version // self._updates_per_turn % len(names)],)

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update each agent whose turn it is from its own decisions, one after another.

        Arguments are those of `Learner.update`.

        A member's metrics begin with `Roster.prefix`. Raises: ConfigError for a decision of an
        agent without a learner.
        """
        self._agent_names.require_members(trajectories)
        turn = self.learning(self.weight_version)
        metrics: dict[str, float] = {}
        slices: dict[str, tuple[Slice, ...]] = {}
        notes: list[str] = []
        for name, learner in self._learners.items():
            parts = self._agent_names.split_by_member(trajectories, name) if name in turn else []
            if not parts:
                # its engines wait for this version like all others
                report = await learner.publish_unchanged()
            else:
                references = None
                if reference_log_probs is not None:
                    references = [
                        [reference_log_probs[part.row][number] for number in part.decisions]
                        for part in parts
                    ]
                report = await learner.update(
                    [part.trajectory for part in parts],
                    [_part_advantage(advantages[part.row], part) for part in parts],
                    references,
                )
            metrics |= self._named(name, report.metrics)
            slices |= self._named(name, report.slices)
            if report.note:
                notes.append(
                    report.note if self._agent_names.acts_for_all else f"{name}: {report.note}"
                )
        return UpdateReport(self.weight_version, metrics, slices, "; ".join(notes))

    async def publish_unchanged(self) -> UpdateReport:
        """Publish the same weights of all agents as a new version."""
        metrics: dict[str, float] = {}
        for name, learner in self._learners.items():
            metrics |= self._named(name, (await learner.publish_unchanged()).metrics)
        return UpdateReport(self.weight_version, metrics)

    async def snapshot(self) -> TeamState:
        """Copy all state that the next update depends on, between two updates."""
        return TeamState(
            {name: await learner.snapshot() for name, learner in self._learners.items()}
        )

    async def restore(self, state: TeamState) -> None:
        """Continue from a snapshot.

        Raises: CheckpointError if it is of other members.
        """
        if state.agent_names != self._agent_names:
            raise CheckpointError(
                f"the checkpoint has {state.agent_names}, expected {self._agent_names}; resume with the "
                "recipe and settings that made it."
            )
        for name, learner in self._learners.items():
            await learner.restore(state.members[name])

    def _named(self, name: str, found: Mapping[str, T]) -> dict[str, T]:
        prefix = self._agent_names.get_prefix(name)
        return {f"{prefix}{key}": value for key, value in found.items()}


class CriticTeam:
    """A critic for each agent, which estimates the values of that agent's observations.

    Args:
        critics: critics by agent name.
    """

    def __init__(self, critics: Mapping[str, PolicyCritic]) -> None:
        self._critics, self._agent_names = dict(critics), AgentNames(critics)

    async def values(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryValues]:
        """Compute the values of all decisions of all trajectories.

        The last agent's critic values the final observation.
        """
        self._agent_names.require_members(trajectories)

        async def compute_values(name: str, parts: Sequence[AgentPart]) -> list[TrajectoryValues]:
            return await self._critics[name].values([part.trajectory for part in parts])

        values = [np.zeros(len(trajectory.steps), np.float32) for trajectory in trajectories]
        bootstraps = [0.0] * len(trajectories)
        for part, found in await _each_part(self._agent_names, trajectories, compute_values):
            values[part.row][list(part.decisions)] = found.values
            # the agent that decided last values what comes after: the others have not seen the
            # final observation
            if part.decisions[-1] == len(trajectories[part.row].steps) - 1:
                bootstraps[part.row] = found.bootstrap
        return [TrajectoryValues(*pair) for pair in zip(values, bootstraps, strict=True)]

    async def fit_values(
        self,
        trajectories: Sequence[Trajectory],
        values: Sequence[TrajectoryValues],
        returns: Sequence[np.ndarray],
        *,
        number: int | None = None,
    ) -> dict[str, float]:
        """Fit each critic to the returns of its agent's decisions.

        A member's metrics begin with `Roster.prefix`.
        """
        metrics: dict[str, float] = {}
        for name, critic in self._critics.items():
            parts = self._agent_names.split_by_member(trajectories, name)
            if not parts:
                continue
            own = [(values[part.row], list(part.decisions)) for part in parts]
            report = await critic.fit_values(
                [part.trajectory for part in parts],
                [TrajectoryValues(each.values[numbers], each.bootstrap) for each, numbers in own],
                [returns[part.row][list(part.decisions)] for part in parts],
                number=number,
            )
            prefix = self._agent_names.get_prefix(name)
            metrics |= {f"{prefix}{key}": value for key, value in report.items()}
        return metrics

    async def snapshot(self) -> Mapping[str, Tensor] | StagedTensors:
        """Copy all state that the next update depends on, by name."""
        if self._agent_names.acts_for_all:
            return await next(iter(self._critics.values())).snapshot()
        tensors: dict[str, Tensor] = {}
        staged: dict[str, StagedTensors] = {}
        for name, critic in self._critics.items():
            prefix, found = self._agent_names.get_prefix(name), await critic.snapshot()
            if isinstance(found, StagedTensors):
                staged[prefix] = found
            else:
                tensors |= {f"{prefix}{key}": tensor for key, tensor in found.items()}
        # ranks write one file together: several learners' parts have to be joined before any of
        # them writes
        if not staged:
            return tensors
        # imported here, because one process pays nothing for what several need
        from vla_rl.learner.distributed.weights import JoinedTensors

        assert not tensors, "all members of a team have the same number of ranks"
        return JoinedTensors(staged)

    async def restore(
        self, tensors: Mapping[str, Tensor] | StagedTensors, file: Path | None = None
    ) -> None:
        """Continue from a snapshot; arguments are those of `PolicyCritic.restore`.

        Raises: CheckpointError if it is of other critics.
        """
        for name, critic in self._critics.items():
            await critic.restore(tensors, file, self._agent_names.get_prefix(name))


class ReferenceTeam:
    """The frozen policy of each agent, which scores that agent's decisions.

    Args:
        references: references by agent name.
    """

    def __init__(self, references: Mapping[str, PolicyReference]) -> None:
        self._references, self._agent_names = dict(references), AgentNames(references)

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Compute the log-probs, for each trajectory float32 [T] of each decision."""
        self._agent_names.require_members(trajectories)

        async def scored(name: str, parts: Sequence[AgentPart]) -> list[list[np.ndarray]]:
            return await self._references[name].log_probs([part.trajectory for part in parts])

        rows = [[np.zeros(0, np.float32)] * len(trajectory.steps) for trajectory in trajectories]
        for part, found in await _each_part(self._agent_names, trajectories, scored):
            for number, log_probs in zip(part.decisions, found, strict=True):
                rows[part.row][number] = log_probs
        return rows


async def _each_part(
    agent_names: AgentNames,
    trajectories: Sequence[Trajectory],
    ask: Callable[[str, Sequence[AgentPart]], Coroutine[Any, Any, list[T]]],
) -> list[tuple[AgentPart, T]]:
    """Call `ask` with the parts of each member, member by member.

    Return each part with its answer.
    """
    answers: list[tuple[AgentPart, T]] = []
    for name in agent_names.names:
        parts = agent_names.split_by_member(trajectories, name)
        if parts:
            answers += zip(parts, await ask(name, parts), strict=True)
    return answers


def _part_advantage(advantage: Advantage, part: AgentPart) -> Advantage:
    """Return the advantage of a part: a single number, or those of the part's decisions."""
    return advantage if np.ndim(advantage) == 0 else np.asarray(advantage)[list(part.decisions)]
