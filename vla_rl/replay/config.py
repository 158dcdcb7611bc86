"""Settings of a replay buffer: of one in any program, and of a run's."""

from collections.abc import Mapping
from typing import Annotated, Literal

import tyro

from vla_rl.datasets.opening import DatasetOptions
from vla_rl.types import Config, NonNegativeInt, PositiveInt


class ReplayConfig(Config, frozen=True, kw_only=True):
    """How much a replay buffer keeps, and what it does with files that it finds."""

    capacity: PositiveInt = 50_000
    """Most rows besides demonstrations; a row is one decision. The oldest ones are dropped first. 50,000
    rows of 256 features need 0.2 GB, of 2,048 features 0.9 GB."""

    min_success_rows: NonNegativeInt = 0
    """Rows of successful episodes that stay although they are the oldest, so that a policy that gets
    worse does not lose its examples. 0: successes are dropped by age like all rows."""

    features: Literal["float16", "float32"] = "float32"
    """Type of stored features. float16 halves memory and files, for features below 65,504."""

    existing: Literal["refuse", "load"] = "refuse"
    """Treatment of rows that the folder of a new run already has: refuse to start, or load them. A resume
    loads those of its checkpoint."""

    newer: Literal["truncate", "take_over"] = "truncate"
    """Treatment of rows that are newer than the checkpoint of a resume: remove them, so that it samples
    the same rows as before, or keep them, so that no robot time is lost."""

    damaged: Literal["refuse", "drop"] = "refuse"
    """Treatment of a file of rows that is damaged or missing: an error that names it, or a warning, and the
    run goes on without its rows."""

    def __post_init__(self) -> None:
        self.require(
            self.min_success_rows < self.capacity,
            "min_success_rows",
            f"less than capacity, {self.capacity} rows",
        )

    def describe_dropped(self, num_rows: int) -> str:
        """Describe that these rows were found and dropped at once, and what keeps them."""
        return (
            f"dropped {num_rows} rows, the oldest files first, because the replay buffer's capacity is "
            f"{self.capacity}; raise it (--replay.capacity) to learn from them too."
        )


class RunReplayConfig(ReplayConfig, frozen=True, kw_only=True):
    """The replay buffer of a run: where it is, how much it keeps, and what it begins with."""

    folder: str | None = None
    """Folder of the buffer. None: `replay` in the run's folder."""

    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Learn from this alone, without running an episode: a folder of recorded episodes, a
    LeRobotDataset, or another run's buffer. None: from episodes that the run collects."""

    demonstrations: str | None = None
    """The same kinds of folders, whose episodes are stored before the first update and stay for ever.
    None: none."""

    data: DatasetOptions = DatasetOptions()
    """Facts that these data sets do not record."""

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of data sets if none is named."""
        if self.source is None and self.demonstrations is None:
            return {"data": "replay.from and replay.demonstrations name no data set"}
        return {}
