"""Log-probs of recorded decisions, without gradient: the forward passes besides those of the update.

`score_decisions` computes them, `Reference` with frozen weights. `Proximal` adds what some
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
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import (
    KlLossConfig,
    behavior_weights,
    chosen_tokens,
    engine_correction,
    sequence_drift,
    sequence_log_ratio,
)
from vla_rl.engines.device_lane import DeviceLane, to_device
from vla_rl.engines.policy_model import LanguageModel, TokenModel
from vla_rl.learner.config import LearnerConfig, MicroBatchSize
from vla_rl.learner.decisions import Decisions, flatten_trajectories
from vla_rl.learner.finiteness import Drawn, require_drawn, require_log_probs
from vla_rl.learner.predictions import LogProbs, choose_reference_scores
from vla_rl.learner.ranks import LocalRank, OneRank, Pass, Ranks, compute_passes
from vla_rl.types import Observation, Trajectory

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


def score_batch(model: TokenModel[Any], log_probs: LogProbs, batch: Any, rows: Decisions) -> Tensor:
    """Compute the log-probs of prepared rows without a gradient, float32 [M, T] on the device.

    `log_probs` is the model's own method, or a module that calls it.
    """
    with torch.no_grad():
        found, _ = log_probs(batch, *move_choices(model, rows.tokens, rows.temperature))
    return found.float()


class ScoringRank(LocalRank):
    """A rank that scores with a whole policy model.

    Args:
        model: the model, used with its current weights.
        lane: runs the model, one micro-batch at a time.
        work: kind of work under which the lane counts the time.
        kl: the loss' KL term, for a reference whose predictions it may need.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        work: str = "log_probs",
        kl: KlLossConfig | None = None,
    ) -> None:
        super().__init__(lane)
        self._model, self._work = model, work
        self._log_probs = choose_reference_scores(model, kl)

    async def gather_weights(self, clear: bool) -> None:
        """Do nothing: the weights are whole."""

    async def scatter_weights(self) -> None:
        """Do nothing: the weights stay whole."""

    async def score(self, rows: Decisions, of_reference: bool) -> Tensor:
        """Compute the log-probs of all tokens of some rows, on the device."""

        def compute(batch: Any) -> Tensor:
            return score_batch(self._model, self._log_probs, batch, rows)

        return await self.compute_pass(self._model.prepare, rows.observations, compute, self._work)


async def score_decisions(
    ranks: Ranks,
    decisions: Decisions,
    size: MicroBatchSize,
    *,
    of_reference: bool = False,
    work: str = "proximal",
) -> Tensor:
    """Score every token: float32 [N, T] on the CPU, 0 in the padding, at the temperatures of the
    decisions.

    Args:
        ranks: who computes.
        decisions: the rows.
        size: limits of the micro-batches.
        of_reference: whether with the frozen weights, which are never gathered.
        work: kind of work under which a lane counts the copy of the results.

    Raises: ValueError, naming episode and decision, for a number that cannot be a log-prob.
    """
    dealt = ranks.deal_rows(decisions.num_input_tokens, size)

    def call(
        rank: ScoringRank, observations: tuple[Observation, ...], part: Pass
    ) -> Awaitable[Tensor]:
        rows = replace(decisions, observations=observations).rows(part.index)
        return rank.score(rows, of_reference)

    found = await compute_passes(
        ranks,
        dealt,
        decisions.num_input_tokens,
        decisions.observations,
        call,
        begin=None if of_reference else lambda rank: rank.gather_weights(False),
        end=None if of_reference else lambda rank: rank.scatter_weights(),
    )
    results = await ranks.read_tensors(found, work)
    scores = torch.zeros(decisions.mask.shape)
    indices = (index for of_rank in dealt for index in of_rank)
    for index, result in zip(indices, results, strict=True):
        scores[index, : result.shape[1]] = result
    # the trainer may forbid a token that the engine allowed: its log-prob of -inf would become
    # a weight near 0 without a word
    whose = REFERENCES if of_reference else "the learner's"
    require_log_probs(decisions, scores, whose, DISAGREES)
    return scores


class PolicyReference:
    """A frozen policy, for a KL term.

    A pipeline whose coefficient is 0 has no reference: neither the copy nor its forward passes are
    made.

    Args:
        log_probs: scores decisions under the frozen weights.
        check_drawn: the policy's check of what was drawn, as in `require_drawn`.
    """

    def __init__(
        self,
        log_probs: Callable[[Decisions], Awaitable[Tensor]],
        check_drawn: Callable[[Drawn], None] | None = None,
    ) -> None:
        self._log_probs, self._check_drawn = log_probs, check_drawn

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Compute the log-probs, for each trajectory float32 [T] of each decision."""
        require_drawn(trajectories, self._check_drawn)
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
        kl: KlLossConfig | None = None,
    ) -> None:
        # a copy and not a second load: the policy may have been changed since, by an adapter or by
        # earlier training
        frozen = model.copy()
        frozen.network.requires_grad_(False)
        ranks = OneRank(ScoringRank(frozen, lane, "reference", kl), lane)
        size = MicroBatchSize(micro_batch, micro_batch_tokens)
        super().__init__(
            partial(score_decisions, ranks, size=size, of_reference=True, work="reference"),
            getattr(model, "check_drawn", None),
        )


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
