"""The learner: trajectories and their advantages in, one new weight version out.

    trajectories ─► decisions ─► mini-batches ─► micro-batches ─► loss, backward      one piece on the device lane each
                    (valid ones)  one optimizer      prepared one                     inference runs in between
                                  step each          ahead
                                        └──────────► last step + version + publish    one piece: atomic for every engine

The loss of a token is divided by counts over its whole mini-batch, so gradients add up to the same whatever the
micro-batches are. The behavior log-probs are those the engine reported; `update/log_prob_gap_*` shows how far the learner's
own forward pass is from them where the weights are the same.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from vla_rl.algorithms import Denominators, RatioDiagnostics, aggregation, clipped_surrogate, count_denominators
from vla_rl.engines.config import LearnerConfig
from vla_rl.engines.decisions import Advantage, Decisions, decisions_of
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.optimizer import StepReport
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.engines.training import Training, TrainingState, WeightSink
from vla_rl.engines.update_metrics import MicroBatchSums, update_metrics
from vla_rl.errors import ConfigError
from vla_rl.types import Trajectory, derive_seed

TokenLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, RatioDiagnostics]]
"""(log_prob, behavior_log_prob, advantage, mask) -> (losses [B, T], diagnostics); see `vla_rl.algorithms.surrogate`."""


class UpdateReport(msgspec.Struct, frozen=True):
    """What one update did."""

    weight_version: int
    """Of the weights after it."""

    metrics: dict[str, float]


class Learner:
    """Updates a policy model by policy gradient; its updates run one after another.

    Args:
        model: trained in place.
        lane: computes; shared with the engines.
        config: batches, clipping and optimizer.
        publish_to: engines that get the new weights with every update. One that shares `model` needs updates of one
            optimizer step, because there must be no weights between two versions.
        token_loss: the loss of every token; the clipped surrogate of `config` where it is None.
        weight_version: updates already applied to the weights of `model`.
    """

    def __init__(
        self,
        model: PolicyModel[Any],
        lane: DeviceLane,
        config: LearnerConfig,
        publish_to: Sequence[WeightSink] = (),
        *,
        token_loss: TokenLoss | None = None,
        weight_version: int = 0,
    ) -> None:
        shares = any(sink.network is model.network for sink in publish_to)
        if shares and not config.steps_once_per_update:
            raise ConfigError(
                f"LearnerConfig.minibatch_trajectories is {config.minibatch_trajectories} and epochs {config.epochs}, "
                "expected none and 1 where an engine shares the learner's model: an update of several optimizer steps "
                "would act with weights that no version names. Give the engine a copy of the model."
            )
        self._lane, self._config = lane, config
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._token_loss: TokenLoss = token_loss or partial(
            clipped_surrogate, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
        )
        self._aggregate = aggregation(config.aggregation)
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Updates applied."""
        return self._training.weight_version

    async def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Advantage]) -> UpdateReport:
        """Learn from trajectories, each with one advantage or one for each decision, and publish the new weights.

        Cancelled, it leaves the weights of a whole optimizer step and no gradient that a later update would see.

        Raises: ValueError where there is nothing to learn from or shapes do not fit; DivergedError for repeated gradients
            that are not finite.
        """
        decisions = await self._lane.prepare(decisions_of, trajectories, advantages)
        async with self._turn:
            started, version = time.perf_counter(), self.weight_version
            sums: list[MicroBatchSums] = []
            reports: list[StepReport] = []
            minibatches = self._minibatches(decisions)
            for number, minibatch in enumerate(minibatches, start=1):
                sums += await self._accumulate(minibatch, compare=version if number == 1 else None)
                is_last = number == len(minibatches)
                reports.append(await self._lane.run(self._training.step, is_last, work="update"))
            metrics = update_metrics(sums, reports, version - decisions.weight_version)
        seconds = time.perf_counter() - started
        return UpdateReport(
            self.weight_version, metrics | {"update/decisions": float(len(decisions)), "update/seconds": seconds}
        )

    async def snapshot(self) -> TrainingState:
        """A copy of everything the next update depends on, between two updates."""
        async with self._turn:
            return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Go on from a snapshot, and publish it to the engines."""
        async with self._turn:
            await self._lane.run(self._training.restore, state, work="checkpoint")

    def _minibatches(self, decisions: Decisions) -> list[Decisions]:
        """In the order in which they are stepped; a trajectory is never split between two."""
        num_trajectories = int(decisions.sequence[-1]) + 1
        size = self._config.minibatch_trajectories or num_trajectories
        minibatches = []
        for epoch in range(self._config.epochs):
            seed = derive_seed(self._config.seed, "minibatches", self.weight_version, epoch)
            order = torch.arange(num_trajectories)
            if size < num_trajectories:
                order = torch.randperm(num_trajectories, generator=torch.Generator().manual_seed(seed))
            for chosen in torch.split(order, size):
                rows = torch.isin(decisions.sequence, chosen).nonzero()[:, 0]
                minibatches.append(decisions.rows(rows))
        return minibatches

    async def _accumulate(self, minibatch: Decisions, compare: int | None) -> list[MicroBatchSums]:
        """Gradients of a whole mini-batch; `compare` is the version whose log-probs the learner should reproduce."""
        await self._lane.run(self._training.optimizer.zero_grad, work="update")
        denominators = count_denominators(minibatch.mask, minibatch.sequence)
        indices = torch.split(torch.arange(len(minibatch)), self._config.micro_batch)
        parts = [(minibatch.rows(index), denominators.rows(index)) for index in indices]
        sums: list[MicroBatchSums] = []
        async with aclosing(self._lane.prepared_ahead(self._prepare, parts)) as prepared:
            async for (rows, counts), batch in prepared:
                sums.append(await self._lane.run(self._backward, batch, rows, counts, compare, work="update"))
        return sums

    def _prepare(self, part: tuple[Decisions, Denominators]) -> Any:
        return self._training.model.prepare(part[0].observations)

    def _backward(self, batch: Any, rows: Decisions, counts: Denominators, compare: int | None) -> MicroBatchSums:
        device = self._training.device
        mask, behavior = rows.mask.to(device), rows.behavior_log_prob.to(device)
        log_prob, entropy = self._training.model.log_probs(batch, rows.tokens.to(device), rows.temperature.to(device))
        losses, diagnostics = self._token_loss(log_prob, behavior, rows.advantage.to(device), mask)
        if self._config.entropy_coef:
            losses = losses - self._config.entropy_coef * entropy
        counts = Denominators(counts.num_tokens, counts.num_sequences, counts.sequence_tokens.to(device))
        loss = self._aggregate(losses, mask, counts)
        torch.autograd.backward(loss)
        is_same = mask & torch.tensor([version == compare for version in rows.weight_version.tolist()])[:, None].to(
            device
        )
        gap = torch.where(is_same, (log_prob - behavior).detach().abs(), 0.0)
        return MicroBatchSums(
            loss=loss.detach(),
            entropy_sum=torch.where(mask, entropy.detach(), 0.0).sum(),
            ratios=diagnostics,
            gap_sum=gap.sum(),
            gap_max=gap.max(),
            num_compared=is_same.sum(),
        )
