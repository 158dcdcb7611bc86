"""The critic: it estimates the return that is still to come from the policy's features of an
observation.

    observations ─► trunk ─► features [B, F] ─► value head ─► V [B]
                      │
                      ├── trunk="shared"  the policy's own, behind a stop-gradient: no memory, no gradient
                      └── trunk="own"     a copy of the policy's at the start, trained along with the head

The head predicts in units of `value_scale`, so that head and loss work with numbers of order one.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import value_loss
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.state import StagedTensors
from vla_rl.learner.config import CriticConfig
from vla_rl.learner.critic_backend import (
    NUM_UPDATES,
    CriticWeights,
    LocalCriticRank,
    LocalCriticWeights,
    ValueHead,
    ValueModule,
    ValuePasses,
    ValueRows,
    ValueSums,
    count_input_tokens,
)
from vla_rl.learner.finiteness import TrajectoryValues, require_returns, require_values
from vla_rl.learner.optimizer import PolicyOptimizer, StepReport
from vla_rl.learner.ranks import OneRank, Pass, Ranks, compute_passes
from vla_rl.types import Observation, Trajectory, derive_seed

__all__ = ["Critic", "PolicyCritic", "ValueHead", "is_cut_off"]


class PolicyCritic:
    """Estimates values in a policy's episodes, and is trained on the returns that followed.

    It decides what is learnt: mini-batches and targets; ranks compute.

    Args:
        ranks: who computes; a process alone is one rank without a group.
        weights: what is trained.
        config: units, loss and batches.
        seed: seed of the order of the mini-batches.
    """

    def __init__(
        self, ranks: Ranks, weights: CriticWeights, config: CriticConfig, seed: int
    ) -> None:
        self._ranks, self._weights, self._config, self._seed = ranks, weights, config, seed
        self._loss = value_loss(config.loss)
        self._num_updates = 0
        self._turn = asyncio.Lock()

    async def values(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryValues]:
        """Compute the values of all decisions of all trajectories, and of the last observation if a
        time limit ended the episode.

        Raises: ValueError, naming episode and decision, for a value that is not finite.
        """
        # only episodes that a time limit cut off need a value of their last observation: where the
        # task ended, no reward can follow
        observations: list[Observation] = []
        for trajectory in trajectories:
            observations += [step.observation for step in trajectory.steps]
            if is_cut_off(trajectory):
                observations.append(trajectory.final_observation)
        async with self._turn:
            values = await self._compute_values(observations)
        found = _split_by_trajectory(trajectories, values.numpy() * self._config.value_scale)
        require_values(trajectories, found)
        return found

    async def fit_values(
        self,
        trajectories: Sequence[Trajectory],
        values: Sequence[TrajectoryValues],
        returns: Sequence[np.ndarray],
        *,
        number: int | None = None,
    ) -> dict[str, float]:
        """Fit the values to the returns.

        Args:
            trajectories: recorded episodes.
            values: their values before this update, for clipping and explained variance.
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
        require_values(trajectories, values)
        observations = tuple(
            step.observation for trajectory in trajectories for step in trajectory.steps
        )
        scale = self._config.value_scale
        target = torch.from_numpy(np.concatenate(list(returns)).astype(np.float32)) / scale
        old = torch.from_numpy(np.concatenate([each.values for each in values])) / scale
        sequence = torch.from_numpy(
            np.repeat(np.arange(len(returns)), [len(each) for each in returns])
        )
        rows = ValueRows(observations, target, old)
        sums: list[ValueSums] = []
        reports: list[StepReport] = []
        async with self._turn:
            number = self._num_updates if number is None else number
            # a run that was stopped between critic and policy repeats the update with a fitted critic
            if number < self._num_updates:
                return {}
            for index in self._minibatches(sequence, number):
                sums += await self.forward_backward(rows.rows(index))
                reports.append(await self._weights.optim_step())
            self._num_updates = number + 1
            loss, num_clipped = await self._weights.summed(sums)
        # of the values that the advantages were computed with: those after the fit explain the
        # returns that they were fitted to, and always look good
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

    async def forward_backward(self, rows: ValueRows) -> list[ValueSums]:
        """Compute the gradient of the mean loss of a mini-batch: the first half of an optimizer step."""
        lengths = count_input_tokens(rows.observations)

        def call(
            rank: LocalCriticRank, local: tuple[Observation, ...], part: Pass
        ) -> Awaitable[ValueSums]:
            chosen = rows._replace(observations=local).rows(part.index)
            return rank.fit(chosen, len(rows.target), part.is_idle, part.is_last)

        return await compute_passes(
            self._ranks,
            self._ranks.deal_rows(lengths, self._config.micro_batch_size),
            lengths,
            rows.observations,
            call,
            begin=lambda rank: rank.gather_critic(True),
            least=1,
        )

    async def snapshot(self) -> Mapping[str, Tensor] | StagedTensors:
        """Copy all state that the next update depends on, by name."""
        async with self._turn:
            return await self._weights.snapshot(self._num_updates)

    async def restore(
        self,
        tensors: Mapping[str, Tensor] | StagedTensors,
        file: Path | None = None,
        prefix: str = "",
    ) -> None:
        """Continue from a snapshot.

        Args:
            tensors: what `snapshot` returned.
            file: file with the same tensors, from which ranks read their own parts; None if there
                is none.
            prefix: beginning of this critic's names in `tensors` and `file`, before those of
                `snapshot`.

        Raises: CheckpointError if it is not of this critic.
        """
        if isinstance(tensors, StagedTensors):
            raise CheckpointError("the critic is staged by ranks; save it, and load the checkpoint")
        own = {
            name.removeprefix(prefix): each
            for name, each in tensors.items()
            if name.startswith(prefix)
        }
        async with self._turn:
            try:
                await self._weights.restore(own, file, prefix)
                self._num_updates = int(own[NUM_UPDATES])
            # torch reports a shape that differs as a RuntimeError, and a missing name as a
            # KeyError: one sentence says what both mean here
            except (KeyError, RuntimeError, CheckpointError) as error:
                raise CheckpointError(
                    f"the checkpoint's critic is not this one: {error}; resume with the same "
                    "pipeline and critic settings."
                ) from error

    async def _compute_values(self, observations: Sequence[Observation]) -> Tensor:
        """Compute values, float32 [N] on the CPU, in units of `value_scale`."""
        lengths = count_input_tokens(observations)
        dealt = self._ranks.deal_rows(lengths, self._config.micro_batch_size)

        def call(
            rank: LocalCriticRank, local: tuple[Observation, ...], part: Pass
        ) -> Awaitable[Tensor]:
            return rank.critic_values(tuple(local[row] for row in part.index.tolist()))

        found = await compute_passes(
            self._ranks,
            dealt,
            lengths,
            observations,
            call,
            begin=lambda rank: rank.gather_critic(False),
            end=lambda rank: rank.scatter_critic(),
        )
        results = await self._ranks.read_tensors(found, "values")
        values = torch.zeros(len(observations))
        values[torch.cat([index for of_rank in dealt for index in of_rank])] = torch.cat(results)
        return values

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


