"""Statistics of actions have the form of public files, with the gripper as OpenVLA counts it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from vla_rl.datasets.episode import RecordedEpisode, compute_statistics
from vla_rl.datasets.lerobot.writing import Stats, _compute_pixel_stats, merge_stats, read_stats
from vla_rl.errors import DataError


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


ROWS = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=1, max_size=8)


def assert_close(found: Stats, expected: Stats) -> None:
    assert found.count == expected.count
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name
        )


def test_statistics_by_hand() -> None:
    found = Stats.from_rows(np.array([[1, 10], [3, 10]], np.int64))
    assert found.min.tolist() == [1.0, 10.0]
    assert found.max.tolist() == [3.0, 10.0]
    assert found.mean.tolist() == [2.0, 10.0]
    assert found.std.tolist() == [1.0, 0.0]
    assert found.count == 2


@given(ROWS, ROWS)
def test_both_parts_together_have_the_statistics_of_all_rows(one: list, other: list) -> None:
    a, b = np.array(one), np.array(other)
    together = Stats.from_rows(a).with_more(Stats.from_rows(b))
    assert_close(together, Stats.from_rows(np.concatenate([a, b])))


def test_plain_values_give_the_statistics_back() -> None:
    stats = Stats.from_rows(np.array([[1.0, 2.0], [5.0, 4.0]]))
    assert_close(Stats.from_values(stats.values(), "here"), stats)


def test_a_feature_of_one_part_alone_keeps_its_statistics() -> None:
    one, other = Stats.from_rows(np.array([[1.0]])), Stats.from_rows(np.array([[3.0]]))
    found = merge_stats({"a": one}, {"a": other, "b": other})
    assert found["a"].mean.tolist() == [2.0]
    assert found["b"] is other


def test_pixels_are_scaled_to_one_and_counted_by_frame() -> None:
    pixels = np.array([[0, 255, 51], [255, 255, 153]], np.uint8)
    found = _compute_pixel_stats(pixels, num_frames=1)
    assert found.mean.shape == (3, 1, 1)
    assert found.mean[:, 0, 0] == pytest.approx([0.5, 1.0, 0.4])
    assert found.std[:, 0, 0] == pytest.approx([0.5, 0.0, 0.2])
    assert found.min[:, 0, 0] == pytest.approx([0.0, 1.0, 0.2])
    assert found.count == 1


def test_statistics_that_another_program_did_not_write_are_missed_by_name(tmp_path: Path) -> None:
    row = {f"stats/action/{kind}": [1.0] for kind in ("min", "max", "mean", "count")}
    with pytest.raises(DataError, match=r"no 'stats/action/std' of episode 4, expected statistics"):
        read_stats({**row, "episode_index": 4}, ["action"], tmp_path)
    found = read_stats({**row, "stats/action/std": [0.5]}, ["action"], tmp_path)
    assert found["action"].std.tolist() == [0.5]
