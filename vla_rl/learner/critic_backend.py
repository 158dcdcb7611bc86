"""The backend of a critic: a trunk, the value head, the gradient of the loss on a micro-batch.

`ValuePasses` computes; a process of one or of many ranks uses the same code. `CriticWeights` steps and saves:
here on the device lane, or in learner ranks (`distributed.learner.ShardedCriticWeights`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vla_rl.algorithms.losses import value_loss
from vla_rl.engines.device_lane import DeviceLane, to_device, to_host
from vla_rl.engines.policy_model import TokenModel
from vla_rl.learner.checkpoint.state import StagedTensors
from vla_rl.learner.config import CriticConfig
from vla_rl.learner.optimizer import PolicyOptimizer, StepReport
from vla_rl.learner.ranks import LocalRank
from vla_rl.types import Observation, derive_seed

NETWORK, OPTIMIZER, NUM_UPDATES = "network/", "optimizer/", "num_updates"
"""Beginnings of the names of a saved critic's tensors, and the name of its count of updates."""


class ValueRows(NamedTuple):
    """Observations with the values to fit, in units of `value_scale`."""

    observations: tuple[Observation, ...]
    target: Tensor
    old: Tensor

    def rows(self, index: Tensor) -> "ValueRows":
        """Return some of the rows."""
        chosen = tuple(self.observations[row] for row in index.tolist())
        return ValueRows(chosen, self.target[index], self.old[index])


class ValueSums(NamedTuple):
    """Sums over one micro-batch, each a tensor of shape []."""

    loss: Tensor
    num_clipped: Tensor


class ValueHead(nn.Module):
    """Value head with one hidden layer. Its first values are exactly 0, so that an untrained critic
    changes no advantage."""

    def __init__(self, feature_size: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(feature_size, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, F] to values [B]."""
        values: Tensor = self.out(torch.tanh(self.hidden(features.float())))[:, 0]
        return values


class ValueModule(nn.Module):
    """A value head on the features of a trunk, as one module.

    Args:
        model: the policy whose trunk is shared, or copied.
        config: trunk and width of the head.
        seed: seed of the head's initial weights.
    """

    def __init__(self, model: TokenModel[Any], config: CriticConfig, seed: int) -> None:
        super().__init__()
        self.trains_trunk = config.trunk == "own"
        self.trunk = model.copy() if self.trains_trunk else model
        share_prefixes = getattr(self.trunk, "share_prefixes", None)
        if self.trains_trunk and share_prefixes is not None:
            share_prefixes(model)
        self.features: Callable[[Any], Tensor] = self.trunk.features
        """Features of a prepared batch; ranks that share the policy's trunk set their own."""
        # the head draws from a seed of its own: drawing from the process's generator would change
        # what a policy without a critic samples
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "value head"))
            head = ValueHead(model.feature_size, config.hidden)
        trained: dict[str, nn.Module] = {"head": head.to(next(model.network.parameters()).device)}
        if self.trains_trunk:
            trained["trunk"] = self.trunk.network
        self.network = nn.ModuleDict(trained)

    @property
    def head(self) -> ValueHead:
        """The value head."""
        head = self.network["head"]
        assert isinstance(head, ValueHead)
        return head

    def forward(self, batch: Any) -> Tensor:
        """Compute values, float32 [B], in units of `value_scale`, with a gradient for the trained
        parameters.
        """
        # without a graph, the activations of a shared trunk are freed at once
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_trunk):
            features = self.features(batch)
        expected = self.head.hidden.in_features
        if features.ndim != 2 or features.shape[1] != expected:
            raise ValueError(
                f"{type(self.trunk).__name__}.features gave {list(features.shape)}, expected [B, "
                f"{expected}], as its feature_size says"
            )
        # a copy: an operation in place on a view would drop FSDP's hook, and with it the gathering
        values: Tensor = self.head(features).clone()
        return values


class ValuePasses:
    """Passes of a value module on one micro-batch, on the device lane."""

    def __init__(self, module: ValueModule, config: CriticConfig) -> None:
        self._module, self._loss = module, value_loss(config.loss)

    def compute_values(self, batch: Any) -> Tensor:
        """Compute values without a gradient."""
        with torch.no_grad():
            values: Tensor = self._module(batch)
        return values

    def backward(
        self, batch: Any, rows: ValueRows, num_rows: int, *, is_masked: bool = False
    ) -> ValueSums:
        """Add the gradient of one micro-batch's share of the mean over `num_rows`.

        Masked rows add exact zeros.
        """
        values = self._module(batch)
        target, old = (to_device(column, values.device) for column in (rows.target, rows.old))
        mask = torch.full_like(old, not is_masked, dtype=torch.bool)
        losses, diagnostics = self._loss(values, old, target, mask)
        loss = losses.sum() / num_rows
        torch.autograd.backward(loss)
        return ValueSums(loss.detach(), diagnostics.num_clipped)


