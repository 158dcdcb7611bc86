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
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.graph import Slice
from vla_rl.learner.backend import (
    LocalPolicyRank,
    LocalWeights,
    MicroBatchSums,
    TrainedWeights,
    Training,
    WeightSink,
)
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.decisions import Decisions, flatten_trajectories
from vla_rl.learner.finiteness import require_drawn, require_finite_outputs
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import StepPlan, plan_minibatches, plan_step
from vla_rl.learner.predictions import (
    count_prefix_bytes,
    drop_prefixes,
    exceeds_kl,
    require_suitable_loss,
)
from vla_rl.learner.ranks import OneRank, Pass, Ranks, compute_passes
from vla_rl.learner.rows import Advantage
from vla_rl.learner.scoring import Proximal, score_decisions
from vla_rl.types import Observation, Trajectory


class PolicyMismatchError(VlaRlError):
    """The learner finds the engine's choices unlikely although both have the same weights."""


class UpdateReport(msgspec.Struct, frozen=True):
    """Result of one update."""

    weight_version: int
    """Version of the weights after the update."""

    metrics: dict[str, float]

    slices: Mapping[str, tuple[Slice, ...]] = {}
    """Timelines of the processes that computed it, by lane; empty for this process alone."""

    note: str = ""
    """A few words for the live view, such as who waited for whom."""


