"""Temperature for greedy requests: the likeliest token has its log-prob at that temperature.

vLLM expresses greedy as temperature 0 and then reports log-probs at temperature 1. Dividing the
logits before vLLM looks for the largest one does not change its choice, and makes the reported
log-probs those that the learner computes.
"""

from typing import Any, Final

import torch
from torch import Tensor

from vla_rl.engines.vllm.adapter import LogitsProcessor

TEMPERATURE: Final = "greedy_temperature"
"""Key of a request's `extra_args`."""


class GreedyTemperature(LogitsProcessor):
    """Divides the logits of greedy requests by their temperature."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False, because vLLM would skip this processor for greedy requests otherwise.

        It is made for them.
        """
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep track of the rows in which requests are."""
        if batch_update is None:
            return
        rows = self._temperatures
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, *_ in batch_update.added:
            rows.pop(row, None)
            if params.extra_args and TEMPERATURE in params.extra_args:
                rows[row] = params.extra_args[TEMPERATURE]
        for source, target, direction in batch_update.moved:
            there, back = rows.pop(source, None), rows.pop(target, None)
            if there is not None:
                rows[target] = there
            if back is not None and direction.name == "SWAP":
                rows[source] = back

    def apply(self, logits: Tensor) -> Tensor:
        """Divide logits [rows, vocabulary] in place."""
        for row, temperature in self._temperatures.items():
            logits[row] /= temperature
        return logits
