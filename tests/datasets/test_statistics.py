"""Statistics of actions have the form of public files, with the gripper as OpenVLA counts it."""

import json

import numpy as np
import pytest

from vla_rl.datasets.episode import RecordedEpisode, compute_statistics


def episode(actions: list[list[float]], *, gripper: bool = True, **vectors) -> RecordedEpisode:
    return RecordedEpisode(
        name="one",
        instruction="go",
        actions=np.array(actions, np.float32),
        vectors={key: np.array(values, np.float32) for key, values in vectors.items()},
        frames={},
        has_gripper=gripper,
    )


def test_the_gripper_counts_from_zero_to_one_and_is_not_scaled() -> None:
    found = compute_statistics([episode([[1.0, 1.0], [3.0, -1.0]]), episode([[5.0, -1.0]])])
    assert found["num_transitions"] == 3
    assert found["num_trajectories"] == 2
    action = found["action"]
    assert action["mask"] == [True, False]
    # +1 closes, which is 0; -1 opens, which is 1
    assert action["mean"] == pytest.approx([3.0, 2 / 3])
    assert (action["min"], action["max"]) == ([1.0, 0.0], [5.0, 1.0])
    assert action["std"] == pytest.approx([(8 / 3) ** 0.5, (2 / 9) ** 0.5])
    assert action["q01"][0] == pytest.approx(1.04)  # 1 % of the way along two steps of 2
    assert action["q99"][0] == pytest.approx(4.96)


def test_without_a_gripper_all_numbers_are_scaled() -> None:
    found = compute_statistics([episode([[1.0, 1.0], [3.0, -1.0]], gripper=False)])
    assert found["action"]["mask"] == [True, True]
    assert found["action"]["mean"] == [2.0, 0.0]


def test_an_action_of_one_number_has_no_gripper() -> None:
    found = compute_statistics([episode([[-1.0], [1.0]])])
    assert (found["action"]["mask"], found["action"]["min"]) == ([True], [-1.0])


def test_states_are_reported_only_if_every_episode_has_them() -> None:
    with_state = episode([[0.0, 1.0]], state=[[4.0, 5.0, 6.0]])
    without = episode([[0.0, 1.0]])
    assert compute_statistics([with_state])["proprio"]["max"] == [4.0, 5.0, 6.0]
    assert "proprio" not in compute_statistics([with_state, without])
    assert "proprio" not in compute_statistics([with_state], state_key="joints")


def test_the_recorded_actions_stay_as_they_are_and_the_numbers_are_plain() -> None:
    one = episode([[1.0, 1.0]])
    json.dumps(compute_statistics([one]))
    assert one.actions.tolist() == [[1.0, 1.0]]
