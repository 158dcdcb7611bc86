"""Rewards of an update, as every advantage estimator reads them.

Legend: N trajectories of one update (all groups, all ranks), S steps. A step is the unit with an
advantage of its own: an action chunk (one decision), a control step, or a token; rows are padded to
the longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.types import Step, Trajectory, list_agents

Floats: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of one update.

    Only `rewards` is always required; an estimator reports other fields that it lacks.

    Attributes:
        rewards: float [N], the outcome of each trajectory.
        group: int [N], group ids; trajectories with the same id are compared with each other.
        episode_ids: int [N], names of the trajectories in errors; without them, errors name the
            row.
        mask: bool [N, S], True where the policy acted. False after the end, and at steps that the
            policy did not choose.
        step_rewards: float [N, S], reward of each step, 0 where masked; None puts `rewards` on the
            last step that acted.
        values: float [N, S], the critic's estimate before each step; anything where masked.
        final_values: float [N], its estimate after the last step, used if the episode was cut off.
        is_terminated: bool [N], True if the task itself ended the episode; False if a time limit
            cut it off.
        durations: int [N, S], control steps that each step took; discounts are per control step
            then. None: 1 each.
        num_tokens: float [N], length of each trajectory, for baselines weighted by it.
        greedy_rewards: float [N], outcome of the greedy policy from the same start.
        agents: int [N, S], the agent that acted, for several agents that act in turns.
        instructions: int [N, S], the same number for the same words that a step followed; -1 for none.

    Raises: ValueError, naming the trajectory, for sizes that do not fit, or a number that is not
    finite.
    """

    rewards: Floats
    group: NDArray[np.integer] | None = None
    episode_ids: NDArray[np.integer] | None = None
    mask: NDArray[np.bool_] | None = None
    step_rewards: Floats | None = None
    values: Floats | None = None
    final_values: Floats | None = None
    is_terminated: NDArray[np.bool_] | None = None
    durations: NDArray[np.integer] | None = None
    num_tokens: Floats | None = None
    greedy_rewards: Floats | None = None
    agents: NDArray[np.integer] | None = None
    instructions: NDArray[np.integer] | None = None

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1:
            raise ValueError(
                f"rewards are {list(self.rewards.shape)}, expected [N]: one outcome per trajectory."
            )
        num = len(self.rewards)
        for name in (
            "group",
            "episode_ids",
            "final_values",
            "is_terminated",
            "num_tokens",
            "greedy_rewards",
        ):
            self._check_shape(name, (num,))
        # without a mask, zeros of steps and of padding look the same
        if self.mask is None and self.step_rewards is not None:
            raise ValueError(
                "step_rewards are given without a mask, expected bool [N, S] of the "
                "steps that acted."
            )
        if self.mask is not None and (
            self.mask.ndim != 2 or len(self.mask) != num or self.mask.dtype != np.bool_
        ):
            raise ValueError(
                f"mask is {self.mask.dtype} {list(self.mask.shape)}, expected bool [{num}, S]."
            )
        for name in ("step_rewards", "values", "durations", "agents", "instructions"):
            self._check_shape(name, None if self.mask is None else self.mask.shape)
        self._check_finite()

    def __len__(self) -> int:
        return len(self.rewards)

    def need(self, name: str, needed_by: str) -> NDArray[np.float64]:
        """Return a field as float64. Raises: ValueError if it is None."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"the advantage {needed_by!r} needs RewardBatch.{name}, but it is None; fill it in."
            )
        return np.asarray(value, dtype=np.float64)

    def need_mask(self, needed_by: str) -> NDArray[np.bool_]:
        """Return the mask. Raises: ValueError if it is None."""
        self.need("mask", needed_by)
        assert self.mask is not None
        return self.mask

    def groups(self, needed_by: str) -> list[NDArray[np.intp]]:
        """Return the rows of each group, in order of first appearance.

        Raises: ValueError without `group`.
        """
        of_row = self.need("group", needed_by)
        return [np.flatnonzero(of_row == number) for number in dict.fromkeys(of_row.tolist())]

    def rewards_by_step(self, needed_by: str) -> NDArray[np.float64]:
        """Return float64 [N, S]: `step_rewards`, or the outcome on the last step that acted.

        An outcome is dropped if no step acted.
        """
        mask = self.need_mask(needed_by)
        if self.step_rewards is not None:
            return np.asarray(self.step_rewards, dtype=np.float64)
        rewards = np.zeros(mask.shape)
        rows = np.flatnonzero(mask.any(axis=1))
        # on the last step that acted, not in the last column: rows are padded to the longest, and a
        # reward in the padding would be lost
        last = mask.shape[1] - 1 - mask[rows, ::-1].argmax(axis=1)
        rewards[rows, last] = self.rewards[rows]
        return rewards

    def describe_row(self, row: int) -> str:
        """Return the name of a row's trajectory for errors."""
        return (
            f"trajectory {row}" if self.episode_ids is None else f"episode {self.episode_ids[row]}"
        )

    def _check_shape(self, name: str, shape: tuple[int, ...] | None) -> None:
        value: NDArray[np.generic] | None = getattr(self, name)
        if value is None:
            return
        if shape is None:
            raise ValueError(
                f"{name} is given without a mask, expected bool [N, S] of the steps that acted."
            )
        if value.shape != shape:
            raise ValueError(f"{name} is {list(value.shape)}, expected {list(shape)}.")

    def _check_finite(self) -> None:
        for name in (
            "rewards",
            "final_values",
            "num_tokens",
            "greedy_rewards",
            "step_rewards",
            "values",
        ):
            value: Floats | None = getattr(self, name)
            if value is None:
                continue
            used = (
                # a critic may have computed anything for padding; where the policy acted, one NaN
                # would spread over the whole batch when it is whitened
                value if name != "values" or self.mask is None else np.where(self.mask, value, 0.0)
            )
            bad = np.argwhere(~np.isfinite(used))
            if len(bad):
                index = tuple(int(each) for each in bad[0])
                step = f" at step {index[1]}" if len(index) > 1 else ""
                raise ValueError(
                    f"{name} of {self.describe_row(index[0])}{step} is {value[index]}, expected a "
                    "finite number; check where it is made."
                )
        if self.step_rewards is not None and self.mask is not None:
            # a reward at a step that is masked would be dropped without a word, as one of an
            # environment that pays after the last decision
            lost = np.argwhere((self.step_rewards != 0.0) & ~self.mask)
            if len(lost):
                row, step_number = (int(index) for index in lost[0])
                raise ValueError(
                    f"step_rewards of {self.describe_row(row)} at step {step_number} is "
                    f"{self.step_rewards[row, step_number]} where the policy did not act, expected "
                    "0; add it to the last step before that did."
                )