class Critic(PolicyCritic):
    """A `PolicyCritic` that computes in this process.

    Args:
        model: the policy whose trunk is shared or copied.
        lane: runs the trunk and the head.
        config: trunk, loss and optimizer.
        seed: seed of the head's initial weights and of the order of the mini-batches.
    """

    def __init__(
        self, model: TokenModel[Any], lane: DeviceLane, config: CriticConfig, seed: int
    ) -> None:
        module = ValueModule(model, config, seed)
        optimizer = PolicyOptimizer(module.network, config.optimizer)
        rank = LocalCriticRank(module, ValuePasses(module, config), optimizer, lane)
        weights = LocalCriticWeights(module, optimizer, lane)
        super().__init__(OneRank(rank, lane), weights, config, seed)
        self.head = module.head
        """The value head."""


def is_cut_off(trajectory: Trajectory) -> bool:
    """Return whether the world went on after the last observation, so that its value belongs to the
    return.
    """
    return trajectory.stop_reason.is_cut_off


def _split_by_trajectory(
    trajectories: Sequence[Trajectory], values: np.ndarray
) -> list[TrajectoryValues]:
    found, start = [], 0
    for trajectory in trajectories:
        end = start + len(trajectory.steps)
        cut_off = is_cut_off(trajectory)
        found.append(TrajectoryValues(values[start:end], float(values[end]) if cut_off else 0.0))
        start = end + cut_off
    return found
