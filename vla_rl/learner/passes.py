"""Forward and backward passes of a policy on recorded rows, and the place that computes them.

`PolicyPasses` computes one micro-batch; a process of one or of many ranks uses the same code.
`LocalPasses` runs them on this process's device lane, `sharded.RankPasses` in learner ranks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.algorithms import Denominators, aggregation
from vla_rl.algorithms.losses import policy_loss
from vla_rl.engines.device_lane import DeviceLane, to_device
from vla_rl.engines.policy_model import TokenModel
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import StepPlan
from vla_rl.learner.scoring import Scorer, place_choices
from vla_rl.learner.sound_numbers import first_unsound
from vla_rl.learner.training import Training, TrainingState, WeightSink
from vla_rl.learner.update_metrics import MicroBatchSums, on_host

LogProbs = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`TokenModel.log_probs`, or a module that calls it."""


class Passes(Protocol):
    """Everything that a learner needs done with the weights that it trains."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        ...

    async def log_probs(self, decisions: Decisions) -> Tensor:
        """Score every token under the current weights: float32 [N, T] on the CPU."""
        ...

    async def accumulate(
        self, minibatch: Decisions, plan: StepPlan, compare: int | None
    ) -> list[MicroBatchSums]:
        """Compute the gradient of a mini-batch; return the sums of `plan.indices`, on the host."""
        ...

    async def step(self, publish: bool) -> StepReport:
        """Take one optimizer step; with `publish`, raise the version and publish the weights."""
        ...

    async def stand_still(self) -> None:
        """Publish the same weights as a new version."""
        ...

    async def snapshot(self) -> TrainingState:
        """Return all state that the next update depends on, as it is now."""
        ...

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it."""
        ...


class PolicyPasses:
    """Passes of one micro-batch through a policy, on the device lane.

    Args:
        model: the policy.
        config: loss, aggregation and entropy bonus.
        log_probs: computes log-probs and entropies; None for the model's own.
    """

    def __init__(
        self, model: TokenModel[Any], config: LearnerConfig, log_probs: LogProbs | None = None
    ) -> None:
        self._model, self._log_probs = model, log_probs or model.log_probs
        self._loss, self._entropy_coef = policy_loss(config.loss), config.entropy_coef
        self._aggregate = aggregation(config.aggregation)

    def backward(
        self, batch: Any, rows: Decisions, counts: Denominators, compare: int | None
    ) -> MicroBatchSums:
        """Add the gradient of a micro-batch.

        Args:
            batch: prepared observations.
            rows: the rows, on the host.
            counts: divisors of the whole mini-batch, for these rows.
            compare: version whose log-probs these weights should reproduce; None for none.
        """
        device = next(self._model.network.parameters()).device
        # asked on the host: on a GPU, a selection by a mask waits for its number of True
        unmasked = to_device(rows.mask.flatten().nonzero()[:, 0], device)
        log_prob, entropy = self._log_probs(
            batch, *place_choices(self._model, rows.tokens, rows.temperature)
        )
        if not self._entropy_coef:
            # a graph that no backward pass goes through keeps all logits that its checkpoints
            # recompute: 16 GB instead of 1.5 for 8,192 positions of 152,000 tokens
            entropy = entropy.detach()
        rows = rows.on_device(device)
        if log_prob.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{type(self._model).__name__}.log_probs gave {log_prob.dtype}, expected "
                "torch.float32: rounded to 8 bits a ratio of 1.0004 is 1. Call .float() on the "
                "logits before log_softmax."
            )
        losses, diagnostics = self._loss(rows.token_batch(log_prob))
        if self._entropy_coef:
            losses = losses - self._entropy_coef * entropy
        counts = dataclasses.replace(
            counts, sequence_tokens=to_device(counts.sequence_tokens, device)
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
            tokens=torch.stack([versions, distance.double()]).flatten(1)[:, unmasked],
            first_unsound=first_unsound(log_prob, entropy, rows.mask),
        )


class LocalPasses:
    """The passes of a learner in this process, one after another on the device lane.

    Args: those of `Learner`.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        config: LearnerConfig,
        publish_to: Sequence[WeightSink],
        weight_version: int,
    ) -> None:
        self._model, self._lane = model, lane
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._passes = PolicyPasses(model, config)
        self._scorer = Scorer(model, lane, config.micro_batch_size, work="proximal")
        self._grad_norm: float | None = None

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    async def log_probs(self, decisions: Decisions) -> Tensor:
        """Score every token under the current weights."""
        return await self._scorer.log_probs(decisions)

    async def accumulate(
        self, minibatch: Decisions, plan: StepPlan, compare: int | None
    ) -> list[MicroBatchSums]:
        """Compute the gradient of a mini-batch."""
        # first, because an update that was cancelled half-way left the gradients of its micro-batches
        await self._lane.run(self._training.optimizer.zero_grad, work="update")
        parts = [(minibatch.rows(index), plan.denominators.rows(index)) for index in plan.indices]
        sums: list[MicroBatchSums] = []
        async with aclosing(self._lane.prepared_ahead(self._prepare, parts)) as prepared:
            async for (rows, counts), batch in prepared:
                sums.append(
                    await self._lane.run(
                        self._passes.backward, batch, rows, counts, compare, work="update"
                    )
                )
        return await self._lane.run(self._read, sums, work="update")

    async def step(self, publish: bool) -> StepReport:
        """Take one optimizer step."""
        grad_norm, self._grad_norm = self._grad_norm, None
        return await self._lane.run(self._training.step, publish, grad_norm, work="update")

    async def stand_still(self) -> None:
        """Publish the same weights as a new version."""
        await self._lane.run(self._training.stand_still, work="update")

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on."""
        return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it."""
        await self._lane.run(self._training.restore, state, work="checkpoint")

    def _prepare(self, part: tuple[Decisions, Denominators]) -> Any:
        return self._model.prepare(part[0].observations)

    def _read(self, sums: list[MicroBatchSums]) -> list[MicroBatchSums]:
        """Copy the sums to the host, and with them the norm that the step needs there."""
        found, (grad_norm,) = on_host(sums, self._training.optimizer.measure_gradient())
        self._grad_norm = float(grad_norm)
        return found
