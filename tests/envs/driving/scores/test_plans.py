"""Plans from any planner, and rewards made of sub-scores."""

from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.driving.scores.pdm import measure_backward, parse_reward, weigh_reward
from vla_rl.envs.driving.scores.scene_files import check_waypoints, read_plans


def ahead(count: int = 1) -> np.ndarray:
    """Waypoints of a car that drives straight on at 10 m/s."""
    waypoints = np.zeros((count, 8, 3))
    waypoints[..., 0] = 5.0 * np.arange(1, 9)
    return waypoints


def test_plans_are_read_by_the_scenes_tokens(tmp_path: Path) -> None:
    path = tmp_path / "plans.npz"
    np.savez(path, tokens=np.array(["a", "b"]), waypoints=ahead(2), interval_s=0.5)
    plans = read_plans(path)
    assert list(plans) == ["a", "b"]
    np.testing.assert_array_equal(plans["b"], ahead()[0])


def test_a_file_that_holds_no_plans_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plans.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"plans\.npz is no file of plans"):
        read_plans(path)
    np.savez(path, tokens=np.array(["a", "a"]), waypoints=ahead(2), interval_s=0.5)
    with pytest.raises(ValueError, match="2 tokens, 1 of them different"):
        read_plans(path)
    np.savez(path, tokens=np.array([b"a"]), waypoints=ahead(), interval_s=0.5)
    with pytest.raises(ValueError, match=r"tokens holds \|S1, expected text"):
        read_plans(path)
    np.savez(path, tokens=np.array(["a"]), waypoints=ahead(), interval_s=0.1)
    with pytest.raises(ValueError, match=r"plans\.npz: waypoints are 0\.1 s apart"):
        read_plans(path)


def test_plans_of_another_rate_not_finite_or_jumping_back_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 40, 3\), expected \[B, 8, 3\]"):
        check_waypoints(np.zeros((1, 40, 3)))
    broken = ahead(3)
    broken[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"trajectories \[1\] are not finite"):
        check_waypoints(broken)
    jumping = ahead(3)
    jumping[2, 7, 0] = 30.0  # 5 m behind waypoint 7
    with pytest.raises(ValueError, match=r"waypoint 8 of trajectory 2 lies 5\.0 m behind"):
        check_waypoints(jumping)


def test_backward_metres_are_measured_along_each_waypoints_heading() -> None:
    waypoints = ahead()
    waypoints[0, :, 2] = np.pi / 2  # crab-wise: after the first, the car moves to its right
    assert measure_backward(waypoints).max() < 1e-12
    waypoints[0, 7, 1] = -3.0
    np.testing.assert_allclose(measure_backward(waypoints)[0, 7], 3.0)


def test_a_reward_weighs_the_sub_scores_that_it_names() -> None:
    score = {"total": 0.5, "ego_progress": 0.8, "lane_keeping": 1.0}
    for text, expected in (
        ("total", 0.5),
        ("ego_progress", 0.8),
        ("ego_progress=0.5, lane_keeping=-1", -0.6),
    ):
        assert weigh_reward(parse_reward(text, "epdms_v2"), score) == pytest.approx(expected)
    with pytest.raises(ValueError, match="names 'speed', expected one of total"):
        parse_reward("speed=1", "epdms_v2")
    with pytest.raises(ValueError, match="weight of total is 'much', expected a number"):
        parse_reward("total=much", "epdms_v2")
    with pytest.raises(ValueError, match="names 'total' twice"):
        parse_reward("total,total=2", "epdms_v2")
