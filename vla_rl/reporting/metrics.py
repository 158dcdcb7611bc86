"""Metrics of a run, by update, written to each of its sinks.

Keys read like paths: `rollout/success_rate`, `train/loss`, `env/steps_per_s`, `time/update_s`. A
sink that fails is reported once; the metrics it missed are kept and written when it works again, so
a full disk does not stop the run.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.reporting.outlet import Outlet
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.reporting.sinks import JsonlSink, TensorBoardSink, WandbSink, as_line
from vla_rl.reporting.undone_lines import set_aside_lines

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[^/]+(/[^/]+)+")


class Sink(Protocol):
    """A destination of metrics.

    `write` may raise any error; after an OSError the same update is tried again later.
    """

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
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
    """Metrics of one update."""

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
            else Outlet(type(lines).__name__, partial(_write_line, lines), lines.close)
        )
        self._shown = [*map(_outlet, sinks)]
        self._outlets = [*([] if self._lines is None else [self._lines]), *self._shown]
        self._newest = 0

    @classmethod
    def open(
        cls, run: RunDirectory, wandb_project: str | None = None, *, resumed_at: int | None = None
    ) -> "MetricLog":
        """Open the log of a run: `metrics.jsonl`, TensorBoard, and Weights & Biases if named.

        A run that was resumed at an update repeats the later ones: their old lines are set aside
        first.

        Raises: ConfigError if a wandb project is named and wandb is not installed; OSError if lines
        cannot be set aside.
        """
        if resumed_at is not None:
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
        for outlet in self._outlets:
            outlet.put(f"update {update}", measured)
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
        for outlet in self._shown:
            outlet.put(f"held-out episodes of weights {update}", measured)

    def secured(self) -> bytes:
        """Sync the lines so far to disk. Return the lines that could not be written to the file.

        A checkpoint that holds these is complete: every update in it has its line somewhere on
        disk.
        """
        assert self._file is not None
        assert self._lines is not None
        self._lines.flush()
        try:
            self._file.sync()
        except OSError as error:
            logger.warning("the lines of metrics may not have reached the disk: %s", error)
        return b"".join(
            as_line(each.update, each.wall_time_s, each.values) for each in self._lines.waiting
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
        while self._outlets:
            self._outlets.pop().close()


def _outlet(sink: Sink) -> Outlet[Measured]:
    return Outlet(type(sink).__name__, partial(_write, sink), sink.close)


def _write_line(lines: JsonlSink, measured: Measured) -> None:
    lines.write(measured.update, measured.wall_time_s, measured.values)


def _write(sink: Sink, measured: Measured) -> None:
    if measured.late_at is None:
        sink.write(measured.update, measured.wall_time_s, measured.values)
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
    is_number = all(value is None or isinstance(value, int | float) for value in values.values())
    return values if is_number and type(values.get("update")) is int else None
