"""A critic's values of trajectories, and the checks of values and returns where they enter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.types import Trajectory


@dataclass(frozen=True)
class Judged:
    """A critic's values of one trajectory.

    Attributes:
        values: float32 [decisions], the value of the observation before each decision.
        bootstrap: value of the last observation; 0 if the task itself ended the episode, because no
            reward can follow.
    """

    values: np.ndarray
    bootstrap: float


def require_values(trajectories: Sequence[Trajectory], judged: Sequence[Judged]) -> None:
    """Raise ValueError unless a critic's values have the right shape and are finite.

    The error names episode and decision.
    """
    if len(trajectories) != len(judged):
        raise ValueError(
            f"values of {len(judged)} trajectories for {len(trajectories)}, expected one `Judged` "
            "for each."
        )
    for trajectory, each in zip(trajectories, judged, strict=True):
        _require_each(
            trajectory, each.values, "values", "look at the critic's learning rate and value_scale"
        )
        if not np.isfinite(each.bootstrap):
            raise ValueError(
                "the critic's value of the final observation of episode "
                f"{trajectory.episode.episode_id} is {each.bootstrap}, expected a finite number; "
                "look at its learning rate and value_scale."
            )


def require_returns(trajectories: Sequence[Trajectory], returns: Sequence[np.ndarray]) -> None:
    """Raise ValueError unless a critic's targets have the right shape and are finite.

    The error names episode and decision.
    """
    if len(trajectories) != len(returns):
        raise ValueError(
            f"{len(returns)} returns for {len(trajectories)} trajectories, expected "
            "one array for each."
        )
    for trajectory, each in zip(trajectories, returns, strict=True):
        _require_each(trajectory, each, "returns", "look at its rewards")


def _require_each(trajectory: Trajectory, numbers: np.ndarray, what: str, remedy: str) -> None:
    episode, expected = trajectory.episode.episode_id, (len(trajectory.steps),)
    if numbers.shape != expected:
        raise ValueError(
            f"the {what} of episode {episode} are {list(numbers.shape)}, expected "
            f"{list(expected)}: one for each decision."
        )
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise ValueError(
            f"the {what} of episode {episode} hold {numbers[bad[0]]} at decision {bad[0]}, "
            f"expected finite numbers; {remedy}."
        )
