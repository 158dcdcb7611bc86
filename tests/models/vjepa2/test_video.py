"""Which frames V-JEPA 2 sees, and that it sees them exactly as transformers' own processor would
show them.
"""

import numpy as np
import pytest
import torch

from vla_rl.models.vjepa2 import preprocess, sample_frames


def numbered(num: int) -> list[np.ndarray]:
    return [np.full((2, 2, 3), index, np.uint8) for index in range(num)]


def chosen(num: int, num_frames: int, short_videos: str = "cyclic") -> list[int]:
    return sample_frames(numbered(num), num_frames, short_videos)[:, 0, 0, 0].tolist()


def test_a_long_video_is_sampled_evenly_and_rounded_down() -> None:
    # j * 9 / 3 = 0, 3, 6, 9;  j * 6 / 3 = 0, 2, 4, 6;  j * 4 / 3 = 0, 1.33, 2.67, 4
    assert chosen(10, 4) == [0, 3, 6, 9]
    assert chosen(7, 4) == [0, 2, 4, 6]
    assert chosen(5, 4) == [0, 1, 2, 4]
    assert chosen(4, 4) == [0, 1, 2, 3]


def test_a_short_video_starts_over_or_is_stretched() -> None:
    assert chosen(3, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    # j * 2 / 7 = 0, .29, .57, .86, 1.14, 1.43, 1.71, 2
    assert chosen(3, 8, "stretched") == [0, 0, 0, 0, 1, 1, 1, 2]
    assert chosen(1, 4, "stretched") == [0, 0, 0, 0]


def test_a_video_of_zero_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="the video has no frame"):
        sample_frames([], 64, "cyclic")


@pytest.mark.parametrize(
    ("height", "width", "image_size"),
    [(84, 84, 32), (84, 84, 96), (128, 100, 64), (60, 90, 112), (64, 77, 80), (256, 256, 384)],
)
def test_frames_are_prepared_as_the_processor_of_transformers_does(
    height: int, width: int, image_size: int
) -> None:
    from transformers.models.vjepa2.video_processing_vjepa2 import VJEPA2VideoProcessor

    frames = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    )
    processor = VJEPA2VideoProcessor(crop_size=image_size)
    theirs = processor(frames.permute(0, 3, 1, 2), return_tensors="pt", do_sample_frames=False)[
        "pixel_values_videos"
    ]
    assert torch.equal(preprocess(frames, image_size), theirs[0])


def test_a_white_frame_has_the_number_that_imagenet_gives_it() -> None:
    white = preprocess(torch.full((1, 4, 4, 3), 255, dtype=torch.uint8), 16)
    # (1 - mean) / std, channel by channel
    expected = torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    torch.testing.assert_close(white[0, :, 8, 8], expected)
