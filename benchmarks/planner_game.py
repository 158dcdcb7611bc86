"""A game of a planner and a robot in tables, with a known optimum, for estimators of their advantages.

Goals have to be reached in their order. The planner reads how many are reached, and either gives one of the
instructions or finishes. The robot reads the instruction, and chooses `NUM_CHUNKS` actions, of which exactly
one row does what was asked for. The optimum gives the instruction of each goal once, and finishes: then
every episode is solved. Both are tables of logits that follow the policy gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms import RewardBatch
from vla_rl.algorithms.advantages import Advantages

NUM_GOALS: Final = 3
NUM_INSTRUCTIONS: Final = 5
NUM_ACTIONS: Final = 2
NUM_CHUNKS: Final = 2
NUM_TURNS: Final = 8
NUM_GROUPS: Final = 2
GROUP_SIZE: Final = 4
PLANNER: Final = 0
ROBOT: Final = 1
COLUMNS: Final = 1 + NUM_CHUNKS
"""Decisions of a turn: the planner's, and those of the robot."""

Floats = NDArray[np.float64]
Estimator = Callable[[RewardBatch], Advantages]


@dataclass(frozen=True)
class Tables:
    """Logits of both policies; the instruction after the last is to finish."""

    planner: Floats
    """float64 [goals + 1, instructions + 1]."""

    robot: Floats
    """float64 [instructions, chunks, actions]; action 0 is the right one everywhere."""

    @classmethod
    def start(cls) -> "Tables":
        """Return tables that choose evenly."""
        return cls(
            np.zeros((NUM_GOALS + 1, NUM_INSTRUCTIONS + 1)),
            np.zeros((NUM_INSTRUCTIONS, NUM_CHUNKS, NUM_ACTIONS)),
        )

    def success_rate(self) -> float:
        """Return the probability that an episode is solved, without sampling."""
        plan, act = softmax(self.planner), softmax(self.robot)
        works = act[:, :, 0].prod(axis=1)
        solved = np.zeros(NUM_GOALS + 1)
        for _ in range(NUM_TURNS):
            following = np.zeros_like(solved)
            for reached in range(NUM_GOALS + 1):
                finish = plan[reached, -1]
                gain = plan[reached, reached] * works[reached] if reached < NUM_GOALS else 0.0
                following[reached] = (
                    finish * (reached == NUM_GOALS)
                    + gain * solved[min(reached + 1, NUM_GOALS)]
                    + (1.0 - finish - gain) * solved[reached]
                )
            solved = following
        return float(solved[0])


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of logits over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Episodes:
    """N episodes by turn: the choices, and the situations in which they were made."""

    batch: RewardBatch
    reached: NDArray[np.intp]
    """int [N, turns], goals reached before the turn."""

    told: NDArray[np.intp]
    """int [N, turns], what the planner chose."""

    actions: NDArray[np.intp]
    """int [N, turns, chunks], what the robot chose."""

    is_taken: NDArray[np.bool_]
    """bool [N, turns], False after the end."""

    is_call: NDArray[np.bool_]
    """bool [N, turns], True where the robot acted."""


