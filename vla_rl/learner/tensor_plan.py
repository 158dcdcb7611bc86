"""The layers of a policy that tensor parallelism cuts: named by its family, checked without processes.

x ─► q, k, v     cut by outputs: each rank has its own heads      ─► o      cut by inputs ─► sum
x ─► gate, up    cut by outputs: each rank has its own numbers    ─► down   cut by inputs ─► sum
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig


@dataclass(frozen=True)
class TensorPlan:
    """Layers that the ranks of a tensor group share, by their names in the network."""

    by_outputs: tuple[str, ...]
    """Linear layers of which each rank computes a part of the outputs."""

    by_inputs: tuple[str, ...]
    """Linear layers of which each rank reads a part of the inputs; their outputs are added up."""

    of_heads: tuple[str, ...]
    """Norms of single heads: whole on every rank, and each rank's heads are a part of their
    gradient."""

    counts: Mapping[str, int]
    """Numbers that are dealt to the ranks, by what they are of."""

    def num_cut(self, network: nn.Module, *, is_trained: bool) -> int:
        """Return the numbers of the layers that are cut."""
        layers = (network.get_submodule(name) for name in (*self.by_outputs, *self.by_inputs))
        return sum(
            each.numel()
            for layer in layers
            for each in layer.parameters()
            if each.requires_grad == is_trained
        )


def tensor_plan_of(model: Any) -> TensorPlan:
    """Return the plan of a policy. Raises: ConfigError if its family has none."""
    planned: Callable[[], TensorPlan] | None = getattr(model, "tensor_plan", None)
    if planned is None:
        raise without_plan(type(model).__name__)
    return planned()


def without_plan(family: str) -> ConfigError:
    """Return the error about a family whose layers cannot be cut."""
    return ConfigError(
        f"{family} has no plan for tensor parallelism; expected OpenVLA, OpenVLA-OFT, or a language "
        "model of the kinds llama, qwen2 and qwen3: set --learner.tensor-parallel to 1, and take "
        "--learner.shard weights if a policy does not fit"
    )


def require_tensor_plan(model: Any, config: LearnerConfig) -> None:
    """Raise ConfigError if the ranks of a tensor group cannot share the policy's layers."""
    if config.tensor_parallel == 1:
        return
    for what, count in tensor_plan_of(model).counts.items():
        if count % config.tensor_parallel:
            raise ConfigError(
                f"LearnerConfig.tensor_parallel is {config.tensor_parallel}, but the trunk of "
                f"{type(model).__name__} has {count} {what}; expected a divisor of {count}"
            )
