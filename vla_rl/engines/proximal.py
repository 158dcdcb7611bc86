"""What some losses need to know about the weights before an update or a step, computed in forward passes of their own.

    proximal log-probs    the learner's own weights before the update: decoupled losses, and the correction of an engine
                          that computes something slightly different
    sequence log-ratios   the mean over a whole trajectory, whose decisions may lie in different micro-batches: GSPO, GMPO;
                          they follow the weights, so every optimizer step asks anew
    chosen tokens         which tokens a loss drops or penalises, chosen among the whole mini-batch: clip_cov, kl_cov,
                          M2PO; where that is one micro-batch, the loss itself chooses

A loss that needs neither (the clipped surrogate) costs no forward pass here.
"""

from dataclasses import replace
from typing import Any

from vla_rl.algorithms.losses import TokenBatch, chosen_tokens, engine_correction, sequence_log_ratio
from vla_rl.engines.config import LearnerConfig
from vla_rl.engines.decisions import Decisions
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.engines.scoring import Scorer


class Proximal:
    """Adds those columns to decisions, where the loss needs them."""

    def __init__(self, model: TokenModel[Any], lane: DeviceLane, config: LearnerConfig) -> None:
        self._loss, self._size = config.loss, config.micro_batch_size
        self._scorer = Scorer(model, lane, self._size, work="proximal")
        self.metrics: dict[str, float] = {}
        """How far the last update's proximal log-probs were from the engine's, staleness included; empty without them."""

    async def before_update(self, decisions: Decisions) -> Decisions:
        """With the log-probs of the weights before the update, and the engine correction over all of it."""
        self.metrics = {}
        if not (self._loss.needs_proximal or self._needs_sequences(decisions)):
            return decisions
        proximal = await self._scorer.log_probs(decisions)
        correction = engine_correction(
            self._loss.correction, proximal, decisions.behavior_log_prob, decisions.mask, decisions.sequence
        )
        self.metrics = {f"mismatch/{name}": value for name, value in correction.diagnostics.metrics().items()}
        weight = correction.weight if self._loss.correction.is_active else None
        return replace(decisions, proximal_log_prob=proximal, correction_weight=weight)

    async def before_step(self, minibatch: Decisions, *, is_first: bool) -> Decisions:
        """With the log-ratio of each trajectory, or the tokens that the loss chooses; the first step of an update still has
        the weights before it."""
        needs_sequences, needs_choice = self._needs_sequences(minibatch), self._needs_choice(minibatch)
        if not (needs_sequences or needs_choice):
            return minibatch
        current = minibatch.proximal_log_prob if is_first else None
        if current is None:
            current = await self._scorer.log_probs(minibatch)
        batch = TokenBatch(
            log_prob=current,
            behavior_log_prob=minibatch.behavior_log_prob,
            advantage=minibatch.advantage,
            mask=minibatch.mask,
            proximal_log_prob=minibatch.proximal_log_prob,
        )
        if needs_choice:
            return replace(minibatch, chosen_tokens=chosen_tokens(self._loss, batch))
        return replace(minibatch, sequence_log_ratio=sequence_log_ratio(self._loss, batch, minibatch.sequence))

    def _needs_sequences(self, decisions: Decisions) -> bool:
        is_split = len(set(decisions.sequence.tolist())) < len(decisions)
        return self._loss.needs_sequence_log_ratio and is_split

    def _needs_choice(self, minibatch: Decisions) -> bool:
        is_whole = self._size.tokens is None and len(minibatch) <= self._size.rows
        return self._loss.needs_chosen_tokens and not is_whole
