"""The backend of a critic: a trunk, the value head, the gradient of the loss on a micro-batch.

`ValuePasses` computes; a process of one or of many ranks uses the same code.
`LocalCriticBackend` runs it on this process's device lane, `distributed.ShardedCriticBackend` in ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
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
from vla_rl.learner.plan import micro_batches
from vla_rl.learner.scoring import compute_in_parts
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


class CriticBackend(Protocol):
    """Everything that a critic needs done with the network that it trains."""

    async def values(self, observations: Sequence[Observation]) -> Tensor:
        """Compute values, float32 [N] on the CPU, in units of `value_scale`."""
        ...

    async def forward_backward(self, rows: ValueRows) -> list[ValueSums]:
        """Compute the gradient of the mean loss of a mini-batch."""
        ...

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


class LocalCriticBackend:
    """The passes of a critic in this process, one after another on the device lane.

    Args: those of `Critic`.
    """

    def __init__(
        self, model: TokenModel[Any], lane: DeviceLane, config: CriticConfig, seed: int
    ) -> None:
        self._lane, self._size = lane, config.micro_batch_size
        self.module = ValueModule(model, config, seed)
        """Trunk and head."""
        self._passes = ValuePasses(self.module, config)
        self._optimizer = PolicyOptimizer(self.module.network, config.optimizer)

    async def values(self, observations: Sequence[Observation]) -> Tensor:
        """Compute values, float32 [N] on the CPU."""
        indices = micro_batches(count_input_tokens(observations), self._size)
        parts = [[observations[row] for row in index.tolist()] for index in indices]
        found = await compute_in_parts(
            self._lane, self.module.trunk.prepare, self._compute_values, parts, "values"
        )
        parts_on_host = await self._lane.run(to_host, *found, work="values")
        values = torch.zeros(len(observations))
        values[torch.cat(indices)] = torch.cat(parts_on_host)
        return values

    async def forward_backward(self, rows: ValueRows) -> list[ValueSums]:
        """Compute the gradient of the mean loss of a mini-batch, in micro-batches."""
        await self._lane.run(self._optimizer.zero_grad, work="critic")
        parts = [
            rows.rows(index) for index in micro_batches(count_input_tokens(rows[0]), self._size)
        ]

        def backward(batch: Any, part: ValueRows) -> ValueSums:
            return self._passes.backward(batch, part, len(rows.target))

        return await compute_in_parts(self._lane, self._prepare, backward, parts, "critic")

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

    def _prepare(self, rows: ValueRows) -> Any:
        return self.module.trunk.prepare(rows.observations)

    def _compute_values(self, batch: Any, _: Sequence[Observation]) -> Tensor:
        return self._passes.compute_values(batch)

    def _copied(self, num_updates: int) -> dict[str, Tensor]:
        state = self.module.network.state_dict()
        tensors = {f"{NETWORK}{name}": tensor for name, tensor in state.items()}
        tensors |= {
            f"{OPTIMIZER}{name}": tensor for name, tensor in self._optimizer.state_tensors().items()
        }
        # saved with the weights: a run that was stopped between critic and policy must not fit the
        # critic twice
        tensors[NUM_UPDATES] = torch.tensor(num_updates)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self.module.network.load_state_dict(_without_prefix(NETWORK, tensors))
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
