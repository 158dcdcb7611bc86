"""Read other projects' stored weights and results, with which off-policy losses are compared."""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

FOLDER: Final = Path(__file__).parents[1] / "tests" / "algorithms" / "golden"


class GoldenWeights:
    """Weights of one network, by name.

    Args:
        tensors: `<layer>.weight` and `<layer>.bias` of linear layers, float32.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @classmethod
    def read(cls, golden: Mapping[str, Tensor], network: str) -> "GoldenWeights":
        """Take the weights that a golden file has below a name; they get gradients."""
        start = network + "/"
        return cls(
            {
                name.removeprefix(start): value.clone().requires_grad_()
                for name, value in golden.items()
                if name.startswith(start)
            }
        )

    def apply(self, layers: Sequence[str], inputs: Tensor) -> Tensor:
        """Apply linear layers with ReLU between them; none after the last.

        Args:
            layers: their names, first to last.
            inputs: float32 [..., width of the first].

        Returns: float32 [..., width of the last].
        """
        for position, layer in enumerate(layers):
            weight, bias = self.tensors[f"{layer}.weight"], self.tensors[f"{layer}.bias"]
            inputs = nn.functional.linear(inputs, weight, bias)
            inputs = torch.relu(inputs) if position + 1 < len(layers) else inputs
        return inputs

    def gradients(self, loss: Tensor, prefix: str) -> dict[str, Tensor]:
        """Differentiate a loss by every weight: by prefix and the weight's name."""
        found = torch.autograd.grad(loss, list(self.tensors.values()), retain_graph=True)
        return {f"{prefix}/{name}": each for name, each in zip(self.tensors, found, strict=True)}


def formula_weight(name: str, shape: tuple[int, ...], phase: float) -> Tensor:
    """Return the weight of this name: float32, a sine whose start depends on the name."""
    start = 2.0 * math.pi * (zlib.crc32(name.encode()) % 1000) / 1000 + phase
    wave = np.sin(0.37 * np.arange(math.prod(shape)) + start) * (0.3 if len(shape) > 1 else 0.2)
    return torch.from_numpy(wave.astype(np.float32).reshape(shape))


def load_arrays(name: str) -> dict[str, Tensor]:
    """Read a golden file of `tests/algorithms/golden`."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of `theirs`."""
    if ours.shape != theirs.shape:
        raise ValueError(f"ours is {list(ours.shape)}, theirs {list(theirs.shape)}.")
    distance = (ours.detach().double() - theirs.double()).abs().max()
    difference = float(distance / theirs.double().abs().max())
    # a NaN would get lost in the largest of several
    return math.inf if math.isnan(difference) else difference
