"""The conditions that results depend on, in a file next to them.

Results under other conditions are never added. Greedy episodes of the same weights under the same
conditions end alike, so runs that compare settings take the results of their first weights from one
of them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import EpisodeRecord, Key, RecordFormat, episode_key, record_key
from vla_rl.types import EpisodeSpec
from vla_rl.util.atomic_files import replace_file

logger = logging.getLogger(__name__)

_EPISODE_ARGUMENTS: Final = ("suite", "task_id", "scene_seed")
"""Arguments of an environment that identify the episode; they are not conditions."""

_OLD_CONDITIONS: Final = {"scenes": "same"}
"""Conditions that older records lack, and their values then."""

_FORMER_NAMES: Final = {"dialect": "convention"}
"""Conditions that older records have under another name, and their names now."""


def episode_conditions(episodes: Sequence[EpisodeSpec]) -> dict[str, Any]:
    """Return how episodes are run: arguments of their environments, and the choice of actions.

    If episodes differ in one, it is the list of all values.
    """
    found: dict[str, list[Any]] = {}
    for episode in episodes:
        sampling = episode.sampling
        kwargs = {
            name: value
            for name, value in episode.env.kwargs.items()
            if name not in _EPISODE_ARGUMENTS
        }
        for name, value in {
            **kwargs,
            "temperature": None if sampling.greedy else sampling.temperature,
            **({"by_mean_at": sampling.temperature} if sampling.by_mean else {}),
        }.items():
            values = found.setdefault(name, [])
            # no set: arguments of environments may be lists, which have no hash
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
            f"{path} cannot be read, expected the conditions of the results next to it: {error}; "
            "start again in another folder, or remove the file if you know that the conditions are "
            "the same"
        ) from error
    # through JSON, as the recorded ones went: a tuple would differ from the list that was read
    now = msgspec.json.decode(msgspec.json.encode(conditions), type=dict[str, Any])
    # files of earlier versions stay comparable: a renamed condition is the same condition
    before = {_FORMER_NAMES.get(name, name): value for name, value in before.items()}
    before = {name: value for name, value in _OLD_CONDITIONS.items() if name in now} | before
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


def record_conditions(
    path: Path, conditions: Mapping[str, Any], results: Path | None = None
) -> None:
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
    replace_file(path, msgspec.json.format(msgspec.json.encode(conditions)) + b"\n")


def try_to_record_conditions(path: Path, conditions: Mapping[str, Any], results: Path) -> None:
    """Do as `record_conditions`, but log a warning if the conditions cannot be written.

    Raises: ConfigError.
    """
    try:
        record_conditions(path, conditions, results)
    except OSError as error:
        logger.warning(
            "%s could not be written, so the conditions of the results next to it are not "
            "recorded: %s",
            path,
            error,
        )


POLICY_DIGEST: Final = "policy_digest"
"""Key of a run's about.json: the digest of the checkpoint that it started from."""


def first_records(
    folder: Path,
    format: RecordFormat,
    episodes: Sequence[EpisodeSpec],
    conditions: Mapping[str, Any],
    policy_digest: str,
) -> list[EpisodeRecord]:
    """Return the records of the first weights in the run `folder`, one for each of `episodes`.

    Raises: ConfigError if that run started from another policy, ran under other conditions, or
    lacks an episode.
    """
    if not policy_digest:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, but this recipe makes its policy anew in each "
            "run; leave the option out"
        )
    policy = _read_about(folder).get(POLICY_DIGEST)
    # the digest and not the path: a folder may have been overwritten since, or copied elsewhere
    if policy != policy_digest:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, which started from the policy with the digest "
            f"{policy}, expected {policy_digest}; name a run of the same policy, or leave the "
            "option out"
        )
    recorded = folder / "held_out_conditions.json"
    if not recorded.exists():
        raise ConfigError(
            f"{recorded} does not exist, expected the conditions of the results next to it; name "
            "another run with --held-out.first-results-of, or leave the option out"
        )
    refuse_other_conditions(recorded, conditions)
    found = _first_weights(folder, format)
    keys = [episode_key(episode, format.measure) for episode in episodes]
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(
            f"{folder / format.file} lacks {len(missing)} of {len(keys)} held-out episodes of the "
            f"first weights, such as {missing[0]}; name a run with the same held-out starts, or "
            "leave --held-out.first-results-of out"
        )
    return [found[key] for key in keys]


def first_choosing_records(
    folder: Path, format: RecordFormat, episodes: Sequence[EpisodeSpec]
) -> list[EpisodeRecord]:
    """Return the records that the first weights of the run `folder` have of `episodes`, which choose
    the best checkpoint. A run without evaluations beside training has none.
    """
    found = _first_weights(folder, format)
    keys = [episode_key(episode, format.measure) for episode in episodes]
    return [found[key] for key in keys if key in found]


def _first_weights(folder: Path, format: RecordFormat) -> dict[Key, EpisodeRecord]:
    return {
        record_key(record, format.measure): record
        for record in read_records(folder / format.file)
        if record.weights == 0
    }


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "about.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, but {path} cannot be read ({error}); expected "
            "the folder of a run"
        ) from error
