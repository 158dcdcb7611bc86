"""Metrics of the gradient steps of one update, summed on the device and read once."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_host

MAXIMA: Final = ("critic/q_max",)
"""Metrics whose largest value over the steps counts, and not their mean."""


class MetricSums:
    """Sums over gradient steps."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._versions = 0.0
        self.num_steps = 0
        """Gradient steps that were added."""

    def add(self, metrics: Mapping[str, Tensor | float], mean_version: float) -> None:
        """Add a step.

        Args:
            metrics: by path, float32 [] on the device, or numbers of the host.
            mean_version: mean weight version of its rows.
        """
        self.num_steps += 1
        self._versions += mean_version
        for name, value in metrics.items():
            self._counts[name] = self._counts.get(name, 0) + 1
            if not isinstance(value, Tensor):
                self._numbers[name] = self._numbers.get(name, 0.0) + value
                continue
            before = self._sums.get(name)
            if before is None:
                self._sums[name] = value
            else:
                self._sums[name] = (
                    torch.maximum(before, value) if name in MAXIMA else before + value
                )

    def read(self, weight_version: int) -> dict[str, float]:
        """Copy the means to the host, in one copy; on the lane.

        Args:
            weight_version: version of the head after the update, from which ages are counted.
        """
        if not self.num_steps:
            return {}
        # steps that found no success or label yet have no value
        sums = [each.float() for each in self._sums.values()]
        values = to_host(torch.stack(sums))[0].tolist() if sums else []
        found = {
            name: value if name in MAXIMA else value / self._counts[name]
            for name, value in zip(self._sums, values, strict=True)
        }
        found |= {name: value / self._counts[name] for name, value in self._numbers.items()}
        age = weight_version - self._versions / self.num_steps
        return {**found, "replay/sampled_age": age}
