"""Advantages of a planner and of those that it directs, each compared with its own choices alone.

    turn 1: planner, robot, robot   turn 2: planner, robot   turn 3: planner
    └────────── r_1 ────────────┘   └──────── r_2 ───────┘   └──── r_3 ────┘

One advantage for all decisions of an episode credits a robot that did what it was told with a plan that was
wrong, and a good plan with a robot that failed. Here the planner is credited with what followed from each
turn on, and the robot with what its call earned, compared with calls of the same words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch

Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Turn:
    """One decision of the leader, and the decisions of others until its next one."""

    row: int
    steps: NDArray[np.intp]
    """Columns of its decisions, the leader's first."""

    earned: float
    """Sum of their rewards."""

    before: float
    """Sum of the rewards of the episode's earlier turns: the situation in which the turn began."""

    instruction: int
    """Number of the words that its first follower got; -1 if none acted or got any."""

    @property
    def followers(self) -> NDArray[np.intp]:
        """Columns of the decisions of others than the leader."""
        return self.steps[1:]


def hierarchical_rloo(batch: RewardBatch, *, gamma: float = 1.0, lam: float = 0.0) -> Advantages:
    """RLOO on two levels: the leader by turns, its followers by the calls that it made.

    The leader of an episode is the agent that decides first. A turn k is one decision of the leader with
    those of others until its next; r_k is the sum of their rewards, p_k = r_1 + ... + r_(k-1).

        leader:     G_k = r_k + gamma G_(k+1)                A = G_k - mean of G over the turns with the same p
        followers:  H_k = r_k + lam gamma G_(k+1)            A = H_k - mean of H over the calls with the same p
                                                                 and the same instruction
        each decision of a call has the advantage of the call

    Means are over the other episodes of the group (leave one out; Ahmadian et al. 2024, arXiv:2402.14740), so
    that no baseline depends on what it is subtracted from. If no other episode has such a turn, the
    condition on the instruction is dropped, then that on p; if the group has no other episode, A = 0.
    With lam = 0 a call is credited with what was earned in it; lam = 1 adds all that came later.

    Needs `group`, `mask`, `step_rewards`, `agents`, and `instructions` to tell calls apart.
    """
    turns = list_turns(batch, "hierarchical_rloo")
    following = _returns_after(turns, gamma)
    advantage = np.zeros(batch.need_mask("hierarchical_rloo").shape, np.float32)
    for rows in batch.groups("hierarchical_rloo"):
        of_group = [number for number, turn in enumerate(turns) if turn.row in set(rows.tolist())]
        lead = {number: turns[number].earned + gamma * following[number] for number in of_group}
        calls = {
            number: turns[number].earned + lam * gamma * following[number]
            for number in of_group
            if len(turns[number].followers)
        }
        for number, baseline in _baselines(turns, lead, _leader_keys).items():
            advantage[turns[number].row, turns[number].steps[0]] = lead[number] - baseline
        for number, baseline in _baselines(turns, calls, _call_keys).items():
            advantage[turns[number].row, turns[number].followers] = calls[number] - baseline
    return Advantages(advantage, mask=batch.mask)


def list_turns(batch: RewardBatch, needed_by: str) -> list[Turn]:
    """Return the turns of all episodes, in order. Raises: ValueError without what they are made of."""
    mask, rewards = batch.need_mask(needed_by), batch.rewards_by_step(needed_by)
    agents = batch.need("agents", needed_by)
    told = batch.instructions
    turns: list[Turn] = []
    for row, acted in enumerate(mask):
        columns = np.flatnonzero(acted)
        if not len(columns):
            continue
        leads = agents[row, columns] == agents[row, columns[0]]
        before = 0.0
        for steps in np.split(columns, np.flatnonzero(leads)[1:]):
            earned = float(rewards[row, steps].sum())
            instruction = -1 if told is None or len(steps) < 2 else int(told[row, steps[1]])
            # Rounded, because sums of equal rewards in another order differ in their last bits.
            turns.append(Turn(row, steps, earned, round(before, 6), instruction))
            before += earned
    return turns


def _returns_after(turns: Sequence[Turn], gamma: float) -> list[float]:
    """Return the leader's discounted return behind each turn."""
    following = [0.0] * len(turns)
    for number in range(len(turns) - 2, -1, -1):
        if turns[number].row == turns[number + 1].row:
            following[number] = turns[number + 1].earned + gamma * following[number + 1]
    return following


def _leader_keys(turn: Turn) -> tuple[Key, ...]:
    return ((turn.before,), ())


def _call_keys(turn: Turn) -> tuple[Key, ...]:
    return ((turn.before, turn.instruction), (turn.before,), ())


def _baselines(
    turns: Sequence[Turn],
    values: Mapping[int, float],
    keys: Callable[[Turn], Iterable[Key]],
) -> dict[int, float]:
    """Return the baseline of each turn that other episodes can be compared with, by its number.

    It is the mean of the other episodes' values under the first of its keys that they have.
    """
    sums: dict[Key, dict[int, tuple[float, int]]] = {}
    for number, value in values.items():
        for key in keys(turns[number]):
            by_row = sums.setdefault(key, {})
            total, count = by_row.get(turns[number].row, (0.0, 0))
            by_row[turns[number].row] = total + value, count + 1
    found = {}
    for number in values:
        for key in keys(turns[number]):
            others = [pair for row, pair in sums[key].items() if row != turns[number].row]
            if others:
                found[number] = sum(each for each, _ in others) / sum(num for _, num in others)
                break
    return found
