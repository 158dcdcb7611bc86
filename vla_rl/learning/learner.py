"""The learner: it turns trajectories and their advantages into a new version of the weights.

    trajectories ─► decisions ─► log-probs under ─► mini-batches ─► micro-batches ─► loss, backward
                    (valid ones)  the weights before  one optimizer    one piece on the device lane each;
                                  (if needed)         step each        inference runs in between
                                                          └──► last step + version + publish: one piece, atomic

Token losses are divided by counts over the whole mini-batch, and everything that a loss needs from
other rows is computed beforehand (`proximal`), so the gradient does not depend on the
micro-batches; for your own loss this holds if it looks at one row at a time. The behavior log-probs
are those that the engine reported. `update/log_prob_gap_*` is their distance from the learner's own
forward pass with the same weights; the first update checks it.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms import Denominators, aggregation, count_denominators
from vla_rl.algorithms.losses import PolicyLoss, TokenBatch, policy_loss
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.learning.config import LearnerConfig
from vla_rl.learning.decisions import Decisions, decisions_of
from vla_rl.learning.micro_batches import micro_batches
from vla_rl.learning.optimizer import StepReport
from vla_rl.learning.proximal import Proximal
from vla_rl.learning.rows import Advantage
from vla_rl.learning.sound_numbers import first_unsound, require_sound_model
from vla_rl.learning.training import Training, TrainingState, WeightSink
from vla_rl.learning.update_metrics import (
    MicroBatchSums,
    mean_gap,
    staleness_metrics,
    update_metrics,
)
from vla_rl.types import Trajectory, derive_seed


class PolicyMismatchError(VlaRlError):
    """The learner finds the engine's choices unlikely although both have the same weights."""


class UpdateReport(msgspec.Struct, frozen=True):
    """Result of one update."""

    weight_version: int
    """Version of the weights after the update."""

    metrics: dict[str, float]


