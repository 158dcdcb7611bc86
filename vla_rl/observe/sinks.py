"""Where metrics go: a file of JSON lines, TensorBoard event files, Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.errors import ConfigError


class JsonlSink:
    """One JSON object a line, each handed to the system at once, so a crash loses none that was written.

    Keys: `update`, `wall_time_s` (seconds since 1970) and the metrics; a value that is not finite is null. Appends to what
    an earlier run left; where that ends in half a line, the half stays and a new line begins.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        if self._file.tell() > 0 and not _ends_with_newline(path):
            self._file.write(b"\n")

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Write one line in one system call."""
        self._file.write(msgspec.json.encode({"update": update, "wall_time_s": wall_time_s, **values}) + b"\n")

    def close(self) -> None:
        """Bring the file to the disk."""
        with self._file:
            os.fsync(self._file.fileno())


class TensorBoardSink:
    """Scalars as TensorBoard event files, by tensorboard's own writer; imports no torch and no tensorflow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # slow to import, needed only here
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Hand one event with all values to the writer's thread, which flushes every 5 s."""
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._writer.add_event(self._event(wall_time=wall_time_s, step=update, summary=summary))

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; needs the extra `vla_rl[wandb]`.

    Raises: ConfigError where wandb is not installed.
    """

    def __init__(self, project: str, run_name: str, config: Mapping[str, Any]) -> None:
        self._run = import_wandb(project).init(project=project, name=run_name, config=dict(config))

    def write(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Log one update."""
        self._run.log({**values, "wall_time_s": wall_time_s}, step=update)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


def import_wandb(project: str) -> Any:
    """The package, an extra that is imported only where it is asked for. Raises: ConfigError where it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"metrics should go to the wandb project {project!r}, but wandb is not installed; install vla_rl[wandb] or "
            "leave the project out."
        ) from error
    return wandb


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
