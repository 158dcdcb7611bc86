"""Pictures drawn by a formula, for the tests of image pipelines."""

import numpy as np
import torch
from torch import Tensor


def picture(kind: str, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    if kind == "noise":
        return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "waves":
        return np.stack([x * 2 % 256, y * 3 % 256, (x + y) % 256], axis=-1).astype(np.uint8)
    return np.where(
        (x < width // 2)[..., None], np.array([255, 0, 10]), np.array([0, 40, 200])
    ).astype(np.uint8)


def batch_of(*pictures: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
