"""Video input of V-JEPA 2: frames of a trajectory are sampled, resized and normalised.

    frames uint8 [n, H, W, 3] ─► 64 of them ─► short side to 438 ─► middle 384 x 384 ─► ImageNet's mean and std

Equals transformers' `VJEPA2VideoProcessor` bit for bit on a CPU; frames stay uint8 until they are
on the device.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from vla_rl.engines.device_lane import to_device

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)


def sample_frames(
    frames: Sequence[NDArray[np.uint8]], num_frames: int, short_videos: str
) -> NDArray[np.uint8]:
    """Sample `num_frames` of n frames, in the order of time.

        n >= num_frames            frame floor(j * (n - 1) / (num_frames - 1)) for each j
        n < num_frames, cyclic     0, 1, .., n - 1, 0, 1, ..
        n < num_frames, stretched  the first line, so that frames repeat in place

    Args:
        frames: uint8 [H, W, 3] each, n >= 1, all of one size.
        num_frames: number of frames to return, >= 2.
        short_videos: `cyclic` or `stretched`.

    Returns: uint8 [num_frames, H, W, 3]. Raises: ValueError if there is no frame.
    """
    if not len(frames):
        raise ValueError("the video has no frame, expected at least one.")
    if len(frames) < num_frames and short_videos == "cyclic":
        chosen = np.resize(np.arange(len(frames)), num_frames)
    else:
        chosen = np.linspace(0, len(frames) - 1, num_frames).astype(np.int64)
    return np.stack([frames[int(index)] for index in chosen])


def preprocess(frames: Tensor, image_size: int) -> Tensor:
    """Resize, crop and normalise one video, on its device.

    Args:
        frames: uint8 [n, H, W, 3].
        image_size: side of the result; the short side of the frame is resized to int(image_size *
            256 / 224) before.

    Returns: float32 [n, 3, image_size, image_size].
    """
    images = frames.permute(0, 3, 1, 2)
    height, width = images.shape[-2:]
    short = int(image_size * 256 / 224)
    size = (
        [short, int(short * width / height)]
        if height <= width
        else [int(short * height / width), short]
    )
    images = vision.resize(images, size, vision.InterpolationMode.BILINEAR, antialias=True)
    top, left = ((side - image_size) // 2 for side in size)
    images = images[..., top : top + image_size, left : left + image_size].float()
    mean, std = (
        to_device(torch.tensor(numbers).view(3, 1, 1) * 255.0, images.device)
        for numbers in (MEAN, STD)
    )
    pixels: Tensor = (images - mean) / std
    return pixels
