"""The sinks of metrics: a file of JSON lines, TensorBoard event files, Weights & Biases."""

import io
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.reporting.record_files import RetryingWriter, set_aside_lines
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.util.appended_file import AppendedFile

_EVENT_FILES: Final = itertools.count()
"""Numbers that distinguish the event files of one process."""


class JsonlSink:
    """One JSON object a line.

    Each is passed to the operating system at once, so that a crash loses no written line.

    Keys: `update`, `wall_time_s` (seconds since 1970) and the metrics; a value that is not finite
    is null. Appends to the lines of an earlier run; an incomplete line at its end, which a kill
    left, is cut off. A line that does not fit on the disk leaves nothing in the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path, lines=True)

    def write_metrics(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write one line.

        Raises: OSError if it could not be written; the file then holds no part of it.
        """
        self._file.write(metrics_line(update, wall_time_s, values))

    def sync(self) -> None:
        """Sync the lines to disk. Raises: OSError."""
        self._file.sync()

    def close(self) -> None:
        """Sync the lines to disk and close the file."""
        try:
            self._file.sync()
        finally:
            self._file.close()


def metrics_line(update: int, wall_time_s: float, values: Mapping[str, float]) -> bytes:
    """Return one line of `metrics.jsonl`, with its newline."""
    return msgspec.json.encode({"update": update, "wall_time_s": wall_time_s, **values}) + b"\n"


