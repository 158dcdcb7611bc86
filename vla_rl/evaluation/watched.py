"""Episodes that people watch: their outcomes in words and as a table, their frames with captions."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from rich.table import Table

from vla_rl.reporting.videos import add_caption

FRAMES_PER_S = 20.0
"""Frame rate of the video. It equals the control rate, so the video runs in real time."""


class Episode(msgspec.Struct, frozen=True):
    """The outcome of one episode."""

    task: str
    instruction: str
    init_state_id: int
    is_success: bool
    num_steps: int
    frames: list[np.ndarray]
    """uint8 [S, S, 3] each, before the first control step and after every one; empty without a
    video."""

    obstacle: str | None = None
    """Why the expert stood still at the end; None if it did not."""

    @property
    def in_words(self) -> str:
        """One line with its start, its outcome and its length."""
        outcome = "success" if self.is_success else "failure"
        reason = "" if self.is_success or self.obstacle is None else f": {self.obstacle}"
        return (
            f"{self.task} from {self.init_state_id}: {outcome} after {self.num_steps} "
            f"control steps{reason}"
        )


def table_of(episodes: Sequence[Episode], title: str) -> Table:
    """Return the successes of each task and their mean length."""
    table = Table("task", "instruction", "successes", "mean length", title=title)
    for task in dict.fromkeys(episode.task for episode in episodes):
        played = [episode for episode in episodes if episode.task == task]
        lengths = [episode.num_steps for episode in played if episode.is_success]
        mean = f"{np.mean(lengths):.0f}" if lengths else "-"
        table.add_row(task, played[0].instruction, f"{len(lengths)}/{len(played)}", mean)
    return table


def captioned(episodes: Sequence[Episode]) -> Iterator[np.ndarray]:
    """Yield each frame with the instruction and the progress below it.

    An episode's last frame stays for a second.
    """
    for episode in episodes:
        outcome = "success" if episode.is_success else "failure"
        for index, frame in enumerate(episode.frames):
            is_last = index == len(episode.frames) - 1
            status = (
                f"{outcome if is_last else index}  {episode.task}  initial state "
                f"{episode.init_state_id}"
            )
            captioned = add_caption(frame, episode.instruction, status)
            yield from [captioned] * (int(FRAMES_PER_S) if is_last else 1)
