"""What people see of episodes: contact sheets of drives, frames with captions, outcomes."""

import io
import pkgutil

import numpy as np
from evaluated import evaluated
from rich.console import Console

from vla_rl.envs.driving.roads import LAYOUTS
from vla_rl.envs.driving.world import draw_world
from vla_rl.evaluation import result_table
from vla_rl.evaluation.contact_sheets import (
    FRAMES_PER_S,
    MOST_SCENES,
    WatchedEpisode,
    _chosen_scenes,
    caption_episodes,
    write_drive_sheet,
)
from vla_rl.util.imports import import_path


def test_the_process_that_evaluates_checkpoints_finds_the_function_by_its_path() -> None:
    assert pkgutil.resolve_name(import_path(write_drive_sheet)) is write_drive_sheet


def test_the_first_scene_of_each_layout_is_chosen() -> None:
    chosen = _chosen_scenes("held_out", None)
    kinds = [draw_world(number, "held_out").kind for number in range(MOST_SCENES)]
    assert chosen == {kinds.index(kind): kind for kind in set(kinds)}


def test_a_named_layout_has_its_contact_sheets_in_the_first_round_of_layouts() -> None:
    assert _chosen_scenes("held_out", "tee") == dict.fromkeys(range(len(LAYOUTS)), "tee")


def watched(start: int, is_success: bool, num_steps: int) -> WatchedEpisode:
    frames = [np.full((64, 64, 3), index, np.uint8) for index in range(3)]
    steps = {"steps": float(num_steps), "attempts": 1.0}
    record = evaluated("libero_goal/3", start, is_success, parts=steps, instruction="open it")
    return WatchedEpisode(record, frames, None if is_success else "the drawer is closed")


def test_a_failure_is_told_with_the_experts_reason() -> None:
    assert watched(4, True, 90).describe() == (
        "libero_goal/3 from 4: success after 90 control steps"
    )
    assert watched(5, False, 280).describe() == (
        "libero_goal/3 from 5: failure after 280 control steps: the drawer is closed"
    )


def test_the_table_has_the_mean_length_of_the_successes() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    episodes = [watched(0, True, 80), watched(1, True, 100), watched(2, False, 280)]
    console.print(result_table([episode.record for episode in episodes], "by an expert"))
    row = next(line for line in console.export_text().splitlines() if "libero_goal/3" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "libero_goal/3",
        "open it",
        "2/3 = 66.7 % (20.8 to 93.9)",
        "90",
    ]


def test_the_last_frame_stays_for_a_second() -> None:
    frames = list(caption_episodes([watched(0, True, 2)]))
    assert len(frames) == 2 + FRAMES_PER_S
    assert frames[0].shape[0] > frames[0].shape[1]  # the caption is below the square frame
    assert not np.array_equal(frames[0], frames[2])
    assert all(np.array_equal(frame, frames[2]) for frame in frames[2:])
