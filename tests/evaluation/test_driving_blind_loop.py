"""Drivers that see nothing, in closed loop."""

import gymnasium
import pytest

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_blind_loop import FULL_PULL, drive, pull_towards


def test_a_driver_brakes_above_the_speed_and_pulls_below_it() -> None:
    assert pull_towards(4.0, 7.0) == -2.0
    assert pull_towards(4.0, 2.5) == 1.0
    assert pull_towards(3.0, 15.0) == -FULL_PULL


@pytest.mark.parametrize(("speed", "arrives"), [(3.5, True), (1.0, False)])
def test_a_slow_driver_arrives_on_a_straight_road_if_its_speed_is_enough(
    speed: float, arrives: bool
) -> None:
    env = gymnasium.make(
        "vla_rl/driving_waypoints-v0",
        split="held_out",
        kind="straight",
        action="along_route",
        image_size=16,
    ).unwrapped
    score, is_success = drive(env, 0, speed)
    assert is_success == arrives
    assert (score == 1.0) == arrives
