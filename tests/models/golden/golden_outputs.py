"""Read the golden outputs, and make the observations that they belong to."""

from pathlib import Path
from typing import Any

import golden_recipe
import msgspec
import numpy as np
import torch

from vla_rl.types import Sampling

ROWS = range(len(golden_recipe.INSTRUCTIONS))
GREEDY = [Sampling(greedy=True)] * len(ROWS)


def golden(name: str) -> dict[str, np.ndarray]:
    """Outputs of one project."""
    with np.load(Path(__file__).parent / f"{name}.npz") as arrays:
        return dict(arrays)


def observation(row: int, size: int) -> dict[str, Any]:
    return {
        "image": golden_recipe.frame(10 * row, size, size),
        "wrist_image": golden_recipe.frame(10 * row + 1, size, size),
        "state": golden_recipe.state(row),
        "instruction": golden_recipe.INSTRUCTIONS[row],
    }


def observations(size: int) -> list[dict[str, Any]]:
    return [observation(row, size) for row in ROWS]


def stacked(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    return np.stack([arrays[f"{name}_{row}"] for row in ROWS])


def require_close(ours: torch.Tensor | np.ndarray, theirs: np.ndarray, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=atol, rtol=0)


def uncropped(policy: Any) -> Any:
    """The same policy for frames of 224 pixels that the projects were given without their LIBERO
    steps.
    """
    config = msgspec.structs.replace(policy.config, images="bicubic")
    return type(policy)(config, policy.network, policy.tokenizer)
