"""Values and returns of a critic are checked where they enter, and errors name episode and decision."""

import numpy as np
import pytest
from small_episodes import trajectory

from vla_rl.learner.finiteness import TrajectoryValues, require_returns, require_values

TWO = trajectory([[1.0], [2.0]], number=7)


def judged(*values: float, bootstrap: float = 0.0) -> TrajectoryValues:
    return TrajectoryValues(np.array(values, np.float32), bootstrap)


def test_one_finite_value_for_each_decision_passes() -> None:
    require_values([TWO], [judged(0.5, 1.5, bootstrap=2.0)])
    require_returns([TWO], [np.array([3.0, 2.0])])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (judged(0.5), r"values of episode 7 are \[1\], expected \[2\]: one for each decision"),
        (judged(0.5, float("nan")), "values of episode 7 hold nan at decision 1, .* value_scale"),
        (
            judged(0.5, 0.5, bootstrap=float("inf")),
            "final observation of episode 7 is inf, expected a finite number",
        ),
    ],
)
def test_values_that_cannot_be_learnt_from_are_refused(
    values: TrajectoryValues, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_values([TWO], [values])


def test_returns_that_cannot_be_learnt_from_are_refused() -> None:
    with pytest.raises(ValueError, match=r"returns of episode 7 are \[2, 1\], expected \[2\]"):
        require_returns([TWO], [np.zeros((2, 1))])
    with pytest.raises(ValueError, match=r"hold -inf at decision 0, .* look at its rewards"):
        require_returns([TWO], [np.array([-np.inf, 0.0])])


def test_there_is_one_entry_for_each_trajectory() -> None:
    with pytest.raises(ValueError, match="values of 1 trajectories for 2"):
        require_values([TWO, TWO], [judged(0.0, 0.0)])
    with pytest.raises(ValueError, match="0 returns for 1 trajectories"):
        require_returns([TWO], [])