class Learner:
    """Updates a policy model by policy gradient; updates run one after another.

    Args:
        model: trained in place.
        lane: runs the model; shared with the engines.
        config: loss, batches and optimizer.
        publish_to: engines that get the new weights with every update. An engine that shares
            `model` needs updates of one optimizer step, so that no weights exist between two
            versions.
        weight_version: number of updates already applied to the weights of `model`.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        config: LearnerConfig,
        publish_to: Sequence[WeightSink] = (),
        *,
        weight_version: int = 0,
    ) -> None:
        shares = any(sink.network is model.network for sink in publish_to)
        if shares and not config.steps_once_per_update:
            raise ConfigError(
                f"LearnerConfig.minibatch_trajectories is {config.minibatch_trajectories} and "
                f"epochs {config.epochs}, "
                "expected none and 1 if an engine shares the learner's model: in an update of "
                "several optimizer "
                "steps, the engine would act with weights without a version. Give the engine a "
                "copy of the model."
            )
        self._lane, self._config = lane, config
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._loss: PolicyLoss = policy_loss(config.loss)
        self._proximal = Proximal(model, lane, config)
        self._aggregate = aggregation(config.aggregation)
        self._agreed = False
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update the policy from trajectories, and publish the new weights.

        If cancelled, it leaves the weights of a complete optimizer step, and no gradient for later
        updates. Optimizer steps that teach nothing (every advantage is 0, and no entropy, KL or
        other term has a gradient) are skipped, because Adam's momentum would still move the
        weights. The version rises anyway.

        Args:
            trajectories: episodes to learn from.
            advantages: for each trajectory one number, one per decision, or one per token.
            reference_log_probs: for each trajectory float32 [T] of each decision, if the loss has a
                KL term.

        Raises: ValueError if there is nothing to learn from, if shapes do not fit, or for a
            log-prob of an engine, the reference or the model that is not finite or above 0, naming
            its episode; PolicyMismatchError if the first update's ratio is not 1; DivergedError for
            repeated gradients that are not finite.
        """
        decisions = await self._lane.prepare(
            decisions_of, trajectories, advantages, reference_log_probs
        )
        async with self._turn:
            started, version = time.perf_counter(), self.weight_version
            decisions = await self._proximal.before_update(decisions)
            sums: list[MicroBatchSums] = []
            reports: list[StepReport] = []
            minibatches = [
                minibatch for minibatch in self._minibatches(decisions) if self._teaches(minibatch)
            ]
            for number, minibatch in enumerate(minibatches, start=1):
                minibatch = await self._proximal.before_step(minibatch, is_first=number == 1)
                compare = version if number == 1 else None
                sums += await self._accumulate(minibatch, compare)
                if number == 1:
                    self._require_agreement(sums)
                is_last = number == len(minibatches)
                reports.append(await self._lane.run(self._training.step, is_last, work="update"))
            if not minibatches:
                await self._lane.run(self._training.stand_still, work="update")
        staleness = (version - decisions.weight_version).expand_as(decisions.mask)[decisions.mask]
        metrics = staleness_metrics(staleness) | update_metrics(sums, reports, version)
        seconds = time.perf_counter() - started
        metrics |= self._proximal.metrics
        metrics |= {
            "update/decisions": float(decisions.num_decisions),
            "update/rows": float(len(decisions)),
            "update/seconds": seconds,
        }
        return UpdateReport(self.weight_version, metrics)

    async def stand_still(self) -> UpdateReport:
        """Publish the same weights as a new version, in an update in which other agents learn. The
        optimizer does not step."""
        async with self._turn:
            await self._lane.run(self._training.stand_still, work="update")
        return UpdateReport(self.weight_version, {"update/taught": 0.0})

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on, between two updates."""
        async with self._turn:
            return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it to the engines.

        Raises: CheckpointError if it is not of this policy.
        """
        async with self._turn:
            await self._lane.run(self._training.restore, state, work="checkpoint")

    def _minibatches(self, decisions: Decisions) -> list[Decisions]:
        """Return the mini-batches in the order of their optimizer steps.

        A trajectory is never split between two.
        """
        num_trajectories = decisions.num_trajectories
        size = self._config.minibatch_trajectories or num_trajectories
        minibatches = []
        for epoch in range(self._config.epochs):
            seed = derive_seed(self._config.seed, "minibatches", self.weight_version, epoch)
            order = torch.arange(num_trajectories)
            if size < num_trajectories:
                order = torch.randperm(
                    num_trajectories, generator=torch.Generator().manual_seed(seed)
                )
            for chosen in torch.split(order, size):
                rows = torch.isin(decisions.sequence, chosen).nonzero()[:, 0]
                minibatches.append(decisions.rows(rows))
        return [minibatch for minibatch in minibatches if len(minibatch)]

    def _teaches(self, minibatch: Decisions) -> bool:
        has_other_terms = (
            self._config.entropy_coef > 0.0 or self._config.loss.has_terms_without_advantage
        )
        return has_other_terms or bool(torch.where(minibatch.mask, minibatch.advantage, 0.0).any())

    async def _accumulate(self, minibatch: Decisions, compare: int | None) -> list[MicroBatchSums]:
        """Accumulate the gradient of a mini-batch; `compare` is the version whose log-probs the
        learner should reproduce."""
        await self._lane.run(self._training.optimizer.zero_grad, work="update")
        denominators = count_denominators(
            minibatch.mask, minibatch.sequence, length=self._config.trajectory_length
        )
        indices = micro_batches(minibatch.num_read, self._config.micro_batch_size)
        parts = [(minibatch.rows(index), denominators.rows(index)) for index in indices]
        sums: list[MicroBatchSums] = []
        async with aclosing(self._lane.prepared_ahead(self._prepare, parts)) as prepared:
            async for (rows, counts), batch in prepared:
                sums.append(
                    await self._lane.run(
                        self._backward, batch, rows, counts, compare, work="update"
                    )
                )
        model = type(self._training.model).__name__
        require_sound_model(
            [rows for rows, _ in parts], [part.first_unsound for part in sums], model
        )
        return sums

    def _prepare(self, part: tuple[Decisions, Denominators]) -> Any:
        return self._training.model.prepare(part[0].observations)

    def _backward(
        self, batch: Any, rows: Decisions, counts: Denominators, compare: int | None
    ) -> MicroBatchSums:
        rows = rows.on(self._training.device)
        log_prob, entropy = self._training.model.log_probs(batch, rows.tokens, rows.temperature)
        if log_prob.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{type(self._training.model).__name__}.log_probs gave {log_prob.dtype}, expected "
                "torch.float32: "
                "rounded to 8 bits a ratio of 1.0004 is 1. Call .float() on the logits before "
                "log_softmax."
            )
        losses, diagnostics = self._loss(token_batch(rows, log_prob))
        if self._config.entropy_coef:
            losses = losses - self._config.entropy_coef * entropy
        counts = dataclasses.replace(
            counts, sequence_tokens=counts.sequence_tokens.to(self._training.device)
        )
        loss = self._aggregate(losses, rows.mask, counts)
        torch.autograd.backward(loss)
        is_same = (
            torch.zeros_like(rows.mask)
            if compare is None
            else rows.mask & (rows.weight_version == compare)
        )
        distance = torch.where(rows.mask, (log_prob - rows.behavior_log_prob).detach().abs(), 0.0)
        gap = torch.where(is_same, distance, 0.0)
        versions = rows.weight_version.double().expand_as(distance)
        return MicroBatchSums(
            loss=loss.detach(),
            entropy_sum=torch.where(rows.mask, entropy.detach(), 0.0).sum(),
            diagnostics=diagnostics,
            gap_sum=gap.sum(),
            gap_max=gap.max(),
            num_compared=is_same.sum(),
            tokens=torch.stack([versions, distance.double()])[:, rows.mask],
            first_unsound=first_unsound(log_prob, entropy, rows.mask),
        )

    def _require_agreement(self, sums: Sequence[MicroBatchSums]) -> None:
        """Raise PolicyMismatchError if the ratio is not 1; checked in the first update with tokens
        of the learner's own version."""
        gap = mean_gap(sums)
        if self._agreed or gap is None:
            return
        if not gap <= self._config.max_mismatch:
            raise PolicyMismatchError(
                f"the learner's log-probs differ by {gap:.4g} on average from those that the "
                "engine reported for the same "
                f"tokens and weights (version {self.weight_version}), expected at most "
                "max_mismatch = "
                f"{self._config.max_mismatch}, so that the ratio starts at 1. Acting and learning "
                "compute "
                "different numbers: check the temperature, dropout, the attention mask, and how "
                "observations are prepared."
            )
        self._agreed = True


def token_batch(rows: Decisions, log_prob: Tensor) -> TokenBatch:
    """Return the input of a policy loss for some rows."""
    return TokenBatch(
        log_prob=log_prob,
        behavior_log_prob=rows.behavior_log_prob,
        advantage=rows.advantage,
        mask=rows.mask,
        proximal_log_prob=rows.proximal_log_prob,
        reference_log_prob=rows.reference_log_prob,
        sequence_log_ratio=rows.sequence_log_ratio,
        sequence_drift=rows.sequence_drift,
        action_tokens=rows.action_tokens,
        correction_weight=rows.correction_weight,
        chosen_tokens=rows.chosen_tokens,
    )
