"""Log-probs of recorded decisions, without gradient: the forward passes besides those of the update.

`Scorer` computes them with the learner's weights, `Reference` with frozen ones. `Proximal` adds what some
losses need from the whole update or mini-batch:

    proximal log-probs    with the learner's own weights before the update: for decoupled losses,
                          and to correct an engine that computes something slightly different
    sequence log-ratios   the mean over a whole trajectory, whose decisions may be in different
                          micro-batches: GSPO, GMPO, and for OPSM the drift from the engine; they
                          depend on the weights, so every optimizer step recomputes them
    chosen tokens         which tokens a loss drops or penalises, chosen among the whole mini-batch:
                          clip_cov, kl_cov, M2PO; if it has only one micro-batch, the loss chooses

A loss that needs none of these (the clipped surrogate) costs no forward pass here.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import (
    behavior_weights,
    chosen_tokens,
    engine_correction,
    sequence_drift,
    sequence_log_ratio,
)
from vla_rl.engines.device_lane import DeviceLane, to_device, to_host
from vla_rl.engines.policy_model import LanguageModel, TokenModel
from vla_rl.learner.config import LearnerConfig, MicroBatchSize
from vla_rl.learner.decisions import Decisions, flatten_trajectories
from vla_rl.learner.finiteness import require_log_probs
from vla_rl.learner.plan import micro_batches
from vla_rl.types import Trajectory

RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT")

REFERENCES: Final = "the reference's"
"""Owner of a reference's log-probs, in errors."""

DISAGREES: Final = (
    "look for NaN or infinity in its weights, and whether it may choose the same "
    "tokens as the engine"
)


def move_choices(model: TokenModel[Any], *columns: Tensor) -> tuple[Tensor, ...]:
    """Copy tokens and temperatures to where a model's `log_probs` takes them: its device, but for a
    language model, which lays out rows by the lengths of replies, and asks for them on the host.
    """
    if isinstance(model, LanguageModel):
        return columns
    device = next(model.network.parameters()).device
    return tuple(to_device(column, device) for column in columns)


class Scorer:
    """Computes the log-probs that a policy model gives to recorded choices.

    Args:
        model: the model, used with its current weights.
        lane: runs the model, one micro-batch at a time.
        size: limits of the micro-batches.
        work: kind of work under which the lane counts the time.
        whose: name of the model in errors.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        size: MicroBatchSize,
        work: str = "log_probs",
        whose: str = "the learner's",
    ) -> None:
        self._model, self._lane, self._size, self._work, self._whose = (
            model,
            lane,
            size,
            work,
            whose,
        )

    async def log_probs(self, decisions: Decisions) -> Tensor:
        """Score every token: float32 [N, T] on the CPU, 0 in the padding, at the temperatures of
        the decisions.

        Raises: ValueError, naming episode and decision, for a number that cannot be a log-prob.
        """
        indices = micro_batches(decisions.num_input_tokens, self._size)
        parts = [decisions.rows(index) for index in indices]
        found = await compute_in_parts(self._lane, self._prepare, self._score, parts, self._work)
        results = await self._lane.run(to_host, *found, work=self._work)
        scores = torch.zeros(decisions.mask.shape)
        for index, result in zip(indices, results, strict=True):
            scores[index, : result.shape[1]] = result
        # the trainer may forbid a token that the engine allowed: its log-prob of -inf would become
        # a weight near 0 without a word
        require_log_probs(decisions, scores, self._whose, DISAGREES)
        return scores

    def _prepare(self, rows: Decisions) -> Any:
        return self._model.prepare(rows.observations)

    def _score(self, batch: Any, rows: Decisions) -> Tensor:
        with torch.no_grad():
            log_probs, _ = self._model.log_probs(
                batch, *move_choices(self._model, rows.tokens, rows.temperature)
            )
        return log_probs.float()


class PolicyReference:
    """A frozen policy, for a KL term.

    A pipeline whose coefficient is 0 has no reference: neither the copy nor its forward passes are
    made.

    Args:
        log_probs: scores decisions under the frozen weights.
    """

    def __init__(self, log_probs: Callable[[Decisions], Awaitable[Tensor]]) -> None:
        self._log_probs = log_probs

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Compute the log-probs, for each trajectory float32 [T] of each decision."""
        decisions = flatten_trajectories(trajectories, [0.0] * len(trajectories))
        scores = iter(decisions.split_by_decision(await self._log_probs(decisions)))
        return [[next(scores) for _ in trajectory.steps] for trajectory in trajectories]


