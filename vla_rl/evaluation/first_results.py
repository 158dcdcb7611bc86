"""Held-out results of a run's first weights, taken from another run of the same policy.

Greedy episodes of the same weights under the same conditions end alike, so runs that compare
settings need them once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import refuse_other_conditions
from vla_rl.evaluation.held_out_book import HeldOutBook, RowFormat
from vla_rl.evaluation.results import Key
from vla_rl.types import EpisodeSpec

POLICY_DIGEST: Final = "policy_digest"
"""Key of a run's about.json: the digest of the checkpoint that it started from."""


def first_lines_of(
    folder: Path,
    format: RowFormat,
    episodes: Sequence[EpisodeSpec],
    conditions: Mapping[str, Any],
    policy_digest: str,
) -> list[bytes]:
    """Return the lines of the first weights in the run `folder`, one for each of `episodes`.

    Raises: ConfigError if that run started from another policy, ran under other conditions, or
    lacks an episode.
    """
    if not policy_digest:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, but this recipe makes its policy anew in each "
            "run; leave the option out"
        )
    policy = _about(folder).get(POLICY_DIGEST)
    if policy != policy_digest:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, which started from the policy with the digest "
            f"{policy}, expected {policy_digest}; name a run of the same policy, or leave the "
            "option out"
        )
    recorded = folder / "held_out_conditions.json"
    if not recorded.exists():
        raise ConfigError(
            f"{recorded} does not exist, expected the conditions of the results beside it; name "
            "another run with --held-out.first-results-of, or leave the option out"
        )
    refuse_other_conditions(recorded, conditions)
    found = _lines_of_first_weights(folder, format)
    keys = [format.key_of(episode) for episode in episodes]
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(
            f"{folder / format.file} lacks {len(missing)} of {len(keys)} held-out episodes of the "
            f"first weights, such as {missing[0]}; name a run with the same held-out starts, or "
            "leave --held-out.first-results-of out"
        )
    return [found[key] for key in keys]


def first_choosing_lines(
    folder: Path, format: RowFormat, episodes: Sequence[EpisodeSpec]
) -> list[bytes]:
    """Return the lines that the first weights of the run `folder` have of `episodes`, which choose
    the best checkpoint. A run without evaluations beside training has none.
    """
    found = _lines_of_first_weights(folder, format)
    keys = [format.key_of(episode) for episode in episodes]
    return [found[key] for key in keys if key in found]


def _lines_of_first_weights(folder: Path, format: RowFormat) -> dict[Key, bytes]:
    book = HeldOutBook(folder / format.file, format)
    return {
        row.key: line
        for row, line in zip(book.rows, book.lines, strict=True)
        if row.weight_version == 0
    }


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "about.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"held_out.first_results_of is {folder}, but {path} cannot be read ({error}); expected "
            "the folder of a run"
        ) from error
