"""Log-probs that no policy can have are found, by position."""

import numpy as np
import pytest

from vla_rl.types import MAX_LOG_PROB
from vla_rl.types.log_probs import first_impossible

IDS = np.array([3, 1, 2])


@pytest.mark.parametrize("impossible", [np.nan, np.inf, -np.inf, 2 * MAX_LOG_PROB])
def test_the_first_impossible_log_prob_of_a_token_is_found(impossible: float) -> None:
    log_probs = np.array([-0.5, impossible, impossible], np.float32)
    assert first_impossible(log_probs, IDS) == 1


def test_a_certain_token_may_be_rounded_to_a_little_above_zero() -> None:
    log_probs = np.array([-0.5, 0.0, MAX_LOG_PROB / 2], np.float32)
    assert first_impossible(log_probs, IDS) is None


def test_the_density_of_a_number_may_be_above_one() -> None:
    numbers = np.array([0.1, 0.2, 0.3], np.float32)
    assert first_impossible(np.array([2.0, -1.0, 5.0]), numbers) is None
    assert first_impossible(np.array([2.0, -1.0, np.inf]), numbers) == 2