class Reference(PolicyReference):
    """A frozen copy of the current policy, which scores in this process."""

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        micro_batch: int,
        micro_batch_tokens: int | None = None,
    ) -> None:
        # a copy and not a second load: the policy may have been changed since, by an adapter or by
        # earlier training
        frozen = model.copy()
        frozen.network.requires_grad_(False)
        size = MicroBatchSize(micro_batch, micro_batch_tokens)
        super().__init__(Scorer(frozen, lane, size, "reference", REFERENCES).log_probs)


async def compute_in_parts(
    lane: DeviceLane,
    prepare: Callable[[RowsT], Any],
    compute: Callable[[Any, RowsT], ResultT],
    parts: Sequence[RowsT],
    work: str,
) -> list[ResultT]:
    """Compute `compute(prepare(rows), rows)` for every part: prepared one ahead on the host,
    computed on the device lane."""
    results: list[ResultT] = []
    async with aclosing(lane.prepare_ahead(prepare, parts)) as prepared:
        async for rows, batch in prepared:
            results.append(await lane.run(compute, batch, rows, work=work))
    return results


class Proximal:
    """Adds the values above to decisions, if the loss needs them.

    Args:
        log_probs: scores decisions under the learner's current weights.
        config: loss, micro-batches and ranks.
    """

    def __init__(
        self, log_probs: Callable[[Decisions], Awaitable[Tensor]], config: LearnerConfig
    ) -> None:
        self._log_probs, self._loss, self._num_ranks = log_probs, config.loss, config.row_groups
        self._size = config.micro_batch_size
        self.metrics: dict[str, float] = {}
        """Differences between the proximal and the engine's log-probs in the last update, staleness
        included; empty if not computed."""

    async def before_update(self, decisions: Decisions) -> Decisions:
        """Add the log-probs of the weights before the update, and the engine correction."""
        self.metrics = {}
        # the clipped surrogate needs none of this: a forward pass over all rows would cost a third
        # of the update
        if not (self._loss.needs_proximal or self._needs_sequences(decisions)):
            return decisions
        proximal = await self._log_probs(decisions)
        correction = engine_correction(
            self._loss.correction,
            proximal,
            decisions.behavior_log_prob,
            decisions.mask,
            decisions.sequence,
        )
        self.metrics = {
            f"mismatch/{name}": value for name, value in correction.diagnostics.metrics().items()
        }
        decisions = replace(decisions, proximal_log_prob=proximal)
        if self._loss.correction.is_active:
            return replace(decisions, correction_weight=correction.weight)
        if self._loss.name == "decoupled_ppo":
            return replace(decisions, correction_weight=self._behavior_weights(decisions, proximal))
        return decisions

    async def before_step(self, minibatch: Decisions, *, is_first: bool) -> Decisions:
        """Add the log-ratio of each trajectory, or the tokens that the loss chooses.

        In the first step of an update, the weights are still those before it.
        """
        needs_sequences, needs_choice = (
            self._needs_sequences(minibatch),
            self._needs_choice(minibatch),
        )
        if not (needs_sequences or needs_choice):
            return minibatch
        # later steps have other weights: an old ratio would clip tokens that have moved since
        current = minibatch.proximal_log_prob if is_first else None
        if current is None:
            current = await self._log_probs(minibatch)
        batch = minibatch.token_batch(current)
        if needs_choice:
            return replace(minibatch, chosen_tokens=chosen_tokens(self._loss, batch))
        if self._loss.needs_sequence_drift:
            minibatch = replace(minibatch, sequence_drift=sequence_drift(batch, minibatch.sequence))
        if self._loss.needs_sequence_log_ratio:
            means = sequence_log_ratio(self._loss, batch, minibatch.sequence)
            minibatch = replace(minibatch, sequence_log_ratio=means)
        return minibatch

    def _behavior_weights(self, decisions: Decisions, proximal: Tensor) -> Tensor:
        region = self._loss.parameters
        return behavior_weights(
            decisions.token_batch(proximal),
            behavior_weight_cap=region.behavior_weight_cap,
            level=region.level,
            sequence=decisions.sequence,
        )

    def _needs_sequences(self, decisions: Decisions) -> bool:
        # a sequence in one row has its mean at hand in any micro-batch
        is_split = len(set(decisions.sequence.tolist())) < len(decisions)
        return is_split and (self._loss.needs_sequence_log_ratio or self._loss.needs_sequence_drift)

    def _needs_choice(self, minibatch: Decisions) -> bool:
        # with a limit on tokens, rows may still be cut into several passes
        fits = self._size.tokens is None and len(minibatch) <= self._size.rows
        is_whole = fits and self._num_ranks == 1
        return self._loss.needs_chosen_tokens and not is_whole
