"""Results of evaluated episodes, as lines of JSON and as tables with confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.reporting.record_files import RetryingWriter
from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.appended_file import AppendedFile

MOST_RESULTS: Final = 1_000_000
"""Maximum number of results that wait for room on a full disk; no evaluation has more, and all are
in memory anyway."""

Z_95 = 1.959963984540054
"""Quantile of the normal distribution for a 95 % interval."""

Key: TypeAlias = tuple[str, int, int]
"""Task, initial state and scene seed."""


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one episode."""

    suite: str
    task_id: int
    task: str
    """Name of the task, such as `libero_goal/3`."""

    instruction: str
    init_state_id: int
    scene_seed: int
    is_success: bool
    num_steps: int
    """Number of control steps, without those in which the scene settles."""

    attempts: int
    """Number of attempts; more than 1 if a simulator died or froze."""

    perturbation: str = ""
    """Change of the task by LIBERO-PRO or LIBERO-plus; empty for LIBERO's own tasks."""

    @property
    def key(self) -> Key:
        """Identity of the episode: task, initial state and scene seed."""
        return self.task, self.init_state_id, self.scene_seed


def episode_result(trajectory: Trajectory) -> EpisodeResult:
    """Return the result of an episode.

    A task without a number, such as `CartPole-v1`, is number 0 of its own suite; a start that the
    environment does not number is identified by its seed.
    """
    episode = trajectory.episode
    suite, _, task_id = episode.task.rpartition("/")
    is_numbered = task_id.isdecimal()
    start = trajectory.info.get("init_state_id", start_number(episode))
    words = trajectory.final_observation.get("instruction")
    perturbed = trajectory.info.get("perturbation")
    return EpisodeResult(
        suite=suite if is_numbered else episode.task,
        task_id=int(task_id) if is_numbered else 0,
        task=episode.task,
        instruction=words if isinstance(words, str) else "",
        init_state_id=int(start),
        scene_seed=int(trajectory.info.get("scene_seed", 0)),
        is_success=trajectory.is_success,
        num_steps=trajectory.num_env_steps,
        attempts=episode.attempt + 1,
        perturbation=perturbed if isinstance(perturbed, str) else "",
    )


def start_number(episode: EpisodeSpec) -> int:
    """Return the number of an episode's start, or its seed if its start has no number."""
    number: int = episode.options.get("init_state_id", episode.seed)
    return number


class ResultFile:
    """A file of results, one line each, on disk when `add` returns.

    A last line that a kill cut off is dropped.

    A result that finds no room on a full disk waits in memory and is written with the next one.

    Args:
        path: the file; continued if it exists.

    Raises: ConfigError if a line is not a result, or an episode occurs twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[Key, EpisodeResult] = {}
        for number, line in enumerate(complete_lines(path).splitlines(), start=1):
            self._keep(_parse_result(line, f"{path}, line {number}"))
        self._outlet = line_writer(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._outlet.close()

    @property
    def num_waiting(self) -> int:
        """Number of results that are not on disk because there is no room."""
        self._outlet.flush()
        return len(self._outlet.waiting)

    def add(self, result: EpisodeResult) -> None:
        """Append one result."""
        self._keep(result)
        self._outlet.put(
            f"{result.task}, start {result.init_state_id}", msgspec.json.encode(result) + b"\n"
        )

    def _keep(self, result: EpisodeResult) -> None:
        if result.key in self.results:
            raise ConfigError(f"{self._path} holds {result.key} twice, expected every episode once")
        self.results[result.key] = result


def line_writer(path: Path) -> RetryingWriter[bytes]:
    """Return an outlet that appends lines to a file.

    Each is on disk when `put` returns, or waits for room.
    """
    return RetryingWriter(str(path), partial(_append_line, path), most_waiting=MOST_RESULTS)


def _append_line(path: Path, line: bytes) -> None:
    with closing(AppendedFile(path, lines=True)) as file:
        file.write(line, sync=True)


def complete_lines(path: Path) -> bytes:
    """Read the lines of a file, without a last one that a kill cut off.

    Empty if there is no file.
    """
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]


def wilson_interval(num_successes: int, num: int, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's score interval of a success rate (Wilson 1927).

    It is valid near 0 and 1 and for few episodes.

        centre +- half, with  centre = (p + z^2 / 2n) / (1 + z^2 / n)
                              half   = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)

    Args:
        num_successes, num: number of successes, and of episodes (at least 1).
        z: quantile of the normal distribution; the default is for 95 %.
    """
    if not 0 <= num_successes <= num or num < 1:
        raise ValueError(
            f"{num_successes} of {num} episodes, expected 0 to n successes of n >= 1 episodes."
        )
    rate, share = num_successes / num, z * z / num
    centre = (rate + share / 2) / (1 + share)
    half = z * math.sqrt(rate * (1 - rate) / num + share / (4 * num)) / (1 + share)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise_results(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    """Summarise at least one episode as plain values: success rate, interval and lengths."""
    num_successes = sum(result.is_success for result in results)
    low, high = wilson_interval(num_successes, len(results))
    solved = [result.num_steps for result in results if result.is_success]
    return {
        "episodes": len(results),
        "successes": num_successes,
        "success_rate": num_successes / len(results),
        "wilson_95": [low, high],
        "mean_steps_of_successes": sum(solved) / len(solved) if solved else None,
        "mean_steps": sum(result.num_steps for result in results) / len(results),
    }


def group_by_task(results: Iterable[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Group results by task: suites in order of appearance, tasks in LIBERO's order."""
    results = list(results)
    suites = list(dict.fromkeys(result.suite for result in results))
    grouped: dict[str, list[EpisodeResult]] = {}
    for result in sorted(results, key=lambda result: (suites.index(result.suite), result.task_id)):
        grouped.setdefault(result.task, []).append(result)
    return grouped


def group_by_perturbation(results: Iterable[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Group results by kind of perturbation, in order of appearance, without unperturbed tasks."""
    grouped: dict[str, list[EpisodeResult]] = {}
    for result in results:
        if result.perturbation:
            grouped.setdefault(result.perturbation, []).append(result)
    return grouped


def _parse_result(line: bytes, where: str) -> EpisodeResult:
    try:
        return msgspec.json.decode(line, type=EpisodeResult)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
        raise ConfigError(
            f"{where} is not a result: {error}; remove that line, and its episode is run again"
        ) from error
