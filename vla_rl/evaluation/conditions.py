"""The conditions that results depend on, in a file beside them.

Results under other conditions are never added.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.reporting.record_files import write_whole
from vla_rl.types import EpisodeSpec

logger = logging.getLogger(__name__)

_OF_THE_EPISODE: Final = ("suite", "task_id", "scene_seed")
"""Arguments of an environment that identify the episode; they are not conditions."""

_BEFORE_IT_WAS_RECORDED: Final = {"scenes": "same"}
"""Conditions that older records lack, and their values then."""


def conditions_of_play(episodes: Sequence[EpisodeSpec]) -> dict[str, Any]:
    """Return how episodes are run: arguments of their environments, and the choice of actions.

    If episodes differ in one, it is the list of all values.
    """
    found: dict[str, list[Any]] = {}
    for episode in episodes:
        sampling = episode.sampling
        kwargs = {
            name: value for name, value in episode.env.kwargs.items() if name not in _OF_THE_EPISODE
        }
        for name, value in {
            **kwargs,
            "temperature": None if sampling.greedy else sampling.temperature,
            **({"by_mean_at": sampling.temperature} if sampling.by_mean else {}),
        }.items():
            values = found.setdefault(name, [])
            if value not in values:
                values.append(value)
    return {
        name: values[0] if len(values) == 1 else values for name, values in sorted(found.items())
    }


def refuse_other_conditions(path: Path, conditions: Mapping[str, Any]) -> None:
    """Raise ConfigError if the record at `path` differs or cannot be read.

    Without a record, all conditions are accepted.
    """
    if not path.exists():
        return
    try:
        before = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        raise ConfigError(
            f"{path} cannot be read, expected the conditions of the results beside it: {error}; "
            "start again in another folder, or remove the file if you know that the conditions are "
            "the same"
        ) from error
    now = msgspec.json.decode(msgspec.json.encode(conditions), type=dict[str, Any])
    before = {
        name: value for name, value in _BEFORE_IT_WAS_RECORDED.items() if name in now
    } | before
    for name, value, recorded in differences(now, before):
        raise ConfigError(
            f"{name} is {value!r} now, but {path} says {recorded!r}, and one table cannot hold "
            "both; use the recorded value, or start again in another folder"
        )


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each value that differs: its name, such as `arms.srpo.temperature`, the value now and
    the one before. A value that is missing is None.
    """
    for name in {**before, **now}:
        value, recorded = now.get(name), before.get(name)
        if isinstance(value, dict) and isinstance(recorded, dict):
            yield from differences(value, recorded, f"{within}{name}.")
        elif value != recorded:
            yield f"{within}{name}", value, recorded


def note_conditions(path: Path, conditions: Mapping[str, Any], results: Path | None = None) -> None:
    """Write the conditions, or check them if they are written already.

    Warns if there are `results` without conditions.

    Raises: ConfigError if the conditions differ; OSError if they cannot be written.
    """
    refuse_other_conditions(path, conditions)
    if path.exists():
        return
    if results is not None and results.exists() and results.stat().st_size > 0:
        logger.warning(
            "the conditions of the results in %s are unknown; new results are added all the same",
            results,
        )
    write_whole(path, msgspec.json.format(msgspec.json.encode(conditions)) + b"\n")


def note_conditions_if_possible(path: Path, conditions: Mapping[str, Any], results: Path) -> None:
    """Do as `note_conditions`, but log a warning if the conditions cannot be written.

    Raises: ConfigError.
    """
    try:
        note_conditions(path, conditions, results)
    except OSError as error:
        logger.warning(
            "%s could not be written, so the conditions of the results beside it are not "
            "recorded: %s",
            path,
            error,
        )
