"""Open a data set of any of the four layouts; one of them, our own recordings, is read here.

Our own recordings are one `.npz` an episode, as `record_demonstrations` writes them.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from vla_rl.datasets.episode import RecordedEpisode, require_images, require_numbers
from vla_rl.datasets.hdf5 import read_hdf5
from vla_rl.datasets.lerobot import INFO_FILE, read_lerobot
from vla_rl.datasets.rlds import find_rlds_files, read_rlds
from vla_rl.errors import DataError
from vla_rl.types import Config, PositiveInt
from vla_rl.util.arrays import read_npz
from vla_rl.util.foreign_data import find_files, get_text, get_whole_number, reading
from vla_rl.util.values import excerpt

_log = logging.getLogger(__name__)

_CAMERAS: Final = ("image", "wrist_image")
RECORDING_KIND: Final = "a recorded demonstration"


class ImageSettings(msgspec.Struct, kw_only=True):
    """The fields of a `.settings.json` that say how images were drawn.

    Example:
        ImageSettings(image_size=256, quality="standard", assets="/data/libero_assets")
    """

    image_size: int | None = None
    quality: str | None = None
    assets: str | None = None


def read_image_settings(folder: Path) -> dict[str, Any] | None:
    """Return image size, quality and, for LIBERO, the folder of assets of all recordings in a
    folder; None if it has none of ours.

    Raises: DataError if a file cannot be read, or if recordings differ.
    """
    found: dict[Path, ImageSettings] = {}
    with reading(folder, "a folder that can be listed", "check its permissions"):
        paths = find_files(folder, "**/*.settings.json")
    for path in paths:
        with reading(path, "the settings of a recording", "record the demonstrations again"):
            found[path] = msgspec.json.decode(path.read_bytes(), type=ImageSettings)
    # Images of two qualities in one set would train a policy for neither: its evaluation has one of
    # them.
    for path, settings in found.items():
        first = next(iter(found))
        if settings != found[first]:
            raise DataError(
                f"{path} says {msgspec.to_builtins(settings)}, and {first} says "
                f"{msgspec.to_builtins(found[first])}; expected images of one kind in a data set: "
                "record one of them again"
            )
    return next((msgspec.to_builtins(settings) for settings in found.values()), None)


def read_recording(path: Path) -> RecordedEpisode:
    """Read one file, with its frames. Raises: DataError, naming the file and the wrong array."""
    with reading(path, RECORDING_KIND, "record it again"):
        columns = read_npz(path)
        plain = {name: values.item() for name, values in columns.items() if values.shape == ()}
    lost = [name for name in ("action", "state", "instruction", "image") if name not in columns]
    if lost:
        raise DataError(f"{path} is not {RECORDING_KIND}: no {lost[0]!r}, only {sorted(columns)}.")
    actions, state = (_read_numbers(columns[name], name, path) for name in ("action", "state"))
    for name in _CAMERAS:
        if name in columns:
            _require_frames(columns[name], name, len(actions), path)
    about: dict[str, str | int | float | bool] = {}
    if "task" in columns:
        about["task"] = get_text(plain, "task", str(path))
    if "init_state_id" in columns:
        about["init_state_id"] = get_whole_number(plain, "init_state_id", str(path))
    return RecordedEpisode(
        name=str(path),
        instruction=get_text(plain, "instruction", str(path)),
        actions=actions,
        vectors={"state": state},
        frames={name: columns[name].__getitem__ for name in _CAMERAS if name in columns},
        is_success=_read_truth(plain, "is_success", path) if "is_success" in columns else None,
        about=about,
    )


def _read_numbers(values: np.ndarray, name: str, path: Path) -> np.ndarray:
    require_numbers(values, f"{path}: {name!r}")
    with np.errstate(over="ignore"):  # infinite, and refused as such
        return np.asarray(values, np.float32)


def _require_frames(frames: np.ndarray, name: str, num_steps: int, path: Path) -> None:
    if frames.ndim > 0 and len(frames) != num_steps:
        expected = f"expected {num_steps}, one for each action"
        raise DataError(f"{path} has {len(frames)} images of {name!r}, {expected}.")
    require_images(frames, f"{path}: {name!r}")


def _read_truth(plain: dict[str, Any], name: str, path: Path) -> bool:
    value = plain.get(name)
    if value not in (False, True) or isinstance(value, str):
        raise DataError(f"{path}: {name!r} is {excerpt(value)}, expected true or false.")
    return bool(value)


DECIDED_BY: Final = "head_version"
"""Fact about an episode whose frames are decisions of a head: one of a replay buffer that was exported."""

NEAR_AN_END: Final = 0.1
"""Largest distance from -1 or 1 of a number that may be a gripper command."""


class DatasetOptions(Config, frozen=True, kw_only=True):
    """Settings for facts that a data set does not record."""

    gripper: Literal["signed", "openvla", "none"] = "signed"
    """Meaning of the last number of an action: `signed`, LIBERO's gripper command (+1 closes, -1
    opens); `openvla`, that of RLDS data after OpenVLA's transform (0 closes, 1 opens); `none`, a
    number like the others."""

    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """LeRobot and RLDS only: the features of `image`, `wrist_image`, `state` or `action`. Needed only if
    their names are not the usual ones."""

    keep_idle: bool = False
    """HDF5 only: keep idle steps, in which nothing was commanded."""

    max_episodes_per_task: PositiveInt | None = None
    """Most episodes of each instruction; only the first ones are used. None: all."""


def open_dataset(path: Path, options: DatasetOptions | None = None) -> list[RecordedEpisode]:
    """Read the episodes of a data set.

    It is the folder of a LeRobotDataset or of an RLDS data set, or LIBERO's `.hdf5` or our `.npz`
    files, in a folder or alone.

    Raises: DataError if the data set is none of these, is empty, lacks a field, holds decisions of an
    exported replay buffer, or does not match `options.gripper`.
    """
    options = options if options is not None else DatasetOptions()
    episodes = _read_any(path, options)
    if options.max_episodes_per_task is not None:
        episodes = _first_of_each_task(episodes, options.max_episodes_per_task)
    if not episodes:
        raise DataError(f"{path} holds no episode.")
    if options.gripper == "openvla":
        return [_with_signed_gripper(episode) for episode in episodes]
    if options.gripper == "none":
        return [msgspec.structs.replace(episode, has_gripper=False) for episode in episodes]
    return _check_signed_gripper(episodes)


def _read_any(path: Path, options: DatasetOptions) -> list[RecordedEpisode]:
    if (path / INFO_FILE).is_file():
        has_gripper = options.gripper != "none"
        episodes = read_lerobot(path, fields=options.fields, has_gripper=has_gripper)
        # their actions are chunks in the head's units, which would be learnt as single control steps
        if any(DECIDED_BY in episode.about for episode in episodes):
            raise DataError(
                f"{path} was exported from a replay buffer: each of its frames is a decision of a head, expected "
                "control steps; learn from the run's own folder (--replay.from), or record its episodes "
                "(--run.record-to)."
            )
        return episodes
    if find_rlds_files(path):
        return read_rlds(path, fields=options.fields)
    if path.is_file() and path.suffix == ".hdf5":
        return read_hdf5(path, keep_idle=options.keep_idle)
    if path.is_file() and path.suffix == ".npz":
        return [read_recording(path)]
    with reading(path, "a folder that can be listed", "check its permissions"):
        hdf5, recordings = find_files(path, "**/*.hdf5"), find_files(path, "**/*.npz")
    # a folder with both was mixed up by somebody: reading one kind in silence would halve the data
    if hdf5 and not recordings:
        return [
            episode for file in hdf5 for episode in read_hdf5(file, keep_idle=options.keep_idle)
        ]
    if recordings and not hdf5:
        return [read_recording(file) for file in recordings]
    found = (
        "both .hdf5 and .npz files"
        if hdf5
        else "neither meta/info.json nor features.json nor .hdf5 nor .npz files"
    )
    raise DataError(
        f"{path} holds {found}; expected a LeRobotDataset (meta/info.json), an RLDS data set "
        "(features.json and .tfrecord files), LIBERO's demonstrations (.hdf5) or our own recordings (.npz; `python -m "
        "vla_rl.recipes.record_demonstrations` makes some)."
    )


def _first_of_each_task(episodes: Sequence[RecordedEpisode], most: int) -> list[RecordedEpisode]:
    taken: Counter[str] = Counter()
    chosen = []
    for episode in episodes:
        # By instruction, which every layout has; the name of a task only ours records.
        taken[episode.instruction] += 1
        if taken[episode.instruction] <= most:
            chosen.append(episode)
    return chosen


def _check_signed_gripper(episodes: list[RecordedEpisode]) -> list[RecordedEpisode]:
    """Return the same episodes; raise DataError if the gripper is never below 0.

    A gripper that opens in LIBERO's data has commands of -1. An action of one number has no
    gripper.
    """
    if episodes[0].actions.shape[1] == 1:
        return episodes
    # the two conventions differ in sign and in which end is open: a policy trained on the wrong one
    # opens its gripper where it should close, and its loss does not show it
    if min(float(episode.actions[:, -1].min()) for episode in episodes) >= 0.0 and any(
        float(episode.actions[:, -1].max()) > 0.0 for episode in episodes
    ):
        raise DataError(
            f"the gripper commands of {episodes[0].name} and all others are in [0, 1], expected -1 "
            "to open; use gripper = 'openvla' for OpenVLA's convention, or 'none' if the last "
            "number is not a gripper."
        )
    for episode in episodes:
        commands = episode.actions[:, -1]
        # both ends of the other convention, and nothing between
        if {0.0, 1.0} == set(np.unique(commands).tolist()):
            raise DataError(
                f"the gripper commands of {episode.name} are 0 and 1, those of other episodes reach -1; expected "
                "one convention in a data set: convert the episodes of one before they are merged, or use "
                "gripper = 'none' if the last number is not a gripper."
            )
    # By the share and not by single values: commands between the ends occur in every data set, at
    # the moment of closing.
    commands = np.concatenate([episode.actions[:, -1] for episode in episodes])
    share = float((np.abs(np.abs(commands) - 1.0) > NEAR_AN_END).mean())
    if share > 0.5:
        _log.warning(
            "the last number of %.0f %% of the actions is neither near -1 nor near 1, but is read "
            "as a gripper command; if it is not one, set gripper = 'none' (--data.gripper none, or "
            "--replay.data.gripper none).",
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