@dataclass(frozen=True)
class Advantages:
    """Output of an advantage estimator.

    Attributes:
        advantage: float32 [N, S], 0 where masked; or [N, 1], one number per trajectory, if the
            batch has no mask.
        returns: float32 [N, S], what a critic should have estimated; None if the estimator uses no
            critic.
        mask: bool [N, S], mask of the batch.

    Example:
        Two groups of two, of which the first was solved once; one number a trajectory:

        RewardBatch(rewards=np.array([1.0, 0.0, 0.0, 0.0]), group=np.array([0, 0, 1, 1]))
    """

    advantage: NDArray[np.float32]
    returns: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None

    def per_trajectory(self) -> list[float | NDArray[np.float32]]:
        """Return one number for each trajectory, or float32 [steps] up to its last step."""
        if self.mask is None:
            return [float(row[0]) for row in self.advantage]
        return [row[: _length(acted)] for row, acted in zip(self.advantage, self.mask, strict=True)]

    def returns_per_trajectory(self) -> list[NDArray[np.float32]]:
        """Return the critic's targets, float32 [steps] for each trajectory.

        Raises: ValueError if there are none.
        """
        if self.returns is None or self.mask is None:
            raise ValueError(
                "this advantage has no returns, expected them from 'gae' or 'marft_gae'."
            )
        return [row[: _length(acted)] for row, acted in zip(self.returns, self.mask, strict=True)]


AdvantageEstimator: TypeAlias = Callable[[RewardBatch], Advantages]


def outcome_advantages(batch: RewardBatch, outcome: NDArray[np.floating]) -> Advantages:
    """Give every step of a trajectory the same advantage.

    float [N] -> [N, S], 0 where masked, or [N, 1].

    Example:
        GRPO on the batch above: Advantages(advantage=[[0.707], [-0.707], [0.0], [0.0]])
    """
    column = np.asarray(outcome, dtype=np.float32)[:, None]
    if batch.mask is None:
        return Advantages(column)
    return Advantages(np.where(batch.mask, column, np.float32(0.0)), mask=batch.mask)


def _length(acted: NDArray[np.bool_]) -> int:
    """Return the number of steps up to the last one that acted."""
    return int(acted.nonzero()[0][-1]) + 1 if acted.any() else 0


StepLevel: TypeAlias = Literal["chunk", "action", "token"]
"""Unit with an advantage of its own: a decision, an executed control step, or a token of one."""


