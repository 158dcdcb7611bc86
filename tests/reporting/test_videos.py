"""Videos: the right episodes, real frames, and no harm to the run when one fails."""

import logging
import os
import signal
import threading
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from processes import all_end, children_of

from vla_rl.reporting import VideoChoice, VideoRecorder, video_name, write_video
from vla_rl.reporting.videos import add_caption, encode_mp4


def frames_of(path) -> np.ndarray:
    video = cv2.VideoCapture(str(path))
    frames = []
    while (answer := video.read())[0]:
        frames.append(answer[1])
    video.release()
    return np.stack(frames)


def test_a_video_has_every_decision_the_final_frame_and_a_caption(
    tmp_path, make_trajectory
) -> None:
    path = tmp_path / "video.mp4"
    write_video(path, make_trajectory(num_steps=4, size=32), frames_per_s=5.0)
    frames = frames_of(path)
    assert len(frames) == 4 + 1 + 5  # decisions, the final frame, and it again for a second
    assert frames.shape[2] == 256
    mean_levels = frames[:, 20:230, 20:230].mean(axis=(1, 2, 3))
    # levels 0, 62, 125, 187, 250, the last one held; the codec may shift them a little
    np.testing.assert_allclose(mean_levels, [0, 62, 125, 187] + [250] * 6, atol=6)
    caption = frames[:, 258:]
    assert (caption > 128).any(axis=(1, 2, 3)).all()
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_success_and_failure_of_each_task_are_chosen_in_each_window(
    make_trajectory,
) -> None:
    choice = VideoChoice(every_updates=2)
    batch = [
        make_trajectory(0, task="a", is_success=True),
        make_trajectory(1, task="a", is_success=True),
        make_trajectory(2, task="a", is_success=False),
        make_trajectory(3, task="b", is_success=False),
    ]
    assert [t.episode.episode_id for t in choice.choose(0, batch)] == [0, 2, 3]
    late_success = make_trajectory(4, task="b", is_success=True)
    assert choice.choose(1, [*batch, late_success]) == [late_success]
    assert [t.episode.episode_id for t in choice.choose(2, batch)] == [0, 2, 3]


def test_the_name_tells_update_task_outcome_and_episode(make_trajectory) -> None:
    name = video_name(12, make_trajectory(345, task="libero_goal/3", is_success=False))
    assert name == "update_00012_libero_goal-3_failure_episode_345.mp4"


def test_the_recorder_writes_behind_the_back_of_the_loop(tmp_path, make_trajectory) -> None:
    with VideoRecorder(tmp_path, every_updates=1) as recorder:
        recorder.offer(
            3, [make_trajectory(7, is_success=True), make_trajectory(8, is_success=False)]
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "update_00003_libero_goal-3_failure_episode_8.mp4",
        "update_00003_libero_goal-3_success_episode_7.mp4",
    ]
    assert recorder.num_written == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("videos")]


def test_a_video_that_fails_is_logged_with_its_episode_and_leaves_nothing(
    tmp_path, make_trajectory, caplog
) -> None:
    with caplog.at_level(logging.WARNING), VideoRecorder(tmp_path, every_updates=1) as recorder:
        recorder.offer(0, [make_trajectory(7, key="camera"), make_trajectory(8, task="other")])
    assert (recorder.num_failed, recorder.num_written) == (1, 1)
    assert (
        "episode 7 has no uint8 [H, W, 3] 'image' in observation 0, only ['camera', "
        "'instruction']" in caplog.text
    )
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_gone_costs_the_video_and_not_the_run(
    tmp_path, make_trajectory, caplog
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        VideoRecorder(tmp_path / "gone", every_updates=1) as recorder,
    ):
        recorder.offer(0, [make_trajectory(7)])
    assert recorder.num_failed == 1
    assert "No such file or directory" in caplog.text


def test_beyond_its_room_videos_are_left_out_and_counted(tmp_path, make_trajectory) -> None:
    with VideoRecorder(tmp_path, every_updates=1, max_pending=1) as recorder:
        recorder.offer(0, [make_trajectory(number, task=str(number)) for number in range(20)])
    assert recorder.num_left_out >= 1
    assert recorder.num_written + recorder.num_left_out == 20


def test_where_there_was_no_room_for_the_first_of_its_kind_a_later_one_is_written(
    make_trajectory,
) -> None:
    choice = VideoChoice(every_updates=5)
    (first,) = choice.choose(0, [make_trajectory(1)])
    assert choice.choose(1, [make_trajectory(2)]) == []
    choice.undo_choice(first)
    (later,) = choice.choose(1, [make_trajectory(3)])
    assert later.episode.episode_id == 3


@pytest.mark.parametrize("size", [(33, 51), (224, 224), (256, 301), (500, 400)])
def test_any_size_becomes_even_and_the_image_stays_as_it_is(size) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    captioned = add_caption(
        image, "open the drawer and put the wine bottle on top of the cabinet", "naïve"
    )
    height, width, _ = captioned.shape
    assert height % 2 == 0
    assert width % 2 == 0
    factor = max(1, -(-256 // min(size)))
    np.testing.assert_array_equal(
        captioned[: size[0] * factor : factor, ::factor], image[:, : -(-width // factor)]
    )


def test_a_window_of_no_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="every_updates is 0"):
        VideoChoice(0)


def test_frames_that_change_size_are_refused_and_leave_nothing(tmp_path) -> None:
    frames = iter([np.zeros((16, 16, 3), np.uint8), np.zeros((16, 18, 3), np.uint8)])
    with pytest.raises(ValueError, match=r"frame 1 is \(16, 18, 3\), expected \(16, 16, 3\)"):
        encode_mp4(tmp_path / "video.mp4", frames, 5.0)


def test_a_wrong_frame_is_what_is_told_when_ffmpeg_is_gone_as_well(tmp_path) -> None:
    others = children_of(os.getpid())

    def frames() -> Iterator[np.ndarray]:
        yield np.zeros((16, 16, 3), np.uint8)
        (ffmpeg,) = children_of(os.getpid()) - others
        pidfd = os.pidfd_open(ffmpeg)
        os.kill(ffmpeg, signal.SIGKILL)
        assert all_end([pidfd], within_s=10)
        yield np.zeros((16, 18, 3), np.uint8)

    with pytest.raises(ValueError, match="frame 1 is"):
        encode_mp4(tmp_path / "video.mp4", frames(), 5.0)


def test_captions_of_any_length_keep_the_size() -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    assert (
        len({add_caption(image, title, "x" * 99).shape for title in ("", "short", "long " * 99)})
        == 1
    )
