"""Check where the hand points and how it is commanded, worked out by hand."""

import numpy as np
import pytest

from vla_rl.envs.libero.experts.motions import (
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
    make_command,
)
from vla_rl.envs.libero.experts.picking import get_nearest_half_turn


def test_the_hand_points_where_it_is_told_and_turns_the_short_way() -> None:
    rotation = get_pointing(np.array([0.0, -2.0, 0.0]), np.array([0.0, 0.3, 1.0]))
    np.testing.assert_allclose(rotation[:, 2], [0, -1, 0])
    np.testing.assert_allclose(rotation[:, 0], [0, 0, 1], atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    np.testing.assert_allclose(
        get_nearest_turn(get_pointing_down(np.pi), get_pointing_down(0.0)),
        get_pointing_down(0.0),
        atol=1e-12,
    )
    assert get_nearest_half_turn(3.0) == pytest.approx(3.0 - np.pi)


def test_a_command_is_proportional_and_clipped() -> None:
    action = make_command(np.array([0.01, -1.0, 0.0]), np.array([0.0, 0.0, 0.25]), 1.0)
    # 2.6 / 5 cm of 1 cm is 0.52, 1.2 / 0.5 rad of 0.25 rad is 0.6
    np.testing.assert_allclose(action, [0.52, -1.0, 0.0, 0.0, 0.0, 0.6, 1.0], atol=1e-6)
    assert action.dtype == np.float32
