"""The replay buffer of a run: opened in the run's folder, with its state in the run's checkpoints."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.files import load_part
from vla_rl.learner.checkpoint.folders import list_checkpoints
from vla_rl.replay import ReplayBuffer, ReplayState, TransitionLayout
from vla_rl.replay.config import RunReplayConfig
from vla_rl.replay.segments import INSIDE_RUN, read_number

REPLAY: Final = "replay"
"""Name of the replay buffer's part of a checkpoint."""

NOTHING_STORED: Final = ReplayState(run="", segments=(), next_number=0, tasks=(), stored={})


class RunReplay:
    """A replay buffer that is opened with its run.

    Args:
        layout: sizes of the policy's rows.
        config: folder, capacity, and what happens to files that are found.
    """

    def __init__(self, layout: TransitionLayout, config: RunReplayConfig) -> None:
        self._given, self.config = layout, config
        """Settings."""
        self._buffer: ReplayBuffer | None = None

    @property
    def layout(self) -> TransitionLayout:
        """Sizes and types of the stored rows."""
        return msgspec.structs.replace(self._given, features_dtype=self.config.features)

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer, while it is open."""
        assert self._buffer is not None, "the buffer is open while its run is"
        return self._buffer

    @contextmanager
    def opened(
        self,
        run: Path,
        *,
        is_resumed: bool = False,
        has_checkpoint: bool = False,
        find_needed: Callable[[], Collection[int]] = tuple,
    ) -> Iterator[ReplayBuffer]:
        """Open the buffer of a run in its folder.

        A run that begins refuses a folder with rows of another one, unless `existing` says otherwise. So
        does one that is resumed without a checkpoint, unless the folder is in its own.

        Args:
            run: folder of the run.
            is_resumed: whether that is an earlier run's.
            has_checkpoint: whether a checkpoint is restored next.
            find_needed: returns the numbers of the segments that checkpoints on the disk name.

        Raises: ConfigError if another process has the folder; DataError for rows of another base or
            layout, or that nothing may load.
        """
        folder = run / INSIDE_RUN if self.config.folder is None else Path(self.config.folder)
        with ReplayBuffer(folder, self._given, self.config, find_needed=find_needed) as buffer:
            self._buffer = buffer
            try:
                # Rows of a folder that was named may be another run's, for which this one was refused.
                is_own = self.config.folder is None and self.config.existing == "refuse"
                if is_resumed and not has_checkpoint and is_own:
                    # it ended before its first checkpoint, so all rows are newer than what it resumes
                    buffer.restore(NOTHING_STORED)
                elif not has_checkpoint:
                    buffer.start()
                yield buffer
            finally:
                self._buffer = None

    def state(self) -> ReplayState:
        """Return the names of the stored rows, for a checkpoint."""
        return self.buffer.state()

    def restore(self, state: ReplayState) -> None:
        """Continue with the rows of a checkpoint."""
        self.buffer.restore(state)


def list_needed_segments(checkpoints: Path) -> set[int]:
    """Return the numbers of the segments that the checkpoints of a run name. Blocks.

    A checkpoint whose part is damaged names none: nothing can be resumed from it.
    """
    needed: set[int] = set()
    for folder in list_checkpoints(checkpoints):
        try:
            state = load_part(folder, REPLAY, ReplayState)
        except CheckpointError:
            continue
        needed |= {segment.number for segment in state.segments}
    return needed


def list_missing_segments(run: Path, present: Sequence[Path]) -> list[int]:
    """Return the numbers of segments that checkpoints in the folder of a run name and that are not present. Blocks.

    A folder without checkpoints, such as that of a buffer itself, misses none.
    """
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        return []
    return sorted(list_needed_segments(checkpoints) - {read_number(path) for path in present})
