"""Actions between -1 and 1 are moves from one waypoint to the next."""

import numpy as np

from vla_rl.envs.driving.plan_actions import HIGHEST_MOVE, LOWEST_MOVE, decode_moves, encode_moves


def test_the_bounds_of_an_action_are_the_bounds_of_a_move() -> None:
    assert np.allclose(decode_moves(np.full((1, 3), -1.0)), [LOWEST_MOVE])
    assert np.allclose(decode_moves(np.full((1, 3), 1.0)), [HIGHEST_MOVE])
    assert np.allclose(decode_moves(np.full((1, 3), 7.0)), [HIGHEST_MOVE])


def test_a_move_is_in_the_frame_of_the_waypoint_before_it() -> None:
    def action(ahead: float, left: float, turn: float) -> np.ndarray:
        return (
            2.0 * (np.array([ahead, left, turn]) - LOWEST_MOVE) / (HIGHEST_MOVE - LOWEST_MOVE) - 1.0
        )

    turned = decode_moves(np.stack([action(0.0, 0.0, 0.5), action(2.0, 0.0, 0.0)]))
    assert np.allclose(turned, [[0.0, 0.0, 0.5], [2.0 * np.cos(0.5), 2.0 * np.sin(0.5), 0.5]])


def test_poses_in_any_frame_give_the_actions_that_made_them() -> None:
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (8, 3)).astype(np.float32)
    made = np.concatenate([np.zeros((1, 3)), decode_moves(actions)])
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])  # a quarter turn to the left
    moved = np.concatenate([made[:, :2] @ turn.T + [5.0, -3.0], made[:, 2:] + np.pi / 2], axis=1)
    assert np.allclose(encode_moves(moved), actions, atol=1e-5)
    assert encode_moves(moved).dtype == np.float32


def test_a_move_beyond_the_bounds_is_clipped() -> None:
    poses = np.array([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert encode_moves(poses)[0, 0] == 1.0
