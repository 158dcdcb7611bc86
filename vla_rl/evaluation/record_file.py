"""Files of records: a line of JSON for each episode, and the same in memory.

    {"task": "libero_goal/7", "start": 40, "seed": 0, "weights": 20, "member": 0, "value": 1.0,
     "parts": {"steps": 87.0, "attempts": 1.0}, "instruction": "turn on the stove"}

Evaluations write episodes.jsonl; training runs write held_out.jsonl (1 for a success),
held_out_scores.jsonl (scores with their parts) and validation.jsonl (rewards, several tries of each
problem). Up to commit 24320b8d other lines were written into the same files; they are converted when
they are read, and a resume adds new ones below them.
"""

import asyncio
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.evaluation.records import EpisodeRecord, Key, Measure, episode_key, record_key
from vla_rl.reporting.record_files import RetryingWriter, set_aside_lines
from vla_rl.types import EpisodeSpec
from vla_rl.util.appended_file import AppendedFile
from vla_rl.util.tasks import run_in_thread

MOST_RECORDS: Final = 1_000_000
"""Maximum number of records that wait for room on a full disk; no evaluation has more, and all are
in memory anyway."""


class RecordFile:
    """The records of a file, and more that are added to it; one is on disk when `append_record` returns.

    A last line that a kill cut off is dropped. A record that finds no room on a full disk waits in
    memory, and is written with the next one.

    Args:
        path: the file; continued if it exists.
        measure: what the values are.
        each_once: refuse a key that is there already.

    Raises: ConfigError if a line is no record, or a key that may occur once occurs twice.
    """

    def __init__(
        self, path: Path, measure: Measure = "success_rate", *, each_once: bool = False
    ) -> None:
        self.path, self.measure = path, measure
        self.records: list[EpisodeRecord] = []
        self._seen: set[tuple[int, Key]] | None = set() if each_once else None
        records, summaries = _read_file(path)
        for record in records:
            self._append(record)
        self.summaries = summaries
        """Metrics by weight version, of versions that a run of 24320b8d has validated."""
        self._writer = RetryingWriter(
            str(path), partial(_append_line, path), most_waiting=MOST_RECORDS
        )
        self._turn = asyncio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    @property
    def num_waiting(self) -> int:
        """Number of records that are not on disk because there is no room."""
        self._writer.flush()
        return len(self._writer.waiting)

    def list_missing(
        self, episodes: Iterable[EpisodeSpec], *, weights: int = 0
    ) -> list[EpisodeSpec]:
        """Return the episodes that a weight version has not run yet."""
        # validations up to 24320b8d kept their means alone, without the episodes
        if weights in self.summaries:
            return []
        done = {record_key(each, self.measure) for each in self.records if each.weights == weights}
        return [each for each in episodes if episode_key(each, self.measure) not in done]

    async def append_record(self, record: EpisodeRecord) -> None:
        """Append a record."""
        self._append(record)
        async with self._turn:  # the writer is for one thread at a time
            await run_in_thread(
                self._writer.put,
                f"{record.task}, start {record.start}",
                msgspec.json.encode(record) + b"\n",
            )

    def _append(self, record: EpisodeRecord) -> None:
        if self._seen is not None:
            identity = record.weights, record.episode_key
            if identity in self._seen:
                raise ConfigError(
                    f"{self.path} holds {record.episode_key} twice, expected every episode once"
                )
            self._seen.add(identity)
        self.records.append(record)


def _append_line(path: Path, line: bytes) -> None:
    # opened for each line: the folder may be on a disk that was full or away for a while
    with closing(AppendedFile(path, lines=True)) as file:
        file.write(line, sync=True)


def complete_lines(path: Path) -> bytes:
    """Read the lines of a file, without a last one that a kill cut off.

    Empty if there is no file.
    """
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]


def read_records(path: Path) -> list[EpisodeRecord]:
    """Read all records so far, without a last line that a kill cut off.

    Raises: ConfigError for damaged lines.
    """
    return _read_file(path)[0]


def set_later_aside(path: Path, last: int) -> None:
    """Move the lines of weight versions after `last` to a file next to `path`.

    A damaged line stays, and is reported when the file is read.

    Raises: OSError.
    """

    def is_kept(line: bytes) -> bool:
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            # a line that names no version cannot be of a later one, and stays
            return int(fields.get("weights", fields.get("weight_version", last))) <= last
        except (ValueError, TypeError, RecursionError):
            return True

    set_aside_lines(path, is_kept)


def _read_file(path: Path) -> tuple[list[EpisodeRecord], dict[int, dict[str, float]]]:
    """Return the records of a file, and the metrics of validations up to 24320b8d."""
    records, summaries = list[EpisodeRecord](), dict[int, dict[str, float]]()
    for number, line in enumerate(complete_lines(path).splitlines(), start=1):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            # the kind of a line is told by its fields: files of several versions go on in one
            if "metrics" in fields:
                summary = msgspec.convert(fields, _OldValidation)
                summaries[summary.weight_version] = summary.metrics
            else:
                records.append(_as_record(fields))
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its episode "
                "is run again"
            ) from error
    return records, summaries


def _as_record(fields: dict[str, Any]) -> EpisodeRecord:
    """Return the record of a line, also of one that was written up to 24320b8d.

    Raises: ValueError.
    """
    if "total" in fields:  # a line of held_out_scores.jsonl
        missing = {"weights", "start"} - fields.keys()
        if missing:
            raise ValueError(f"it has a total, and no {min(missing)}")
        return msgspec.convert(
            {
                "task": "",
                "start": fields.pop("start"),
                "seed": 0,
                "weights": fields.pop("weights"),
                "member": 0,
                "value": fields.pop("total"),
                "parts": fields,
            },
            EpisodeRecord,
        )
    if "weight_version" in fields:  # a line of held_out.jsonl
        held_out = msgspec.convert(fields, _OldHeldOutResult)
        return held_out.result.as_record(held_out.weight_version)
    if "init_state_id" in fields:  # a line of episodes.jsonl
        return msgspec.convert(fields, _OldResult).as_record(0)
    return msgspec.convert(fields, EpisodeRecord)


class _OldResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    suite: str
    task_id: int
    task: str
    instruction: str
    init_state_id: int
    scene_seed: int
    is_success: bool
    num_steps: int
    attempts: int
    perturbation: str = ""

    def as_record(self, weights: int) -> EpisodeRecord:
        return EpisodeRecord(
            task=self.task,
            start=self.init_state_id,
            seed=self.scene_seed,
            weights=weights,
            member=0,
            value=float(self.is_success),
            parts={"steps": float(self.num_steps), "attempts": float(self.attempts)},
            instruction=self.instruction,
            perturbation=self.perturbation,
        )


class _OldHeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight_version: int
    result: _OldResult


class _OldValidation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight_version: int
    num_problems: int
    metrics: dict[str, float]
