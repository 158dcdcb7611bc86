"""The critic: it estimates the return that is still to come from the policy's features of an
observation.

    observations ─► trunk ─► features [B, F] ─► value head ─► V [B]
                      │
                      ├── trunk="shared"  the policy's own, behind a stop-gradient: no memory, no gradient
                      └── trunk="own"     a copy of the policy's at the start, trained along with the head

The head predicts in units of `value_scale`, so that head and loss work with numbers of order one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms.losses import ValueDiagnostics, value_loss
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.engines.transfers import to_device, to_host
from vla_rl.errors import CheckpointError
from vla_rl.learning.config import CriticConfig
from vla_rl.learning.micro_batches import micro_batches
from vla_rl.learning.optimizer import PolicyOptimizer, StepReport
from vla_rl.learning.scoring import compute_in_parts
from vla_rl.learning.values import Judged, require_returns, require_values
from vla_rl.types import Observation, Trajectory, derive_seed

Rows: TypeAlias = tuple[tuple[Observation, ...], Tensor, Tensor]
"""Observations, returns [B] and old values [B], the last two in units of `value_scale`."""


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


class Critic:
    """Estimates values in a policy's episodes, and is trained on the returns that followed.

    Args:
        model: the policy whose trunk is shared or copied.
        lane: runs the trunk and the head.
        config: trunk, loss and optimizer.
        seed: seed of the head's initial weights and of the order of the mini-batches.
    """

    def __init__(
        self, model: TokenModel[Any], lane: DeviceLane, config: CriticConfig, seed: int
    ) -> None:
        self._lane, self._config, self._seed = lane, config, seed
        self._trunk = model if config.trunk == "shared" else model.copy()
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "value head"))
            self._head = ValueHead(model.feature_size, config.hidden)
        self._device = next(model.network.parameters()).device
        self._head.to(self._device)
        trained: dict[str, nn.Module] = {"head": self._head}
        if config.trunk == "own":
            trained["trunk"] = self._trunk.network
        self._network = nn.ModuleDict(trained)
        self._optimizer = PolicyOptimizer(self._network, config.optimizer)
        self._loss = value_loss(config.loss)
        self._num_updates = 0
        self._turn = asyncio.Lock()

    async def values(self, trajectories: Sequence[Trajectory]) -> list[Judged]:
        """Compute the values of all decisions of all trajectories, and of the last observation if a
        time limit ended the episode.

        Raises: ValueError, naming episode and decision, for a value that is not finite.
        """
        seen: list[Observation] = []
        for trajectory in trajectories:
            seen += [step.observation for step in trajectory.steps]
            if is_cut_off(trajectory):
                seen.append(trajectory.final_observation)
        indices = micro_batches(_num_read(seen), self._config.micro_batch_size)
        parts = [[seen[row] for row in index.tolist()] for index in indices]
        async with self._turn:
            found = await compute_in_parts(
                self._lane, self._trunk.prepare, self._judge, parts, "values"
            )
            parts_on_host = await self._lane.run(to_host, *found, work="values")
        values = torch.zeros(len(seen))
        values[torch.cat(indices)] = torch.cat(parts_on_host)
        judged = _split_by_trajectory(trajectories, values.numpy() * self._config.value_scale)
        require_values(trajectories, judged)
        return judged

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[Judged],
        returns: Sequence[np.ndarray],
        *,
        number: int | None = None,
    ) -> dict[str, float]:
        """Fit the values to the returns.

        Args:
            trajectories: recorded episodes.
            judged: their values before this update, for clipping and explained variance.
            returns: float [decisions] for each trajectory, the targets of the values.
            number: number of the run's update. An update that the critic has already made is
                skipped: a run may have been stopped between the critic's and the policy's update.
                    None: the next number.

        Returns: metrics by path. `critic/value_mean`, `critic/return_mean` (both in units of
        reward) and `critic/explained_variance`, 1 - Var(returns - values) / Var(returns), describe
        the values that the advantages were computed with; `critic/loss` and
        `critic/value_clip_fraction` describe the optimizer steps.
        Raises: ValueError for returns or values that do not fit or are not finite.
        """
        require_returns(trajectories, returns)
        require_values(trajectories, judged)
        observations = [
            step.observation for trajectory in trajectories for step in trajectory.steps
        ]
        scale = self._config.value_scale
        target = torch.from_numpy(np.concatenate(list(returns)).astype(np.float32)) / scale
        old = torch.from_numpy(np.concatenate([each.values for each in judged])) / scale
        sequence = torch.from_numpy(
            np.repeat(np.arange(len(returns)), [len(each) for each in returns])
        )
        losses: list[tuple[Tensor, ValueDiagnostics]] = []
        reports: list[StepReport] = []
        async with self._turn:
            number = self._num_updates if number is None else number
            # a run that was stopped between critic and policy repeats the update with a fitted critic
            if number < self._num_updates:
                return {}
            for index in self._minibatches(sequence, number):
                losses += await self._accumulate(index, observations, target, old)
                reports.append(await self._lane.run(self._optimizer.step, work="critic"))
            self._num_updates = number + 1
            loss, num_clipped = await self._lane.run(_summarised, losses, work="critic")
        _, before = self._loss(
            old * scale, old * scale, target * scale, torch.ones_like(old, dtype=torch.bool)
        )
        return {
            "critic/loss": loss / len(reports),
            **{f"critic/{name}": value for name, value in before.metrics().items()},
            "critic/value_clip_fraction": num_clipped / (len(target) * self._config.epochs),
            "critic/grad_norm": sum(report.grad_norm for report in reports) / len(reports),
            "critic/skipped_steps": float(sum(report.is_skipped for report in reports)),
        }

    async def snapshot(self) -> dict[str, Tensor]:
        """Copy all state that the next update depends on to the CPU, by name."""
        async with self._turn:
            return await self._lane.run(self._copied, work="checkpoint")

    async def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a snapshot. Raises: CheckpointError if it is not of this critic."""
        async with self._turn:
            await self._lane.run(self._load, tensors, work="checkpoint")

    async def _accumulate(
        self, index: Tensor, observations: Sequence[Observation], target: Tensor, old: Tensor
    ) -> list[tuple[Tensor, ValueDiagnostics]]:
        """Compute the gradient of the rows `index`, in micro-batches."""
        await self._lane.run(self._optimizer.zero_grad, work="critic")
        num_read = _num_read([observations[row] for row in index.tolist()])
        pieces = [index[piece] for piece in micro_batches(num_read, self._config.micro_batch_size)]
        parts = [
            (tuple(observations[row] for row in piece.tolist()), target[piece], old[piece])
            for piece in pieces
        ]
        backward = partial(self._backward, num_rows=len(index))
        return await compute_in_parts(self._lane, self._prepare, backward, parts, "critic")

    def _minibatches(self, sequence: Tensor, number: int) -> list[Tensor]:
        """Return the rows of each optimizer step; a trajectory is never split between two steps."""
        num_trajectories = int(sequence[-1]) + 1
        size = self._config.minibatch_trajectories or num_trajectories
        minibatches = []
        for epoch in range(self._config.epochs):
            generator = torch.Generator().manual_seed(
                derive_seed(self._seed, "critic", number, epoch)
            )
            for chosen in torch.split(torch.randperm(num_trajectories, generator=generator), size):
                minibatches.append(torch.isin(sequence, chosen).nonzero()[:, 0])
        return minibatches

    def _prepare(self, rows: Rows) -> Any:
        return self._trunk.prepare(rows[0])

    def _judge(self, batch: Any, _: Sequence[Observation]) -> Tensor:
        with torch.no_grad():
            return self._predict(batch)

    def _predict(self, batch: Any) -> Tensor:
        """Compute values, float32 [B], in units of `value_scale`, with a gradient for the trained
        parameters.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._config.trunk == "own"):
            features = self._trunk.features(batch)
        expected = self._head.hidden.in_features
        if features.ndim != 2 or features.shape[1] != expected:
            raise ValueError(
                f"{type(self._trunk).__name__}.features gave {list(features.shape)}, expected [B, "
                f"{expected}], as its feature_size says"
            )
        values: Tensor = self._head(features)
        return values

    def _backward(
        self, batch: Any, rows: Rows, *, num_rows: int
    ) -> tuple[Tensor, ValueDiagnostics]:
        """Add the gradient of one micro-batch's share of the mean over `num_rows`."""
        target, old = (to_device(column, self._device) for column in rows[1:])
        losses, diagnostics = self._loss(
            self._predict(batch), old, target, torch.ones_like(old, dtype=torch.bool)
        )
        loss = losses.sum() / num_rows
        torch.autograd.backward(loss)
        return loss.detach(), diagnostics

    def _copied(self) -> dict[str, Tensor]:
        tensors = {f"network/{name}": tensor for name, tensor in self._network.state_dict().items()}
        tensors |= {
            f"optimizer/{name}": tensor for name, tensor in self._optimizer.tensors().items()
        }
        tensors["num_updates"] = torch.tensor(self._num_updates)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        try:
            self._network.load_state_dict(_without_prefix("network/", tensors))
            self._optimizer.load_tensors(_without_prefix("optimizer/", tensors))
            self._num_updates = int(tensors["num_updates"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint's critic is not this one: {error}; resume with the same pipeline "
                "and critic settings."
            ) from error


def _summarised(losses: Sequence[tuple[Tensor, ValueDiagnostics]]) -> tuple[float, float]:
    """Return the sum of the losses and the number of clipped values, read in one copy."""
    clipped = reduce(add, (diagnostics.num_clipped for _, diagnostics in losses))
    loss, num_clipped = to_host(torch.stack([loss for loss, _ in losses]).sum(), clipped)
    return float(loss), float(num_clipped)


def is_cut_off(trajectory: Trajectory) -> bool:
    """Return whether the world went on after the last observation, so that its value belongs to the
    return.
    """
    return trajectory.stop_reason.is_cut_off


def _split_by_trajectory(trajectories: Sequence[Trajectory], values: np.ndarray) -> list[Judged]:
    judged, start = [], 0
    for trajectory in trajectories:
        end = start + len(trajectory.steps)
        cut_off = is_cut_off(trajectory)
        judged.append(Judged(values[start:end], float(values[end]) if cut_off else 0.0))
        start = end + cut_off
    return judged


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _num_read(observations: Sequence[Observation]) -> Tensor:
    """Return the number of prompt tokens of each observation, int64 [N]; 1 for an observation
    without a prompt.
    """
    return torch.tensor(
        [len(observation.get("prompt_tokens", (0,))) for observation in observations]
    )