def run_episodes(
    tables: Tables, rng: np.random.Generator, groups: int, group_size: int
) -> Episodes:
    """Run `groups * group_size` episodes."""
    num = groups * group_size
    plan, act = softmax(tables.planner), softmax(tables.robot)
    reached, told = np.zeros((num, NUM_TURNS), np.intp), np.zeros((num, NUM_TURNS), np.intp)
    actions = np.zeros((num, NUM_TURNS, NUM_CHUNKS), np.intp)
    is_taken, is_call = np.zeros((num, NUM_TURNS), bool), np.zeros((num, NUM_TURNS), bool)
    rewards = np.zeros((num, NUM_TURNS, COLUMNS))
    goals, is_open = np.zeros(num, np.intp), np.ones(num, bool)
    for turn in range(NUM_TURNS):
        reached[:, turn], is_taken[:, turn] = goals, is_open
        said = draw(rng, plan[goals])
        told[:, turn], is_call[:, turn] = said, is_open & (said < NUM_INSTRUCTIONS)
        chosen = draw(rng, act[np.minimum(said, NUM_INSTRUCTIONS - 1)])
        actions[:, turn] = chosen
        gains = is_call[:, turn] & (chosen == 0).all(axis=1) & (said == goals) & (goals < NUM_GOALS)
        rewards[gains, turn, -1] = 1.0 / NUM_GOALS
        ends = is_open & (said == NUM_INSTRUCTIONS)
        rewards[ends & (goals == NUM_GOALS), turn, 0] = 1.0
        goals, is_open = goals + gains, is_open & ~ends
    mask = np.repeat(is_call[:, :, None], COLUMNS, axis=2)
    mask[:, :, 0] = is_taken
    shape = num, NUM_TURNS * COLUMNS
    agents = np.broadcast_to(np.array([PLANNER] + [ROBOT] * NUM_CHUNKS), mask.shape)
    batch = RewardBatch(
        rewards=rewards.sum(axis=(1, 2)),
        group=np.repeat(np.arange(groups), group_size),
        mask=mask.reshape(shape),
        step_rewards=rewards.reshape(shape),
        agents=agents.reshape(shape),
        instructions=np.repeat(told[:, :, None], COLUMNS, axis=2).reshape(shape),
    )
    return Episodes(batch, reached, told, actions, is_taken, is_call)


def draw(rng: np.random.Generator, probabilities: Floats) -> NDArray[np.intp]:
    """Draw an index of the last axis for each row."""
    below = probabilities.cumsum(axis=-1)
    return np.asarray((rng.random((*below.shape[:-1], 1)) < below).argmax(axis=-1), np.intp)


def learn(tables: Tables, episodes: Episodes, advantages: Advantages, lr: float) -> Tables:
    """Return the tables after one step along the policy gradient, averaged over each one's decisions.

    Advantages are scaled to a standard deviation of 1, so that a learning rate means the same for every
    estimator.
    """
    by_turn = advantages.advantage.astype(np.float64).reshape(-1, NUM_TURNS, COLUMNS)
    acted = by_turn[by_turn != 0.0]
    by_turn = by_turn / max(float(acted.std()) if len(acted) else 0.0, 1e-6)
    planner = np.zeros_like(tables.planner)
    rows, turns = np.nonzero(episodes.is_taken)
    states, said = episodes.reached[rows, turns], episodes.told[rows, turns]
    push = -softmax(tables.planner)[states]
    push[np.arange(len(said)), said] += 1.0
    np.add.at(planner, states, push * by_turn[rows, turns, :1] / max(len(rows), 1))
    robot = np.zeros_like(tables.robot)
    rows, turns = np.nonzero(episodes.is_call)
    said, chosen = episodes.told[rows, turns], episodes.actions[rows, turns]
    pull = -softmax(tables.robot)[said]
    np.put_along_axis(
        pull, chosen[:, :, None], np.take_along_axis(pull, chosen[:, :, None], 2) + 1.0, 2
    )
    np.add.at(robot, said, pull * by_turn[rows, turns, 1:, None] / max(len(rows), 1))
    return Tables(tables.planner + lr * planner, tables.robot + lr * robot)


def updates_needed(
    estimate: Estimator, seed: int, lr: float, *, goal: float = 0.8, most: int = 300
) -> int:
    """Return the updates until `goal` of the episodes are solved; `most` if they never are."""
    tables, rng = Tables.start(), np.random.default_rng(seed)
    for update in range(most):
        if tables.success_rate() >= goal:
            return update
        episodes = run_episodes(tables, rng, groups=NUM_GROUPS, group_size=GROUP_SIZE)
        tables = learn(tables, episodes, estimate(episodes.batch), lr)
    return most