class TensorBoardSink:
    """Scalars in a TensorBoard event file; imports neither torch nor tensorflow.

    When `write_metrics` returns, the event is in the file completely or not at all, because a reader stops
    for good at an incomplete record.

    Args:
        folder: the folder of the file, which is created with the first event.
        resumed_at: the update that a resumed run continues from; TensorBoard then hides the later
            updates of earlier files.
    """

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        # slow to import, needed only here
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        # the process and a number too: several runs of one process may open a file in the same
        # second
        names = (int(time.time()), socket.gethostname(), os.getpid(), next(_EVENT_FILES))
        opening = _event_record(
            Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
        )
        if resumed_at is not None:
            # TensorBoard then hides what the killed part wrote after this update, instead of
            # drawing both
            begins = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=resumed_at + 1, session_log=begins)
            opening += _event_record(event.SerializeToString())
        path = folder / "events.out.tfevents.{:010d}.{}.{}.{}".format(*names)
        self._file = AppendedFile(path, opening=opening)

    def write_metrics(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write one event with all values. Raises: OSError if it could not be written."""
        summary = self._summary(
            value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        )
        event = self._event(wall_time=wall_time_s, step=update, summary=summary)
        # someone may have removed the folder to see the curves of the rest alone
        self._file.path.parent.mkdir(exist_ok=True)
        self._file.write(_event_record(event.SerializeToString()))

    def write_late(
        self, update: int, wall_time_s: float, values: Mapping[str, float], now: int
    ) -> None:
        """Write one event at its own update, also after those of later ones."""
        self.write_metrics(update, wall_time_s, values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbSink:
    """Weights & Biases; needs the extra `vla_rl[wandb]`.

    Raises: ConfigError if wandb is not installed.
    """

    def __init__(self, project: str, run_name: str, config: Mapping[str, Any]) -> None:
        self._run = import_wandb(project).init(project=project, name=run_name, config=dict(config))
        self._has_late_axis = False

    def write_metrics(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Log one update."""
        self._run.log({**values, "wall_time_s": wall_time_s}, step=update)

    def write_late(
        self, update: int, wall_time_s: float, values: Mapping[str, float], now: int
    ) -> None:
        """Log values of an earlier update, over an axis of their own.

        Weights & Biases drops what is logged at a step before the newest one, `now`.
        """
        if not self._has_late_axis:
            for group in ("held_out/*", "held_out_choose/*"):
                self._run.define_metric(group, step_metric="held_out/weights")
            self._has_late_axis = True
        self._run.log({**values, "held_out/weights": update}, step=now)

    def close(self) -> None:
        """Upload the remaining metrics."""
        self._run.finish()


def import_wandb(project: str) -> Any:
    """Import and return the package, an optional extra.

    Raises: ConfigError if it is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"metrics should go to the wandb project {project!r}, but wandb is not installed; "
            "install vla_rl[wandb] or omit the project."
        ) from error
    return wandb


def _event_record(data: bytes) -> bytes:
    """Return data as a record of an event file, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(data)
    return record.getvalue()


logger = logging.getLogger(__name__)

_KEY = re.compile(r"[^/]+(/[^/]+)+")


class Sink(Protocol):
    """A destination of metrics.

    `write_metrics` may raise any error; after an OSError the same update is tried again later.
    """

    def write_metrics(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write the values of one update, all or none."""
        ...

    def write_late(
        self, update: int, wall_time_s: float, values: Mapping[str, float], now: int
    ) -> None:
        """Write values of `update` that were measured only after update `now`, all or none."""
        ...

    def close(self) -> None:
        """Flush what was written, and close files and connections."""
        ...


class Measured(msgspec.Struct, frozen=True):
    """Metrics of one update.

    Example:
        Measured(update=8, wall_time_s=1764252000.0, values={"rollout/success_rate": 0.63})
    """

    update: int
    wall_time_s: float
    """Time of the update, in seconds since 1970."""

    values: dict[str, float]

    late_at: int | None = None
    """Newest update when these values were measured, if they came late."""


class MetricLog:
    """Writes each update's metrics to all sinks.

    Use as a context manager, from one thread; a write takes about 1 ms.

    Args:
        sinks: the destinations of the metrics.
        lines: the file of record, whose lines `secured` syncs. Not one of `sinks`.
    """

    def __init__(self, sinks: Sequence[Sink], lines: JsonlSink | None = None) -> None:
        self._file = lines
        self._lines = (
            None
            if lines is None
            else RetryingWriter(type(lines).__name__, partial(_write_line, lines), lines.close)
        )
        self._shown = [*map(_sink_writer, sinks)]
        self._writers = [*([] if self._lines is None else [self._lines]), *self._shown]
        self._newest = 0

    @classmethod
    def open_log(
        cls, run: RunDirectory, wandb_project: str | None = None, *, resumed_at: int | None = None
    ) -> "MetricLog":
        """Open the log of a run: `metrics.jsonl`, TensorBoard, and Weights & Biases if named.

        A run that was resumed at an update repeats the later ones: their old lines are set aside
        first.

        Raises: ConfigError if a wandb project is named and wandb is not installed; OSError if lines
        cannot be set aside.
        """
        if resumed_at is not None:
            # before any sink opens the file, because one that is open goes on behind the old lines
            set_aside_lines(run.metrics, partial(_is_up_to_update, last=resumed_at))
        sinks: list[Sink] = [TensorBoardSink(run.tensorboard, resumed_at=resumed_at)]
        if wandb_project is not None:
            sinks.append(
                WandbSink(
                    wandb_project, run.path.name, msgspec.json.decode(run.config.read_bytes())
                )
            )
        return cls(sinks, JsonlSink(run.metrics))

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one update; values are anything that `float` accepts.

        Raises: ConfigError for a key without a namespace; the other metrics are written, so that
        the update has its line.
        """
        known = {key: float(value) for key, value in values.items() if _KEY.fullmatch(key)}
        measured = Measured(update, time.time(), known)
        self._newest = max(self._newest, update)
        for writer in self._writers:
            writer.put(f"update {update}", measured)
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"metric key is {key!r}, expected a path such as 'train/loss'; put a "
                    "namespace before it."
                )

    def write_late(self, update: int, values: Mapping[str, float]) -> None:
        """Write values that were measured after the update's line, such as held-out success.

        They go to the sinks that draw curves; `metrics.jsonl` has exactly one line for each update.
        """
        measured = Measured(update, time.time(), dict(values), max(self._newest, update))
        for writer in self._shown:
            writer.put(f"held-out episodes of weights {update}", measured)

    def secured(self) -> bytes:
        """Sync the lines so far to disk. Return the lines that could not be written to the file.

        A checkpoint that holds these is complete: every update in it has its line somewhere on
        disk.
        """
        assert self._file is not None
        assert self._lines is not None
        # first, because a disk that has room again needs no copy of the lines in the checkpoint
        self._lines.flush()
        try:
            self._file.sync()
        except OSError as error:
            logger.warning("the lines of metrics may not have reached the disk: %s", error)
        return b"".join(
            metrics_line(each.update, each.wall_time_s, each.values) for each in self._lines.waiting
        )

    def add_missing(self, lines: bytes, path: Path) -> None:
        """Write those of `lines` whose updates are missing in the file of record at `path`.

        `secured` returned the lines.
        """
        assert self._lines is not None
        present = {line["update"] for line in read_metrics(path)} if path.exists() else set()
        for line in lines.splitlines():
            values = msgspec.json.decode(line, type=dict[str, Any])
            update, wall_time_s = values.pop("update"), values.pop("wall_time_s")
            if update not in present:
                self._lines.put(f"update {update}", Measured(update, wall_time_s, values))

    def close(self) -> None:
        """Write the metrics that wait, and close all sinks.

        A sink that fails to close is reported.
        """
        while self._writers:
            # taken off the list first: closing twice, after an error in between, must not write
            # twice
            self._writers.pop().close()


def _sink_writer(sink: Sink) -> RetryingWriter[Measured]:
    return RetryingWriter(type(sink).__name__, partial(_write, sink), sink.close)


def _write_line(lines: JsonlSink, measured: Measured) -> None:
    lines.write_metrics(measured.update, measured.wall_time_s, measured.values)


def _write(sink: Sink, measured: Measured) -> None:
    if measured.late_at is None:
        sink.write_metrics(measured.update, measured.wall_time_s, measured.values)
    else:
        sink.write_late(measured.update, measured.wall_time_s, measured.values, measured.late_at)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a `metrics.jsonl`, one an update, in order of updates.

    If an update has two lines, the later one counts.

    Lines that cannot be read are left out, with one warning that counts them.
    """
    by_update: dict[int, dict[str, Any]] = {}
    num_damaged = 0
    for line in path.read_bytes().splitlines():
        values = _parsed_line(line)
        if values is None:
            num_damaged += 1
        else:
            by_update[values["update"]] = values
    if num_damaged:
        logger.warning(
            "%s: %d lines are not the metrics of an update and are left out", path, num_damaged
        )
    return [by_update[update] for update in sorted(by_update)]


def _is_up_to_update(line: bytes, last: int) -> bool:
    values = _parsed_line(line)
    if values is None:
        raise ValueError("these are not the metrics of an update")
    update: int = values["update"]
    return update <= last


def _parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return the metrics in a line; None if it is damaged."""
    try:
        values = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):  # not a JSON object, or not UTF-8
        return None
    # a value that was not finite is null in the file
    is_number = all(value is None or isinstance(value, int | float) for value in values.values())
    return values if is_number and type(values.get("update")) is int else None