def make_reward_batch(
    trajectories: Sequence[Trajectory],
    rewards: Floats | None = None,
    *,
    level: StepLevel = "chunk",
    step_rewards: Sequence[Floats] | None = None,
    values: Sequence[Floats] | None = None,
    final_values: Floats | None = None,
    greedy_rewards: Floats | None = None,
) -> RewardBatch:
    """Collect everything that an estimator may need from trajectories.

    Only executed control steps count: the batch ends at the exact control step that ended the
    episode. At the level "chunk" a step's reward is the sum over its control steps; at "token" a
    control step's last token gets its reward and duration.

    Args:
        trajectories: N trajectories, all groups of the update.
        rewards: float [N], their outcomes; None takes the sums of the step rewards.
        level: unit of a step.
        step_rewards: N arrays float [steps]; None takes the environment's, unless `rewards` are
            given.
        values: N arrays float [steps], the critic's estimate before each step.
        final_values: float [N], its estimate for each final observation.
        greedy_rewards: float [N], for ReMax.

    Raises: ValueError for sizes that do not fit, naming the episode.
    """
    # executed control steps alone: the end of a chunk that was cut short never happened
    parts = [[_by_level(step, level) for step in trajectory.steps] for trajectory in trajectories]
    durations = [_joined([durations_of for _, durations_of in part]) for part in parts]
    if step_rewards is None and rewards is None:
        step_rewards = [_joined([rewards_of for rewards_of, _ in part]) for part in parts]
    _require_each(step_rewards, durations, trajectories, "step_rewards")
    _require_each(values, durations, trajectories, "values")
    outcomes = [float(row.sum()) for row in step_rewards or ()] if rewards is None else rewards
    episodes = [trajectory.episode for trajectory in trajectories]
    return RewardBatch(
        rewards=np.asarray(outcomes, dtype=np.float64),
        group=np.array([episode.group_id for episode in episodes], dtype=np.int64),
        episode_ids=np.array([episode.episode_id for episode in episodes], dtype=np.int64),
        mask=_padded([np.ones(len(row)) for row in durations]).astype(np.bool_),
        step_rewards=None if step_rewards is None else _padded(step_rewards),
        values=None if values is None else _padded(values),
        final_values=None if final_values is None else np.asarray(final_values),
        is_terminated=np.array(
            [not each.stop_reason.is_cut_off for each in trajectories], dtype=np.bool_
        ),
        durations=_padded(durations).astype(np.int64),
        num_tokens=np.array(
            [trajectory.num_executed_tokens for trajectory in trajectories], dtype=np.float64
        ),
        greedy_rewards=None if greedy_rewards is None else np.asarray(greedy_rewards),
        agents=_agents(trajectories, level),
        instructions=_instructions(trajectories, level),
    )


def _agents(trajectories: Sequence[Trajectory], level: StepLevel) -> NDArray[np.int64]:
    """Return int64 [N, S], the agent that decided each step.

    It is an index in the sorted names of all deciding agents.
    """
    # sorted, so that the numbers do not depend on which agent acted first in this batch
    number_of = {name: number for number, name in enumerate(sorted(list_agents(trajectories)))}
    rows = [
        [number_of[step.agent] for step in trajectory.steps for _ in _by_level(step, level)[1]]
        for trajectory in trajectories
    ]
    return _padded([np.array(row, np.float64) for row in rows]).astype(np.int64)


def _instructions(trajectories: Sequence[Trajectory], level: StepLevel) -> NDArray[np.int64]:
    """Return int64 [N, S], a number for the instruction in each step's observation; -1 without one."""
    numbers: dict[str, int] = {}
    rows = []
    for trajectory in trajectories:
        words = [step.observation.get("instruction") for step in trajectory.steps]
        # The same words, whatever their case and spaces: they are one instruction to a robot.
        told = [
            numbers.setdefault(" ".join(each.lower().split()), len(numbers))
            if isinstance(each, str)
            else -1
            for each in words
        ]
        rows.append(
            [
                number
                for number, step in zip(told, trajectory.steps, strict=True)
                for _ in _by_level(step, level)[1]
            ]
        )
    return _padded([np.array(row, np.float64) for row in rows]).astype(np.int64)


def _by_level(step: Step, level: StepLevel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rewards and durations of one decision's steps, float64 [number of steps]."""
    rewards = np.asarray(step.rewards, dtype=np.float64)
    if level == "chunk":
        return np.array([rewards.sum()]), np.array([float(len(rewards))])
    if level == "action":
        return rewards, np.ones(len(rewards))
    last = np.zeros((len(rewards), step.chunk.tokens_per_step))
    # the other tokens have a duration of 0: no time passes between the tokens of one action, so
    # none is discounted against another
    last[:, -1] = 1.0
    return (last * rewards[:, None]).reshape(-1), last.reshape(-1)


def _joined(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(rows) if rows else np.zeros(0)


def _padded(rows: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    padded = np.zeros((len(rows), max((len(row) for row in rows), default=0)))
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _require_each(
    rows: Sequence[Floats] | None,
    steps: Sequence[NDArray[np.float64]],
    trajectories: Sequence[Trajectory],
    name: str,
) -> None:
    """Raise ValueError unless each trajectory has a number for each of its steps, or `rows` is None."""
    if rows is None:
        return
    if len(rows) != len(trajectories):
        raise ValueError(
            f"{len(rows)} arrays of {name} for {len(trajectories)} trajectories, expected one each."
        )
    for row, step, trajectory in zip(rows, steps, trajectories, strict=True):
        if row.shape != step.shape:
            raise ValueError(
                f"{name} of episode {trajectory.episode.episode_id} are {list(row.shape)}, "
                f"expected {list(step.shape)}: one for each step of the level."
            )
