"""Action tokens: the table of the public checkpoints, and what bounds and gripper do to it."""

import numpy as np
import pytest
from libero_bounds import LIBERO_BOUNDS

from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import ActionBounds, ActionTokenizer, unit_bounds


@pytest.mark.parametrize(
    ("action", "token", "decoded"),
    [
        (-1.5, 31999, -254 / 255),
        (-1.0, 31999, -254 / 255),
        (-0.5, 31936, -128 / 255),
        (0.0, 31872, 0.0),
        (0.5, 31808, 128 / 255),
        (0.999, 31745, 254 / 255),
        (1.0, 31744, 254 / 255),
        (1.5, 31744, 254 / 255),
    ],
)
def test_numbers_become_the_tokens_that_the_public_checkpoints_use(
    action: float, token: int, decoded: float
) -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    assert tokens.encode([[action]]).tolist() == [[token]]
    np.testing.assert_allclose(tokens.decode(np.array([[token]])), [[decoded]], atol=1e-7)


def test_a_round_trip_is_off_by_at_most_half_a_bin() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    actions = np.linspace(-1, 1, 1001)[:, None]
    assert np.abs(tokens.decode(tokens.encode(actions)) - actions).max() <= 1 / 255 + 1e-5


def test_larger_token_ids_are_smaller_actions() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    decoded = tokens.decode(np.arange(31745, 32000)[:, None])[:, 0]
    assert (np.diff(decoded) < 0).all()


def test_ids_that_are_no_action_decode_to_the_nearest_bin() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    assert (
        tokens.decode(np.array([[5], [32063]])).tolist()
        == tokens.decode(np.array([[31744], [31999]])).tolist()
    )


def test_scaled_dimensions_span_their_bounds_and_others_are_taken_as_they_are() -> None:
    bounds = ActionBounds(low=(10.0, 0.0), high=(20.0, 1.0), is_scaled=(True, False))
    tokens = ActionTokenizer(1024, 256, bounds)
    # the middle of [10, 20] is 0 for the model, whose token is 1024 - 128; 0.5 unscaled is 1024 -
    # 192
    assert tokens.encode([[15.0, 0.5]]).tolist() == [[896, 832]]
    np.testing.assert_allclose(
        tokens.decode(np.array([[896, 832]])), [[15.0, 128 / 255]], atol=1e-6
    )


def test_the_openvla_gripper_is_zero_to_close_and_libero_wants_plus_one() -> None:
    tokens = ActionTokenizer(32000, 256, LIBERO_BOUNDS["libero_goal"])
    closing, opening = np.zeros((1, 7)), np.zeros((1, 7))
    closing[0, 6], opening[0, 6] = 1.0, -1.0
    assert tokens.encode(closing)[0, 6] == 31872  # the label 0
    assert tokens.encode(opening)[0, 6] == 31744  # the label 1
    assert tokens.decode(tokens.encode(closing))[0, 6] == 1.0
    assert tokens.decode(tokens.encode(opening))[0, 6] == -1.0


def test_unnormalisation_is_done_in_float64() -> None:
    bounds = LIBERO_BOUNDS["libero_spatial"]
    tokens = ActionTokenizer(32000, 256, bounds)
    centre = np.float64(2 * 200 + 1) / 255 - 1  # bin 200 of 0..254
    expected = 0.5 * (centre + 1) * (
        np.array(bounds.high[:6]) - np.array(bounds.low[:6])
    ) + np.array(bounds.low[:6])
    decoded = tokens.decode(np.full((1, 7), 32000 - 201))[0, :6]
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


def test_actions_of_another_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="actions have 3 dimensions, expected 7"):
        ActionTokenizer(32000, 256, unit_bounds(7)).encode(np.zeros((8, 3)))


def test_bounds_that_fall_are_refused() -> None:
    with pytest.raises(ConfigError, match="high is"):
        ActionBounds(low=(0.0, 1.0), high=(1.0, 0.9), is_scaled=(True, True))