class PolicyLearner:
    """Updates a policy by policy gradient; updates run one after another.

    It decides what is learnt: mini-batches, denominators, skips and refusals; ranks compute.

    Args:
        ranks: who computes; a process alone is one rank without a group.
        weights: what is trained.
        lane: prepares rows.
        config: loss and batches.
        model: the policy, as far as it names itself and checks what its decisions have drawn.

    Example:
        UpdateReport(weight_version=12, metrics={"update/loss": -0.02, "update/grad_norm": 0.8, ...},
                     note="ranks wait 6%, mostly for rank 0; communication 18%")
    """

    def __init__(
        self,
        ranks: Ranks,
        weights: TrainedWeights,
        lane: DeviceLane,
        config: LearnerConfig,
        model: TokenModel[Any],
    ) -> None:
        self._ranks, self._weights, self._lane = ranks, weights, lane
        self._config, self._name = config, type(model).__name__
        self._check_drawn = getattr(model, "check_drawn", None)
        self._keeps_prefixes = count_prefix_bytes(model, config) > 0
        require_suitable_loss(model, config)
        log_probs = partial(score_decisions, ranks, size=config.micro_batch_size)
        self._proximal = Proximal(log_probs, config)
        self._agreed = False
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._weights.weight_version

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update the policy from trajectories, and publish the new weights.

        If cancelled, it leaves the weights of a complete optimizer step, and no gradient for later updates.
        Rows without a signal (every advantage is 0, and no entropy, KL or other term has a gradient) are not
        computed, which leaves the gradient as it is. Optimizer steps without other rows are skipped, because
        Adam's momentum would still move the weights. The version rises anyway.

        Args:
            trajectories: episodes to learn from.
            advantages: for each trajectory one number, one per decision, or one per token.
            reference_log_probs: for each trajectory float32 [T] of each decision, if the loss has a KL term.

        Raises: ValueError if there is nothing to learn from, if shapes do not fit, or for a log-prob of an
            engine, the reference or the model that is not finite or above 0, naming its episode;
            PolicyMismatchError if the first update's ratio is not 1; DivergedError for repeated gradients
            that are not finite.
        """
        require_drawn(trajectories, self._check_drawn)
        decisions = await self._lane.prepare(
            flatten_trajectories, trajectories, advantages, reference_log_probs
        )
        async with self._turn:
            started, version = time.perf_counter(), self.weight_version
            decisions = await self._proximal.before_update(decisions)
            # all of them before the first step: every divisor is counted over a whole mini-batch,
            # and an error in a late one would leave half an update
            minibatches = [
                decisions.rows(index)
                for index in plan_minibatches(decisions.sequence, self._config, version)
            ]
            steps = [(rows, plan_step(rows, self._config)) for rows in minibatches]
            steps = [(rows, plan) for rows, plan in steps if plan.num_planned_rows]
            sums, reports = await self._run_steps(steps, version)
            kept = {}
            if self._keeps_prefixes:
                kept = await drop_prefixes(self._ranks, self._config)
        # over tokens and not decisions: an engine may change its weights in the middle of a reply
        staleness = (version - decisions.weight_version).expand_as(decisions.mask)[decisions.mask]
        metrics = staleness_metrics(staleness) | update_metrics(sums, reports, version)
        seconds = time.perf_counter() - started
        metrics |= self._proximal.metrics | kept
        metrics |= {
            "update/decisions": float(decisions.num_decisions),
            "update/rows": float(len(decisions)),
            "update/computed_rows": float(sum(plan.num_planned_rows for _, plan in steps)),
            "update/seconds": seconds,
        }
        return UpdateReport(self.weight_version, metrics)

    async def forward_backward(
        self, minibatch: Decisions, plan: StepPlan, compare: int | None
    ) -> list[MicroBatchSums]:
        """Compute the gradient of a mini-batch: the first half of an optimizer step.

        Args:
            minibatch: its rows.
            plan: rows of each rank.
            compare: version whose log-probs these weights should reproduce; None for none.

        Raises: as `update`, about the model's outputs.
        """

        def call(
            rank: LocalPolicyRank, observations: tuple[Observation, ...], part: Pass
        ) -> Awaitable[MicroBatchSums]:
            rows = replace(minibatch, observations=observations).rows(part.index)
            if part.is_idle:  # a masked row adds exact zeros to every gradient
                rows = replace(rows, mask=torch.zeros_like(rows.mask))
            counts = plan.denominators.rows(part.index)
            return rank.forward_backward(rows, counts, compare, part.is_last)

        # first, because an update that was cancelled half-way left the gradients of its micro-batches
        found = await compute_passes(
            self._ranks,
            plan.ranks,
            minibatch.num_input_tokens,
            minibatch.observations,
            call,
            begin=lambda rank: rank.gather_weights(True),
            least=1,
        )
        found = await self._weights.read_sums(found)
        # once per mini-batch: asking after each micro-batch would make the host wait for the device
        nonfinite = [part.first_nonfinite for part in found]
        require_finite_outputs(minibatch, plan.indices, nonfinite, self._name)
        if compare is not None:
            # before the first step, so that a disagreement leaves the weights as they were
            self._require_agreement(found)
        return found

    async def optim_step(self, *, publish: bool) -> StepReport:
        """Take one optimizer step; with `publish`, raise the version and publish the weights."""
        return await self._weights.optim_step(publish)

    def count_flops(self, peak_flops: float) -> None:
        """Measure MFU, if this learner has processes of its own; the run measures its own process.

        Args:
            peak_flops: operations per second of a device.
        """

    async def publish_unchanged(self) -> UpdateReport:
        """Publish the same weights as a new version, in an update in which other agents learn.

        The optimizer does not step.
        """
        async with self._turn:
            await self._weights.publish_unchanged()
        return UpdateReport(self.weight_version, {"update/trained": 0.0})

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on, between two updates."""
        async with self._turn:
            return await self._weights.snapshot()

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it to the engines.

        Raises: CheckpointError if it is not of this policy.
        """
        async with self._turn:
            await self._weights.restore(state)

    async def _run_steps(
        self, steps: Sequence[tuple[Decisions, StepPlan]], version: int
    ) -> tuple[list[MicroBatchSums], list[StepReport]]:
        """Take the optimizer steps of an update, and publish the new version with the last one."""
        sums: list[MicroBatchSums] = []
        reports: list[StepReport] = []
        for number, (minibatch, plan) in enumerate(steps, start=1):
            minibatch = await self._proximal.before_step(minibatch, is_first=number == 1)
            found = await self.forward_backward(minibatch, plan, version if number == 1 else None)
            # the first step is always taken: what moved the policy until then was not this update
            if number > 1 and exceeds_kl(
                [part.diagnostics for part in found], self._config.stop_kl
            ):
                break
            sums += found
            reports.append(await self.optim_step(publish=number == len(steps)))
        if len(reports) < len(steps) or not steps:
            # a new version all the same: scheduler and engines count updates, not changes
            await self._weights.publish_unchanged()
        return sums, reports

    def _require_agreement(self, sums: Sequence[MicroBatchSums]) -> None:
        """Raise PolicyMismatchError if the ratio is not 1.

        It is checked in the first update with tokens of the learner's own version.
        """
        gap = mean_gap(sums)
        if self._agreed or gap is None:
            return
        # written so that a gap of NaN is refused too
        if not gap <= self._config.max_mismatch:
            raise PolicyMismatchError(
                f"the learner's log-probs differ by {gap:.4g} on average from those that the "
                f"engine reported for the same tokens and weights (version {self.weight_version}), "
                f"expected at most max_mismatch = {self._config.max_mismatch}, so that the ratio "
                "starts at 1. Acting and learning compute different numbers: check the "
                "temperature, dropout, the attention mask, and how observations are prepared."
            )
        self._agreed = True


class Learner(PolicyLearner):
    """A `PolicyLearner` that computes in this process.

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
        # the same object: an engine that shares the network acts between two optimizer steps with
        # weights that have no version
        shares = any(sink.network is model.network for sink in publish_to)
        if shares and not config.steps_once_per_update:
            raise ConfigError(
                f"LearnerConfig.minibatch_trajectories is {config.minibatch_trajectories} and "
                f"epochs {config.epochs}, expected none and 1 if an engine shares the learner's "
                "model: in an update of several optimizer steps, the engine would act with weights "
                "without a version. Give the engine a copy of the model."
            )
        training = Training(model, config.optimizer, publish_to, weight_version)
        ranks = OneRank(LocalPolicyRank(training, lane, config), lane)
        weights = LocalWeights(training, lane)
        super().__init__(ranks, weights, lane, config, model)


