"""Numbers of a run, by update, to every place that keeps them.

Keys read like paths: `rollout/success_rate`, `train/loss`, `env/steps_per_s`, `time/update_s`. A sink that fails is
reported once and left out from then on: a full disk or a lost connection costs the figures, not the run.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.observe.run_directory import RunDirectory
from vla_rl.observe.sinks import JsonlSink, TensorBoardSink, WandbSink

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[^/]+(/[^/]+)+")


class Sink(Protocol):
    """A place that keeps metrics. `write` may raise anything; it is then not called again."""

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Keep the values of one update."""
        ...

    def close(self) -> None:
        """Bring what was written to safety and let go of files and connections."""
        ...


class MetricLog:
    """Writes each update's metrics to all sinks. Use as a context manager, from one thread; a write takes about 1 ms."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    @classmethod
    def open(cls, run: RunDirectory, wandb_project: str | None = None) -> "MetricLog":
        """The log of a run: `metrics.jsonl`, TensorBoard and, where a project is named, Weights & Biases.

        Raises: ConfigError where wandb is asked for and not installed.
        """
        sinks: list[Sink] = [JsonlSink(run.metrics), TensorBoardSink(run.tensorboard)]
        if wandb_project is not None:
            sinks.append(WandbSink(wandb_project, run.path.name, msgspec.json.decode(run.config.read_bytes())))
        return cls(sinks)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of one update; anything that `float` takes is a value.

        Raises: ConfigError for a key without a namespace.
        """
        for key in values:
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    f"metric key is {key!r}, expected a path such as 'train/loss'; put a namespace before it."
                )
        numbers = {key: float(value) for key, value in values.items()}
        wall_time_s = time.time()
        for sink in tuple(self._sinks):
            try:
                sink.write(update, wall_time_s, numbers)
            except Exception as error:  # whatever a back end raises, the run goes on without it
                self._sinks.remove(sink)
                name = type(sink).__name__
                logger.warning("%s failed in update %d and gets no more metrics: %r", name, update, error)

    def close(self) -> None:
        """Close all sinks; one that fails to close is reported."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:  # the others still have to be closed
                logger.warning("%s failed to close, its last metrics may be lost: %r", type(sink).__name__, error)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, one an update, in order of updates.

    A line cut off by a crash is left out; where a resumed run did an update again, its later line counts.
    """
    by_update: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        by_update[values["update"]] = values
    return [by_update[update] for update in sorted(by_update)]
