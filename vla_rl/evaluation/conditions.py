"""What results depend on, in a file beside them: results of other conditions are never added to it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.observe.whole_file import write_whole
from vla_rl.types import EpisodeSpec

logger = logging.getLogger(__name__)

_OF_THE_EPISODE: Final = ("suite", "task_id", "scene_seed")
"""Arguments of an environment that say which episode it is, not how it is played."""

_BEFORE_IT_WAS_RECORDED: Final = {"scenes": "same"}
"""Conditions that older records leave out, and what they were."""


def conditions_of_play(episodes: Sequence[EpisodeSpec]) -> dict[str, Any]:
    """How episodes are played, whichever they are: arguments of their environments, and how actions are chosen.

    Where episodes differ, all values in a list.
    """
    found: dict[str, list[Any]] = {}
    for episode in episodes:
        sampling = episode.sampling
        kwargs = {name: value for name, value in episode.env.kwargs.items() if name not in _OF_THE_EPISODE}
        for name, value in {**kwargs, "temperature": None if sampling.greedy else sampling.temperature}.items():
            values = found.setdefault(name, [])
            if value not in values:
                values.append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in sorted(found.items())}


def refuse_other_conditions(path: Path, conditions: Mapping[str, Any]) -> None:
    """Raises: ConfigError if the record at `path` differs or cannot be read; without one, anything goes."""
    if not path.exists():
        return
    try:
        before = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or bytes that are no text
        raise ConfigError(
            f"{path} cannot be read, expected how the results beside it came about: {error}; begin anew elsewhere, or "
            "remove it if you know that they are of the same conditions"
        ) from error
    now = msgspec.json.decode(msgspec.json.encode(conditions), type=dict[str, Any])
    before = {name: value for name, value in _BEFORE_IT_WAS_RECORDED.items() if name in now} | before
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{name} is {now.get(name)!r} now, but {path} says {before.get(name)!r}, and one table cannot hold both; "
                "go on as it says, or begin anew"
            )


def note_conditions(path: Path, conditions: Mapping[str, Any], results: Path | None = None) -> None:
    """Write conditions down, or refuse to go on under others. Warns if `results` are older than their conditions.

    Raises: ConfigError for other conditions; OSError if they cannot be written down.
    """
    refuse_other_conditions(path, conditions)
    if path.exists():
        return
    if results is not None and results.exists() and results.stat().st_size > 0:
        logger.warning("%s does not say how its results came about; new ones stand beside them all the same", results)
    write_whole(path, msgspec.json.format(msgspec.json.encode(conditions)) + b"\n")


def note_conditions_if_possible(path: Path, conditions: Mapping[str, Any], results: Path) -> None:
    """The same for a run that goes on without the file: a full disk is a warning. Raises: ConfigError."""
    try:
        note_conditions(path, conditions, results)
    except OSError as error:
        logger.warning(
            "%s could not be written, so the results beside it do not say how they came about: %s", path, error
        )
