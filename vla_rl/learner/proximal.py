"""Values that some losses need from the whole update or mini-batch.

They are computed in separate forward passes.

    proximal log-probs    with the learner's own weights before the update: for decoupled losses,
                          and to correct an engine that computes something slightly different
    sequence log-ratios   the mean over a whole trajectory, whose decisions may be in different
                          micro-batches: GSPO, GMPO, and for OPSM the drift from the engine; they
                          depend on the weights, so every optimizer step recomputes them
    chosen tokens         which tokens a loss drops or penalises, chosen among the whole mini-batch:
                          clip_cov, kl_cov, M2PO; if it has only one micro-batch, the loss chooses

A loss that needs none of these (the clipped surrogate) costs no forward pass here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from torch import Tensor

from vla_rl.algorithms.losses import (
    behavior_weights,
    chosen_tokens,
    engine_correction,
    sequence_drift,
    sequence_log_ratio,
)
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.decisions import Decisions


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
        numbers = self._loss.parameters
        return behavior_weights(
            decisions.token_batch(proximal),
            behavior_weight_cap=numbers["behavior_weight_cap"],
            level=numbers["level"],
            sequence=decisions.sequence,
        )

    def _needs_sequences(self, decisions: Decisions) -> bool:
        is_split = len(set(decisions.sequence.tolist())) < len(decisions)
        return is_split and (self._loss.needs_sequence_log_ratio or self._loss.needs_sequence_drift)

    def _needs_choice(self, minibatch: Decisions) -> bool:
        fits = self._size.tokens is None and len(minibatch) <= self._size.rows
        is_whole = fits and self._num_ranks == 1
        return self._loss.needs_chosen_tokens and not is_whole
