"""A difference that a known mistake makes is named by it, and no other one is."""

import numpy as np
import pytest

from vla_rl.evaluation.parity.hints import hint

PICTURE = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (PICTURE[::-1, ::-1], "turned by 180 degrees"),
        (PICTURE[::-1], "upside down"),
        (PICTURE[:, ::-1], "mirrored"),
        (np.rot90(PICTURE), "turned by 90 degrees"),
        (np.rot90(PICTURE, 3), "turned by 270 degrees"),
        (PICTURE[..., ::-1], "in BGR instead of RGB"),
    ],
)
def test_a_picture_that_was_turned_is_named_by_its_turn(second: np.ndarray, words: str) -> None:
    assert hint("image", PICTURE, second) == f"the second picture is the first one {words}"


def test_small_differences_all_over_are_those_of_two_codecs() -> None:
    near = np.clip(PICTURE.astype(int) + 3, 0, 255).astype(np.uint8)
    assert "two codecs" in (hint("image", PICTURE, near) or "")
    assert hint("image", PICTURE, 255 - PICTURE) is None
    assert hint("image", PICTURE, PICTURE[:3]) is None


def test_one_rotation_with_two_axes_is_named() -> None:
    # a turn by 3 about z is one by 2 pi - 3 about -z
    first = np.array([0.1, 0.2, 0.3, 0.0, 0.0, 3.0, 0.04, -0.04])
    second = first.copy()
    second[5] = 3.0 - 2 * np.pi
    assert "quaternions have opposite signs" in (hint("state", first, second) or "")
    second[0] += 0.1
    assert hint("state", first, second) is None


ACTIONS = np.array([[0.1, -0.2, 1.0], [0.3, 0.4, -1.0], [-0.5, 0.6, 1.0]])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (ACTIONS * [1, 1, -1], "only the gripper differs, by its sign"),
        (ACTIONS * [1, 1, 0.5], "only the gripper differs"),
        (ACTIONS * 2.0 + 0.5, "the second is the first times 2 plus 0.5"),
        (ACTIONS * [2.0, 3.0, 4.0] + [0.5, 0.0, 1.0], "each dimension is scaled and shifted"),
    ],
)
def test_actions_are_compared_by_gripper_scale_and_statistics(
    second: np.ndarray, words: str
) -> None:
    assert (hint("action", ACTIONS, second) or "").startswith(words)


def test_two_decisions_are_too_few_to_see_a_scale_in_each_dimension() -> None:
    # a line passes through any two points
    assert hint("action", ACTIONS[:2], np.array([[0.7, 0.1, 0.2], [-0.9, 0.8, 0.3]])) is None


def test_other_boundaries_and_shapes_have_no_hint() -> None:
    assert hint("log_probs", ACTIONS, ACTIONS * 2.0) is None
    assert hint("action", ACTIONS, ACTIONS[:2]) is None
