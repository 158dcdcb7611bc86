"""The data of the study: one line of JSON for each finished run of an arm.

A line is never changed; a run that is there is never repeated. The conditions that all lines share
stand in a file beside them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.evaluation.conditions import record_conditions, refuse_other_conditions
from vla_rl.evaluation.record_file import complete_lines
from vla_rl.util.appended_file import AppendedFile


class ArmRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished run: an arm with a seed."""

    arm: str
    seed: int
    config_digest: str
    """Digest of the conditions."""

    before: dict[str, str]
    """Held-out outcomes of each task before the first update, in the order of the starts; 1 means
    solved."""

    after: dict[str, str]
    """The same after the last update."""

    success: tuple[float, ...]
    """Success rate of the sampled episodes of each update."""

    episodes: tuple[int, ...]
    """Training episodes that were run until the end of each update, with those that were
    filtered."""

    training_minutes: float
    minutes: float
    """All of the run, with its evaluations."""

    started_at: str
    machine: str
    versions: dict[str, str]

    @property
    def num_starts(self) -> int:
        """Number of held-out starts over all tasks."""
        return sum(map(len, self.after.values()))

    @property
    def success_after(self) -> float:
        """Success rate over all held-out starts after the last update."""
        return "".join(self.after.values()).count("1") / self.num_starts

    @property
    def success_before(self) -> float:
        """The same before the first update."""
        return "".join(self.before.values()).count("1") / self.num_starts


def digest_of_conditions(conditions: Mapping[str, Any]) -> str:
    """Return a fingerprint of the conditions."""
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def conditions_path(data: Path) -> Path:
    """Return the file of the conditions beside the file of the lines."""
    return data.with_suffix(".conditions.json")


def read_runs(data: Path) -> list[ArmRun]:
    """Read all finished runs, without a last line that a kill cut off.

    Raises: ValueError if a line is damaged, an arm has a seed twice, or runs differ in their
    conditions or their held-out starts.
    """
    runs: list[ArmRun] = []
    for number, line in enumerate(complete_lines(data).splitlines(), start=1):
        try:
            runs.append(_with_all_episodes(msgspec.json.decode(line, type=ArmRun)))
        except ValueError as error:
            raise ValueError(f"{data}, line {number} is not a run: {error}") from error
    require_comparable(runs, str(data))
    return runs


def _with_all_episodes(run: ArmRun) -> ArmRun:
    """Return the run with its true counts of training episodes.

    Early lines of runs that took over another run's first held-out results subtracted those from
    their episodes all the same. It shows: their first count, of at least 32 episodes, is below 0.
    """
    if run.episodes[0] >= 0:
        return run
    counts = tuple(count + run.num_starts for count in run.episodes)
    return msgspec.structs.replace(run, episodes=counts)


def require_comparable(runs: Sequence[ArmRun], where: str) -> None:
    """Raise ValueError if runs repeat, or cannot be compared."""
    seen: set[tuple[int, str]] = set()
    for run in runs:
        if (run.seed, run.arm) in seen:
            raise ValueError(
                f"{where} has {run.arm} with seed {run.seed} twice, expected every seed of an arm "
                "once: a repeated seed is no new evidence; remove one of the two lines"
            )
        seen.add((run.seed, run.arm))
        first = runs[0]
        if run.config_digest != first.config_digest:
            raise ValueError(
                f"{where}: {run.arm}, seed {run.seed}, has other conditions "
                f"({run.config_digest}) than {first.arm}, seed {first.seed} "
                f"({first.config_digest}); keep each study in a file of its own"
            )
        wanted = _num_starts_by_task(first.before)
        if not wanted == _num_starts_by_task(run.before) == _num_starts_by_task(run.after):
            raise ValueError(
                f"{where}: {run.arm}, seed {run.seed}, was evaluated from other starts, expected "
                f"{wanted} before and after training; remove that line, and the run is repeated"
            )


def _num_starts_by_task(outcomes: Mapping[str, str]) -> dict[str, int]:
    return {task: len(each) for task, each in outcomes.items()}


def note_study(data: Path, conditions: dict[str, Any]) -> None:
    """Write the conditions beside the data, or check that they are those of the data.

    Raises: ConfigError if they differ.
    """
    data.parent.mkdir(parents=True, exist_ok=True)
    refuse_other_conditions(conditions_path(data), conditions)
    record_conditions(conditions_path(data), conditions)


def append_run(data: Path, run: ArmRun) -> None:
    """Append a finished run; the line is on the disk when this returns.

    Raises: ValueError if it is there already or cannot be compared with the others; OSError.
    """
    require_comparable([*read_runs(data), run], str(data))
    with closing(AppendedFile(data, lines=True)) as file:
        file.write(msgspec.json.encode(run) + b"\n", sync=True)
