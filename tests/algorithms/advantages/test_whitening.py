"""Check whitening against numbers worked out by hand."""

import numpy as np

from vla_rl.algorithms.advantages import whiten_values


def test_whitening_by_hand_and_where_there_is_nothing_to_scale() -> None:
    mask = np.array([[True, True, False]])
    np.testing.assert_allclose(
        whiten_values(np.array([[1.0, 3.0, np.nan]]), mask), [[-(0.5**0.5), 0.5**0.5, 0.0]]
    )
    assert whiten_values(np.array([[5.0, 5.0, 5.0]]), mask).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten_values(
        np.array([[5.0, 5.0, 5.0]]), np.array([[True, False, False]])
    ).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten_values(np.zeros((0, 3)), np.zeros((0, 3), bool)).shape == (0, 3)


def test_whitening_divides_by_the_root_of_the_variance_and_a_little() -> None:
    mask = np.array([[True, True, False]])
    # 0 and 2e-4: mean 1e-4, variance over n - 1 2e-8
    found = whiten_values(np.array([[0.0, 2e-4, 7.0]]), mask)
    expected = 1e-4 / np.sqrt(2e-8 + 1e-8)
    np.testing.assert_allclose(found, [[-expected, expected, 0.0]])
    # equal values whose mean differs from them by rounding
    assert whiten_values(np.array([[0.1 + 0.2] * 3]), np.ones((1, 3), bool)).tolist() == [[0.0] * 3]
    assert whiten_values(np.array([[5.0, 1.0]]), np.array([[True, False]])).tolist() == [[0.0, 0.0]]
