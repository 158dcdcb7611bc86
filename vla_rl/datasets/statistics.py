"""Action statistics of a data set, in the form of public `dataset_statistics.json` files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.errors import DataError


def statistics_of(episodes: Sequence[RecordedEpisode], state_key: str = "state") -> dict[str, Any]:
    """Compute mean, spread, ends and 1st and 99th percentiles of every dimension.

    They are over all control steps, and plain values.

    As in OpenVLA's tools, the gripper counts as 0 = close, 1 = open and is not scaled (`mask`).
    Without a gripper, all numbers are scaled.

    Args:
        episodes: at least one, with signed grippers or none.
        state_key: the vector that is reported as `proprio`, if all episodes have it.

    Raises: DataError if the actions or vectors of two episodes have different numbers of
        dimensions, or if there is no episode.
    """
    if not episodes:
        raise DataError("there is no episode to compute statistics of, expected at least one.")
    actions = _joined(episodes, "actions", [each.actions for each in episodes])
    mask = [True] * actions.shape[1]
    if episodes[0].has_gripper and len(mask) > 1:
        actions[:, -1] = (1.0 - actions[:, -1]) / 2.0
        mask[-1] = False
    statistics: dict[str, Any] = {"action": {**_of(actions), "mask": mask}}
    if all(state_key in episode.vectors for episode in episodes):
        states = [episode.vectors[state_key] for episode in episodes]
        statistics["proprio"] = _of(_joined(episodes, state_key, states))
    return {**statistics, "num_transitions": len(actions), "num_trajectories": len(episodes)}


def _joined(
    episodes: Sequence[RecordedEpisode], name: str, parts: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the rows of all episodes, float64 [N, D]. Raises: DataError if widths differ."""
    for episode, part in zip(episodes, parts, strict=True):
        if part.shape[1] != parts[0].shape[1]:
            raise DataError(
                f"{name!r} has {part.shape[1]} numbers in {episode.name} and {parts[0].shape[1]} in "
                f"{episodes[0].name}, expected as many in every episode; read them as two data "
                "sets."
            )
    joined: np.ndarray = np.concatenate(parts)
    return joined.astype(np.float64)


def _of(rows: np.ndarray) -> dict[str, list[float]]:
    rows = rows.astype(np.float64)
    found = {
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "max": rows.max(axis=0),
        "min": rows.min(axis=0),
        "q01": np.quantile(rows, 0.01, axis=0),
        "q99": np.quantile(rows, 0.99, axis=0),
    }
    return {name: values.tolist() for name, values in found.items()}
