"""AdamW with warm-up, clipping, and a skip for gradients that are not finite; its state by parameter name."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from vla_rl.engines.config import OptimizerConfig
from vla_rl.errors import CheckpointError

_log = logging.getLogger(__name__)

MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter that ever had a gradient."""

NUM_STEPS: Final = "num_steps"
"""Name of the step count among the saved tensors; no parameter name is a single word."""


class DivergedError(FloatingPointError):
    """Several optimizer steps one after another had a gradient with NaN or infinity."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping; NaN or infinite where the step was skipped."""

    lr: float
    is_skipped: bool


class PolicyOptimizer:
    """Optimises all parameters of a network that require a gradient. Lives on the device lane.

    Build it before anything in the process creates a GL context: AdamW imports libraries that crash after Mesa's. A learner
    process does not render.
    """

    def __init__(self, network: nn.Module, config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = {
            name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(
            self._parameters.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._num_steps = 0
        self._num_skips_in_a_row = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps tried, skipped ones included; the learning rate follows it."""
        return self._num_steps

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad()

    def step(self) -> StepReport:
        """Clip and apply the gradients, or skip them where they are not finite.

        Raises: DivergedError after `max_skips_in_a_row` skipped steps.
        """
        lr = self.learning_rate()
        self._num_steps += 1
        parameters = list(self._parameters.values())
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return StepReport(grad_norm=grad_norm, lr=lr, is_skipped=True)
        self._num_skips_in_a_row = 0
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()
        return StepReport(grad_norm=grad_norm, lr=lr, is_skipped=False)

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then constant or a cosine down to `final_lr_share`."""
        config, step = self._config, self._num_steps
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        if config.decay_steps is None:
            return config.lr
        progress = min((step - config.warmup_steps) / (config.decay_steps - config.warmup_steps), 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.lr * (config.final_lr_share + (1.0 - config.final_lr_share) * cosine)

    def tensors(self) -> dict[str, Tensor]:
        """Its whole state as named tensors; views, not copies."""
        state = {NUM_STEPS: torch.tensor(self._num_steps)}
        for name, parameter in self._parameters.items():
            for moment, tensor in self._adamw.state.get(parameter, {}).items():
                state[f"{moment}/{name}"] = tensor
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state. Raises: CheckpointError where its names or shapes are not this network's."""
        found = dict(tensors)
        try:
            num_steps = int(found.pop(NUM_STEPS))
            states = {}
            for index, (name, parameter) in enumerate(self._parameters.items()):
                if f"{MOMENTS[0]}/{name}" in found:
                    states[index] = {moment: found.pop(f"{moment}/{name}").clone() for moment in MOMENTS}
                    _require_shape(name, states[index]["exp_avg"], parameter)
        except KeyError as error:
            raise CheckpointError(f"the optimizer's state has no {error}; it is not whole.") from error
        if found:
            raise CheckpointError(f"the optimizer's state has unknown names, such as {min(found)!r}.")
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": states, "param_groups": groups})
        self._num_steps = num_steps

    def _skip(self, grad_norm: float) -> None:
        self.zero_grad()
        self._num_skips_in_a_row += 1
        _log.error("optimizer step %d skipped: its gradient norm is %s", self._num_steps, grad_norm)
        if self._num_skips_in_a_row >= self._config.max_skips_in_a_row:
            raise DivergedError(
                f"{self._num_skips_in_a_row} optimizer steps in a row had a gradient that is not finite (norm {grad_norm}); "
                "expected finite ones. Resume from an older checkpoint with a smaller lr, or look for NaN in the rewards."
            )


def _require_shape(name: str, saved: Tensor, parameter: Tensor) -> None:
    if saved.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer's state of {name} is {list(saved.shape)}, expected {list(parameter.shape)}."
        )