class LocalCriticRank(LocalRank):
    """A rank with the whole critic."""

    def __init__(
        self, module: ValueModule, passes: ValuePasses, optimizer: PolicyOptimizer, lane: DeviceLane
    ) -> None:
        super().__init__(lane)
        self._prepare, self._passes, self._optimizer = module.trunk.prepare, passes, optimizer

    async def gather_critic(self, clear: bool) -> None:
        """Drop gradients with `clear`; the weights are whole."""
        if clear:
            await self._lane.run(self._optimizer.zero_grad, work="critic")

    async def critic_values(self, observations: tuple[Observation, ...]) -> Tensor:
        """Compute values of some observations, on the device."""
        compute = self._passes.compute_values
        return await self.compute_pass(self._prepare, observations, compute, "values")

    async def fit(
        self, rows: ValueRows, num_rows: int, is_masked: bool, is_last: bool
    ) -> ValueSums:
        """Add the gradient of a micro-batch."""
        backward = partial(self._passes.backward, rows=rows, num_rows=num_rows, is_masked=is_masked)
        return await self.compute_pass(self._prepare, rows.observations, backward, "critic")

    async def scatter_critic(self) -> None:
        """Do nothing: the weights stay whole."""


class CriticWeights(Protocol):
    """The network that a critic trains, with its optimizer."""

    async def optim_step(self) -> StepReport:
        """Take one optimizer step."""
        ...

    async def summed(self, sums: Sequence[ValueSums]) -> tuple[float, float]:
        """Return the sum of the losses and the number of clipped values."""
        ...

    async def snapshot(self, num_updates: int) -> Mapping[str, Tensor] | StagedTensors:
        """Return all state that the next update depends on, as it is now."""
        ...

    async def restore(self, tensors: Mapping[str, Tensor], file: Path | None, prefix: str) -> None:
        """Continue from a snapshot.

        `file` holds the same tensors, with `prefix` before their names, if they were read from one.
        """
        ...


class LocalCriticWeights:
    """`CriticWeights` of a process alone, on its device lane."""

    def __init__(self, module: ValueModule, optimizer: PolicyOptimizer, lane: DeviceLane) -> None:
        self._module, self._optimizer, self._lane = module, optimizer, lane

    async def optim_step(self) -> StepReport:
        """Take one optimizer step."""
        return await self._lane.run(self._optimizer.step, work="critic")

    async def summed(self, sums: Sequence[ValueSums]) -> tuple[float, float]:
        """Read the sums from the device in one copy."""
        return await self._lane.run(summed_values, sums, work="critic")

    async def snapshot(self, num_updates: int) -> Mapping[str, Tensor]:
        """Copy all state to the CPU, by name."""
        return await self._lane.run(self._copied, num_updates, work="checkpoint")

    async def restore(self, tensors: Mapping[str, Tensor], file: Path | None, prefix: str) -> None:
        """Continue from a snapshot."""
        await self._lane.run(self._load, tensors, work="checkpoint")

    def _copied(self, num_updates: int) -> dict[str, Tensor]:
        state = self._module.network.state_dict()
        tensors = {f"{NETWORK}{name}": tensor for name, tensor in state.items()}
        tensors |= {
            f"{OPTIMIZER}{name}": tensor for name, tensor in self._optimizer.state_tensors().items()
        }
        # saved with the weights: a run that was stopped between critic and policy must not fit the
        # critic twice
        tensors[NUM_UPDATES] = torch.tensor(num_updates)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self._module.network.load_state_dict(_without_prefix(NETWORK, tensors))
        self._optimizer.load_tensors(_without_prefix(OPTIMIZER, tensors))


def count_input_tokens(observations: Sequence[Observation]) -> Tensor:
    """Return the number of prompt tokens of each observation, int64 [N]; 1 for an observation
    without a prompt.
    """
    return torch.tensor(
        [len(observation.get("prompt_tokens", (0,))) for observation in observations]
    )


def summed_values(sums: Sequence[ValueSums]) -> tuple[float, float]:
    """Return the sum of the losses and the number of clipped values, read in one copy."""
    clipped = reduce(add, (each.num_clipped for each in sums))
    loss, num_clipped = to_host(torch.stack([each.loss for each in sums]).sum(), clipped)
    return float(loss), float(num_clipped)


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
