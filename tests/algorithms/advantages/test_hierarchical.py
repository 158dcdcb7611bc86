"""A planner is credited with what followed from each turn on, a robot with what its calls earned."""

import math

import msgspec
import numpy as np
import pytest

from benchmarks.planner_game import NUM_GOALS, Tables, run_episodes, updates_needed
from vla_rl.algorithms import AdvantageConfig, RewardBatch, advantage_estimator, make_reward_batch
from vla_rl.algorithms.advantages.hierarchical import hierarchical_rloo
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

RIGHT, WRONG = (
    advantage_estimator(AdvantageConfig(name=name)) for name in ("hierarchical_rloo", "rloo")
)


def episode(number: int, *decisions: tuple[str, float]) -> Trajectory:
    """Who decided and what that earned; a robot's name is followed by what it was told."""
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    steps = []
    for who, earned in decisions:
        agent, _, told = who.partition(":")
        observation = {"instruction": told} if told else {}
        rewards = np.array([earned], np.float32)
        steps.append(Step(observation=observation, chunk=chunk, rewards=rewards, agent=agent))
    spec = EpisodeSpec(
        episode_id=number, group_id=0, member=number, env=EnvSpec(id="none"), task="none", seed=0,
        policy_seed=0,
    )  # fmt: skip
    return Trajectory(
        episode=spec, steps=tuple(steps), final_observation={}, stop_reason=StopReason.TERMINATED
    )


def advantages(*episodes: Trajectory, **settings: float) -> list[list[float]]:
    made = hierarchical_rloo(make_reward_batch(episodes), **settings)
    return [np.asarray(row).tolist() for row in made.per_trajectory()]


def test_a_turn_is_compared_with_the_others_that_began_in_the_same_situation() -> None:
    one = episode(0, ("p", 0.0), ("r:a", 0.5), ("p", 0.0), ("r:b", 0.5), ("p", 1.0))
    other = episode(1, ("p", 0.0), ("r:a", 0.5), ("p", 0.0), ("r:b", 0.0), ("p", 0.0))
    # From the first turn on 2 and 0.5 were earned; from the second on 1.5 and 0 where 0.5 was there. The
    # other's third turn began with 0.5 as well, so it is in the first one's baseline, and the first one's
    # third turn, which alone began with 1, is compared with all turns of the other.
    assert advantages(one, other) == [
        [1.5, 0.0, 1.5, 0.5, pytest.approx(1.0 - 0.5 / 3)],
        [-1.5, 0.0, -1.5, -0.5, -1.5],
    ]


def test_a_robot_that_did_what_it_was_told_does_not_pay_for_the_plan() -> None:
    good = episode(0, ("p", 0.0), ("r:a", 1.0))
    bad = episode(1, ("p", 0.0), ("r:b", 0.0))
    same = [episode(number, ("p", 0.0), ("r:b", 0.0)) for number in (2, 3)]
    made = advantages(good, bad, *same)
    # Calls of b earned nothing anywhere: nothing is learnt from them, however well that of a went.
    assert [row[1] for row in made] == [1.0, 0.0, 0.0, 0.0]
    assert [row[0] for row in made] == [1.0, *[pytest.approx(-1 / 3)] * 3]


def test_what_came_after_a_call_counts_for_it_only_with_lam() -> None:
    one = episode(0, ("p", 0.0), ("r:a", 0.0), ("p", 1.0))
    other = episode(1, ("p", 0.0), ("r:a", 0.0), ("p", 0.0))
    assert [row[1] for row in advantages(one, other)] == [0.0, 0.0]
    assert [row[1] for row in advantages(one, other, lam=0.5)] == [0.5, -0.5]
    assert [row[1] for row in advantages(one, other, lam=1.0, gamma=0.5)] == [0.5, -0.5]


def test_the_same_words_are_one_instruction_whatever_their_case_and_spaces() -> None:
    one = episode(0, ("p", 0.0), ("r:Open  the drawer", 1.0))
    other = episode(1, ("p", 0.0), ("r:open the drawer", 0.0))
    third = episode(2, ("p", 0.0), ("r:shut the drawer", 1.0))
    # The call of other words has nothing of its own to be compared with: all calls of the situation are.
    assert [row[1] for row in advantages(one, other, third)] == [1.0, -1.0, 0.5]


def test_an_episode_alone_and_episodes_that_earned_the_same_give_no_signal() -> None:
    alone = episode(0, ("p", 0.0), ("r:a", 1.0), ("p", 1.0))
    assert advantages(alone) == [[0.0, 0.0, 0.0]]
    assert not np.any(advantages(alone, msgspec.structs.replace(alone)))


def test_baselines_do_not_depend_on_what_they_are_subtracted_from() -> None:
    def first_advantage(earned: float) -> float:
        one = episode(0, ("p", 0.0), ("r:a", earned), ("p", 0.0), ("r:a", 0.0))
        return advantages(one, episode(1, ("p", 0.0), ("r:a", 0.25)))[0][1]

    # One more for the call is one more for its advantage: nothing of it is in its own baseline.
    assert first_advantage(1.0) - first_advantage(0.0) == 1.0


def test_a_batch_without_agents_is_refused_by_name() -> None:
    batch = RewardBatch(rewards=np.zeros(2), group=np.zeros(2, int), mask=np.ones((2, 1), bool))
    with pytest.raises(ValueError, match=r"'hierarchical_rloo' needs RewardBatch.agents"):
        hierarchical_rloo(batch)


def test_the_known_optimum_of_the_game_solves_every_episode() -> None:
    tables = Tables.start()
    assert 0.0 < tables.success_rate() < 0.01
    tables.robot[:, :, 0] = 50.0
    np.fill_diagonal(tables.planner, 50.0)
    tables.planner[NUM_GOALS, :] = 0.0
    tables.planner[NUM_GOALS, -1] = 50.0
    assert math.isclose(tables.success_rate(), 1.0, abs_tol=1e-9)
    sampled = run_episodes(tables, np.random.default_rng(0), groups=1, group_size=4)
    assert sampled.batch.rewards.tolist() == [pytest.approx(2.0)] * 4


def test_the_probability_of_success_is_that_of_sampled_episodes() -> None:
    tables, rng = Tables.start(), np.random.default_rng(1)
    tables.planner[range(NUM_GOALS), range(NUM_GOALS)] = 2.0
    tables.planner[NUM_GOALS, -1] = 1.0
    tables.robot[:, :, 0] = 1.5
    sampled = run_episodes(tables, rng, groups=1, group_size=20_000).batch.rewards > 1.5
    assert sampled.mean() == pytest.approx(tables.success_rate(), abs=0.015)


def test_one_advantage_for_all_learns_slower_in_the_small_game() -> None:
    """The wrong credit at the same learning rate, and at the best of each."""
    rates, seeds = (2.0, 4.0, 8.0), range(3)
    right, wrong = (
        {
            rate: float(np.mean([updates_needed(each, seed, rate, most=150) for seed in seeds]))
            for rate in rates
        }
        for each in (RIGHT, WRONG)
    )
    assert all(right[rate] < wrong[rate] for rate in rates)
    assert min(right.values()) / min(wrong.values()) <= 0.8
    assert max(right.values()) < 150
