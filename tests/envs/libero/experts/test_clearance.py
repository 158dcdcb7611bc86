"""Check how high a hand and its way have to be, worked out by hand on boxes."""

import numpy as np
import pytest

from vla_rl.envs.libero.experts.geometry import get_highest_on_way, get_lowest_height


def test_the_palm_stays_above_what_is_below_it() -> None:
    post = np.array([[0.08, 0.0, 0.3]])
    assert get_lowest_height(post, np.zeros(2), yaw=0.0) == pytest.approx(0.3 - 0.028)
    assert get_lowest_height(post, np.zeros(2), yaw=np.pi / 2) == -np.inf


def test_the_way_is_as_high_as_what_stands_near_it() -> None:
    cloud = np.array([[0.5, 0.05, 0.7], [0.5, 0.3, 0.9]])
    assert get_highest_on_way(cloud, np.zeros(3), np.array([1.0, 0.0, 0.0]), 0.1) == 0.7
