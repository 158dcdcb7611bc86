"""The results of an evaluation as episodes end: a line for each, then its video."""

import asyncio
from pathlib import Path
from typing import Final

from vla_rl.evaluation.eval_config import EvalConfig
from vla_rl.evaluation.results import EpisodeResult, ResultFile, result_of
from vla_rl.reporting.outlet import FailureStreak
from vla_rl.reporting.videos import write_video
from vla_rl.types import Trajectory
from vla_rl.util.tasks import run_in_thread

VIDEO_FRAMES_PER_S: Final = 5.0
"""One frame for each decision."""


class ResultKeeper:
    """Stores the result of each episode, then makes a video if one is wanted.

    One episode at a time.
    """

    def __init__(self, config: EvalConfig, file: ResultFile, videos: Path) -> None:
        self._config, self._file, self._videos = config, file, videos
        self._turn = asyncio.Lock()
        self._failures = FailureStreak(f"writing videos to {videos}", "that episode has none")

    @property
    def num_failed_videos(self) -> int:
        """Videos that could not be written."""
        return self._failures.num_failed

    async def keep(self, trajectory: Trajectory) -> None:
        """Store a result on disk, then make its video.

        A video that cannot be made is reported and counted.
        """
        result = result_of(trajectory)
        async with self._turn:
            await run_in_thread(self._file.add, result)
            try:
                await run_in_thread(_film, self._config, trajectory, result, self._videos)
            except (OSError, ValueError) as error:
                self._failures.failed(str(result.key), error)
            else:
                self._failures.worked()


def _film(config: EvalConfig, trajectory: Trajectory, result: EpisodeResult, folder: Path) -> None:
    """Make a video if one is wanted and the task has too few of them."""
    outcome = "success" if result.is_success else "failure"
    wanted = {
        "none": (),
        "failures": ("failure",),
        "successes": ("success",),
        "both": ("failure", "success"),
    }
    kind = f"{result.suite}-{result.task_id}_{outcome}"
    if (
        outcome in wanted[config.videos]
        and len(list(folder.glob(f"{kind}_init-*.mp4"))) < config.videos_per_task
    ):
        path = folder / f"{kind}_init-{result.init_state_id}_scene-{result.scene_seed}.mp4"
        write_video(path, trajectory, "image", VIDEO_FRAMES_PER_S)