def update_metrics(
    sums: Sequence[MicroBatchSums], reports: Sequence[StepReport], weight_version: int
) -> dict[str, float]:
    """Return the metrics by path.

    Args:
        sums: sums of all micro-batches of the update.
        reports: reports of its optimizer steps; none if the update trained nothing, which
            `update/trained` shows.
        weight_version: the learner's version before the update.

    Returns: `update/loss` is the mean over the optimizer steps; means over tokens are over those of
    the rows that were computed. `update/log_prob_gap_mean` and
    `_max`, |learner's log-prob - engine's| of the same tokens under the same weights, are present
    only if the newest version made some of the decisions. `update/log_ratio_abs/staleness_K` is the
    mean |log-ratio| over the tokens of decisions K updates old, over all steps.
    """
    if not reports:
        return {"update/trained": 0.0}
    diagnostics = reduce(add, (part.diagnostics for part in sums))
    num_tokens = max(float(diagnostics.num_tokens), 1.0)
    metrics = {
        "update/trained": 1.0,
        "update/loss": float(torch.stack([part.loss for part in sums]).sum()) / len(reports),
        "update/entropy": float(torch.stack([part.entropy_sum for part in sums]).sum())
        / num_tokens,
        **{f"update/{name}": value for name, value in diagnostics.metrics().items()},
        "update/grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "update/lr": reports[-1].lr,
        "update/steps": float(len(reports)),
        "update/skipped_steps": float(sum(report.is_skipped for report in reports)),
        "update/tokens": float(diagnostics.num_tokens),
    }
    metrics |= _ratios_by_staleness(
        torch.cat([part.tokens for part in sums], dim=1), weight_version
    )
    gap = mean_gap(sums)
    if gap is not None:
        metrics["update/log_prob_gap_mean"] = gap
        metrics["update/log_prob_gap_max"] = float(
            torch.stack([part.gap_max for part in sums]).max()
        )
    return metrics


def staleness_metrics(staleness: Tensor) -> dict[str, float]:
    """Summarise the staleness of each token, int64 [n].

    It is the learner's version minus the version that chose the token.
    """
    return {
        "update/staleness_mean": float(staleness.float().mean()),
        "update/staleness_max": float(staleness.max()),
    }


def mean_gap(sums: Sequence[MicroBatchSums]) -> float | None:
    """Return the mean |learner's log-prob - engine's| over tokens chosen by the same weights.

    None if there are none.
    """
    num_compared = int(torch.stack([part.num_compared for part in sums]).sum())
    if num_compared == 0:
        return None
    return float(torch.stack([part.gap_sum for part in sums]).sum()) / num_compared


def _ratios_by_staleness(tokens: Tensor, weight_version: int) -> dict[str, float]:
    # by version: how far the ratio has moved for each age shows which staleness a run still bears
    versions, sizes = tokens
    metrics = {}
    for version in versions.unique().tolist():
        chosen = versions == version
        name = f"update/log_ratio_abs/staleness_{weight_version - int(version)}"
        metrics[name] = float(sizes[chosen].mean())
    return metrics
