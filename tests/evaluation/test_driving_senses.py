"""The observations that `benchmarks.driving_senses` mixes of two scenes."""

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_senses import with_other_motion, with_other_picture


def test_a_sense_of_another_scene_leaves_the_others_alone() -> None:
    env = gymnasium.make("vla_rl/driving-v0", split="held_out", image_size=32, route_points=2)
    own, other = (env.reset(options={"init_state_id": number})[0] for number in (0, 7))
    pictured, moved = with_other_picture(own, other), with_other_motion(own, other)
    np.testing.assert_array_equal(pictured["image"], other["image"])
    np.testing.assert_array_equal(pictured["state"], own["state"])
    np.testing.assert_array_equal(moved["image"], own["image"])
    np.testing.assert_array_equal(moved["state"][:10], other["state"][:10])
    np.testing.assert_array_equal(moved["state"][10:], own["state"][10:])
    assert moved["instruction"] == other["instruction"]
