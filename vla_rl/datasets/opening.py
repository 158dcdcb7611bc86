"""Open a data set and detect which of the three layouts it has."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.datasets.hdf5 import read_hdf5
from vla_rl.datasets.lerobot import INFO_FILE, read_lerobot
from vla_rl.datasets.recordings import read_recording
from vla_rl.errors import DataError
from vla_rl.types import Config
from vla_rl.util.foreign_data import reading

_log = logging.getLogger(__name__)

NEAR_AN_END: Final = 0.1
"""Largest distance from -1 or 1 of a number that may be a gripper command."""


class DatasetOptions(Config, frozen=True, kw_only=True):
    """Settings for facts that a data set does not record."""

    gripper: Literal["signed", "openvla", "none"] = "signed"
    """Meaning of the last number of an action: `signed`, LIBERO's gripper command (+1 closes, -1
    opens); `openvla`, that of RLDS data after OpenVLA's transform (0 closes, 1 opens); `none`, a
    number like the others."""

    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """LeRobot only: the features of `image`, `wrist_image`, `state` or `action`. Needed only if
    their names are not the usual ones."""

    keep_idle: bool = False
    """HDF5 only: keep idle steps, in which nothing was commanded."""

    max_episodes_per_task: int | None = None
    """Most episodes of each instruction; only the first ones are used. None: all."""

    def __post_init__(self) -> None:
        most = self.max_episodes_per_task
        self.require(
            most is None or most >= 1, "max_episodes_per_task", "at least 1, or none for all"
        )


def open_dataset(path: Path, options: DatasetOptions | None = None) -> list[RecordedEpisode]:
    """Read the episodes of a data set.

    It is a LeRobotDataset's folder, or LIBERO's `.hdf5` or our `.npz` files, in a folder or alone.

    Raises: DataError if the data set is none of these, is empty, lacks a field, or does not match
    `options.gripper`.
    """
    options = options if options is not None else DatasetOptions()
    episodes = _read(path, options)
    if options.max_episodes_per_task is not None:
        episodes = _first_of_each_task(episodes, options.max_episodes_per_task)
    if not episodes:
        raise DataError(f"{path} holds no episode.")
    if options.gripper == "openvla":
        return [_with_signed_gripper(episode) for episode in episodes]
    if options.gripper == "none":
        return [msgspec.structs.replace(episode, has_gripper=False) for episode in episodes]
    return _signed(episodes)


def _read(path: Path, options: DatasetOptions) -> list[RecordedEpisode]:
    if (path / INFO_FILE).is_file():
        return read_lerobot(path, fields=options.fields)
    if path.is_file() and path.suffix == ".hdf5":
        return read_hdf5(path, keep_idle=options.keep_idle)
    if path.is_file() and path.suffix == ".npz":
        return [read_recording(path)]
    with reading(path, "a folder that can be listed", "check its permissions"):
        hdf5, recordings = sorted(path.rglob("*.hdf5")), sorted(path.rglob("*.npz"))
    if hdf5 and not recordings:
        return [
            episode for file in hdf5 for episode in read_hdf5(file, keep_idle=options.keep_idle)
        ]
    if recordings and not hdf5:
        return [read_recording(file) for file in recordings]
    found = (
        "both .hdf5 and .npz files" if hdf5 else "neither meta/info.json nor .hdf5 nor .npz files"
    )
    raise DataError(
        f"{path} holds {found}; expected a LeRobotDataset (meta/info.json), LIBERO's "
        "demonstrations (.hdf5) or our own recordings (.npz; `python -m "
        "vla_rl.recipes.record_demonstrations` makes some)."
    )


def _first_of_each_task(episodes: Sequence[RecordedEpisode], most: int) -> list[RecordedEpisode]:
    taken: Counter[str] = Counter()
    chosen = []
    for episode in episodes:
        taken[episode.instruction] += 1
        if taken[episode.instruction] <= most:
            chosen.append(episode)
    return chosen


def _signed(episodes: list[RecordedEpisode]) -> list[RecordedEpisode]:
    """Return the same episodes; raise DataError if the gripper is never below 0.

    A gripper that opens in LIBERO's data has commands of -1. An action of one number has no
    gripper.
    """
    if episodes[0].actions.shape[1] == 1:
        return episodes
    if min(float(episode.actions[:, -1].min()) for episode in episodes) >= 0.0 and any(
        float(episode.actions[:, -1].max()) > 0.0 for episode in episodes
    ):
        raise DataError(
            f"the gripper commands of {episodes[0].name} and all others are in [0, 1], expected -1 "
            "to open; use gripper = 'openvla' for OpenVLA's convention, or 'none' if the last "
            "number is not a gripper."
        )
    commands = np.concatenate([episode.actions[:, -1] for episode in episodes])
    share = float((np.abs(np.abs(commands) - 1.0) > NEAR_AN_END).mean())
    if share > 0.5:
        _log.warning(
            "the last number of %.0f %% of the actions is neither near -1 nor near 1, but is read "
            "as a gripper command; if it is not one, set gripper = 'none' (--data.gripper none).",
            100.0 * share,
        )
    return episodes


def _with_signed_gripper(episode: RecordedEpisode) -> RecordedEpisode:
    gripper = episode.actions[:, -1]
    if gripper.min() < 0.0 or gripper.max() > 1.0:
        raise DataError(
            f"{episode.name}: gripper commands go from {gripper.min():g} to {gripper.max():g}, "
            "expected 0 to 1 in OpenVLA's convention; these look signed: leave out gripper = "
            "'openvla'."
        )
    actions = episode.actions.copy()
    actions[:, -1] = np.float32(1.0) - np.float32(2.0) * gripper
    return msgspec.structs.replace(episode, actions=actions)
