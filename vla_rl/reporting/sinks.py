"""The sinks of metrics: a file of JSON lines, TensorBoard event files, Weights & Biases."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.graph import AppendedFile

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

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write one line.

        Raises: OSError if it could not be written; the file then holds no part of it.
        """
        self._file.write(as_line(update, wall_time_s, values))

    def sync(self) -> None:
        """Sync the lines to disk. Raises: OSError."""
        self._file.sync()

    def close(self) -> None:
        """Sync the lines to disk and close the file."""
        try:
            self._file.sync()
        finally:
            self._file.close()


def as_line(update: int, wall_time_s: float, values: Mapping[str, float]) -> bytes:
    """Return one line of `metrics.jsonl`, with its newline."""
    return msgspec.json.encode({"update": update, "wall_time_s": wall_time_s, **values}) + b"\n"


class TensorBoardSink:
    """Scalars in a TensorBoard event file; imports neither torch nor tensorflow.

    When `write` returns, the event is in the file completely or not at all, because a reader stops
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
        names = (int(time.time()), socket.gethostname(), os.getpid(), next(_EVENT_FILES))
        opening = _as_record(
            Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
        )
        if resumed_at is not None:
            begins = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=resumed_at + 1, session_log=begins)
            opening += _as_record(event.SerializeToString())
        path = folder / "events.out.tfevents.{:010d}.{}.{}.{}".format(*names)
        self._file = AppendedFile(path, opening=opening)

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write one event with all values. Raises: OSError if it could not be written."""
        summary = self._summary(
            value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        )
        event = self._event(wall_time=wall_time_s, step=update, summary=summary)
        self._file.path.parent.mkdir(exist_ok=True)
        self._file.write(_as_record(event.SerializeToString()))

    def write_late(
        self, update: int, wall_time_s: float, values: Mapping[str, float], now: int
    ) -> None:
        """Write one event at its own update, also after those of later ones."""
        self.write(update, wall_time_s, values)

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

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
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


def _as_record(data: bytes) -> bytes:
    """Return data as a record of an event file, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(data)
    return record.getvalue()
