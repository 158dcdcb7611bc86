"""AdamW with warm-up, gradient clipping, and skipping of gradients that are not finite; its state
is saved by parameter name.

Each bfloat16 parameter has a float32 master copy: an update at a usual learning rate is smaller
than the distance between two bfloat16 numbers, so most of it would be lost in rounding.

    backward ─► gradient, bfloat16 ─► added to the master's, float32     (and freed, as soon as it is complete)
    step     ─► AdamW updates the masters ─► weights = rounded masters
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from vla_rl.errors import CheckpointError
from vla_rl.learner.config import OptimizerConfig

_log = logging.getLogger(__name__)

TensorT = TypeVar("TensorT", bound=Tensor)

MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""State of AdamW for each parameter that has ever had a gradient."""

MASTER: Final = "master"
"""Prefix of the saved tensors that are float32 masters."""

NUM_STEPS: Final = "num_steps"
"""Name of the step count among the saved tensors; it cannot collide, because no parameter name is a
single word."""


_HOOKS: Final = WeakTensorKeyDictionary()
"""Hooks that pass the gradients of parameters that are not float32 to their masters."""


class DivergedError(FloatingPointError):
    """Several optimizer steps in a row had a gradient with NaN or infinity."""


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step.

    Example:
        StepReport(grad_norm=0.83, lr=1e-4, is_skipped=False)
    """

    grad_norm: float
    """Gradient norm before clipping; NaN or infinite if the step was skipped."""

    lr: float
    is_skipped: bool


class PolicyOptimizer:
    """Optimises all parameters of a network that require a gradient. All its methods run on the
    device lane.

    Build it before anything in the process creates a GL context: AdamW imports libraries that crash
    after Mesa's. A learner process does not render.

    A bfloat16 parameter belongs to the optimizer that was built last: its gradients go to that
    optimizer's masters, and each step sets it to its rounded master. After writing other weights
    into the network, build a new optimizer, or load the saved state of these weights.

    Args:
        network: holds the parameters.
        config: settings.
        compute_norm: computes the norm of all gradients, by which they are clipped.
    """

    def __init__(
        self,
        network: nn.Module,
        config: OptimizerConfig,
        compute_norm: Callable[[Sequence[Tensor]], Tensor] = nn.utils.get_total_norm,
    ) -> None:
        self._config, self._compute_norm = config, compute_norm
        # taken once, when it is built: while FSDP has gathered weights, a network lists plain
        # tensors without gradients, and clipping those gives the norm 0
        self._parameters = _trained(network)
        self._masters = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in self._parameters.items()
            if parameter.dtype != torch.float32
        }
        self._rounded: list[Tensor] = [self._parameters[name] for name in self._masters]
        for parameter, master in zip(self._rounded, self._masters.values(), strict=True):
            if parameter in _HOOKS:
                _HOOKS[parameter].remove()
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_add_to_master, master)
            )
        moved = {**self._parameters, **self._masters}
        groups = _by_mesh(moved.values())
        names = {parameter: name for name, parameter in moved.items()}
        # in the order of the optimizer's groups, whose states are numbered through
        self._moved = {names[each]: each for group in groups for each in group}
        self._adamw = torch.optim.AdamW(
            [{"params": group} for group in groups],
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._num_steps = 0
        self._num_skips_in_a_row = 0
        self._norm: Tensor | None = None

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters, as they were when the optimizer was built."""
        return self._parameters

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps tried, skipped ones included.

        The learning rate depends on it.
        """
        return self._num_steps

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._adamw.zero_grad()
        self._norm = None

    def measure_gradient(self) -> Tensor:
        """Return the norm of the complete gradients, by which the next step clips; on their device,
        so that the caller copies it to the host with other numbers."""
        gradients = [moved.grad for moved in self._moved.values() if moved.grad is not None]
        self._norm = self._compute_norm(gradients)
        return self._norm

    def step(self, grad_norm: float | None = None) -> StepReport:
        """Clip and apply the gradients, or skip the step if they are not finite.

        Args:
            grad_norm: the number that `measure_gradient` returned; None: measure now, which waits
                for the device.

        Raises: DivergedError after `max_skips_in_a_row` skipped steps in a row.
        """
        lr = self.learning_rate()
        self._num_steps += 1
        # the norm is the only number that decides about a skip; NaN in any gradient makes it NaN
        norm = self.measure_gradient() if grad_norm is None or self._norm is None else self._norm
        grad_norm = float(norm) if grad_norm is None else grad_norm
        for group in _by_mesh(self._moved.values()):
            nn.utils.clip_grads_with_norm_(group, self._config.max_grad_norm, norm)
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return StepReport(grad_norm=grad_norm, lr=lr, is_skipped=True)
        self._num_skips_in_a_row = 0
        for settings in self._adamw.param_groups:
            settings["lr"] = lr
        self._adamw.step()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._rounded, list(self._masters.values()))
        self.zero_grad()
        return StepReport(grad_norm=grad_norm, lr=lr, is_skipped=False)

    def learning_rate(self) -> float:
        """Return the learning rate of the next step: linear warm-up, then constant or a cosine down
        to `final_lr_share`.
        """
        config, step = self._config, self._num_steps
        # Adam's first steps move every parameter by about lr, whatever the gradient: in a probe
        # with 5e-4 the first update moved ratios by 0.36 and destroyed the policy
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        if config.decay_steps is None:
            return config.lr
        assert config.decay_steps != "run", "a run has replaced it by a number"
        progress = min(
            (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps), 1.0
        )
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.lr * (config.final_lr_share + (1.0 - config.final_lr_share) * cosine)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole state as named tensors; views, not copies."""
        state = {NUM_STEPS: torch.tensor(self._num_steps)}
        for name, moved in self._moved.items():
            for moment, tensor in self._adamw.state.get(moved, {}).items():
                state[f"{moment}/{name}"] = tensor
        state |= {f"{MASTER}/{name}": master.detach() for name, master in self._masters.items()}
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a saved state; the network has to have its weights already.

        Raises: CheckpointError if names or shapes are not those of this network.
        """
        found = dict(tensors)
        # masters are exact, and the weights are their rounding: without them, each resume would
        # round away what the last steps had moved
        exact = {
            name: found.pop(f"{MASTER}/{name}")
            for name in self._parameters
            if f"{MASTER}/{name}" in found
        }
        try:
            num_steps = int(found.pop(NUM_STEPS))
            states = {}
            for index, (name, parameter) in enumerate(self._moved.items()):
                if f"{MOMENTS[0]}/{name}" in found:
                    states[index] = {
                        moment: found.pop(f"{moment}/{name}").clone() for moment in MOMENTS
                    }
                    _require_shape(name, states[index]["exp_avg"], parameter)
        except KeyError as error:
            raise CheckpointError(
                f"the optimizer's state has no {error}; it is incomplete."
            ) from error
        if found:
            raise CheckpointError(
                f"the optimizer's state has unknown names, such as {min(found)!r}."
            )
        for name, saved in exact.items():
            _require_shape(name, saved, self._parameters[name])
        with torch.no_grad():
            for name, moved in self._moved.items():
                moved.copy_(exact.get(name, self._parameters[name]))
        # the groups of this optimizer, not the saved ones: lr and betas follow the configuration
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": states, "param_groups": groups})
        self._num_steps = num_steps

    def _skip(self, grad_norm: float) -> None:
        self.zero_grad()
        # one such step is a rare overflow; several in a row are weights that no later gradient
        # repairs
        self._num_skips_in_a_row += 1
        _log.error("optimizer step %d skipped: its gradient norm is %s", self._num_steps, grad_norm)
        if self._num_skips_in_a_row >= self._config.max_skips_in_a_row:
            raise DivergedError(
                f"{self._num_skips_in_a_row} optimizer steps in a row had a gradient that is not "
                f"finite (norm {grad_norm}); "
                "expected finite ones. Resume from an older checkpoint with a smaller lr, or look "
                "for NaN in the rewards."
            )


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad
    }


def _by_mesh(tensors: Iterable[TensorT]) -> list[list[TensorT]]:
    """Group tensors by the ranks that share them; one process has a single group.

    With tensor parallelism some ranks share a layer and all share the rest, and no operation of
    torch takes tensors of both.
    """
    groups: dict[object, list[TensorT]] = {}
    for each in tensors:
        groups.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return list(groups.values())


def _add_to_master(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a complete gradient to its master's gradient, and free it."""
    # freed here, one by one: kept until the step, bfloat16 gradients would take memory beside the
    # float32 ones
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def _require_shape(name: str, saved: Tensor, parameter: Tensor) -> None:
    if saved.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer's state of {name} is {list(saved.shape)}, expected "
            f"{list(parameter.shape)}."
        )
