"""Imitation learning: cross-entropy of the demonstrated action tokens, which produces a base
checkpoint.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import NO_TOKEN, LanguageModel, PolicyModel
from vla_rl.learner.backend import LocalWeights, TrainedWeights, Training, WeightSink
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.config import ImitationConfig
from vla_rl.learner.imitation_backend import LocalImitationRank, SftRows, make_sft_log_probs
from vla_rl.learner.learner import UpdateReport
from vla_rl.learner.ranks import OneRank, Pass, Ranks, compute_passes
from vla_rl.types import Observation, Sampling, derive_seed


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """One demonstrated action chunk, and the observation before it."""

    observation: Observation

    actions: np.ndarray
    """Actions, float32 [H, D], in the environment's units; for a language policy the tokens of a
    reply, int64 [1, T]."""

    num_valid: int
    """Number of demonstrated control steps in the chunk; the rest, after the episode's end, may
    hold anything and is ignored."""

    trained_tokens: np.ndarray | None = None
    """Tokens to learn from, bool [T]; None for all. In a conversation, tokens of other speakers are
    excluded."""


class PolicyImitator:
    """Updates a policy model by supervised learning; updates run one after another.

    It decides what is learnt. The loss is the mean over all valid tokens of the update, and does not
    depend on the micro-batches.

    Args:
        ranks: who computes; a process alone is one rank without a group.
        weights: what is trained.
        model: the policy in this process.
        lane: prepares rows, and evaluates.
        config: micro-batches.
        seed: seed of what ranks of a group draw.

    Example:
        The last chunk of an episode of LIBERO, which ended after three of its eight control steps:

        Demonstration(observation={"image": ..., "state": ...}, actions=np.zeros((8, 7), np.float32),
                      num_valid=3)
    """

    def __init__(
        self,
        ranks: Ranks,
        weights: TrainedWeights,
        model: PolicyModel[Any] | LanguageModel[Any],
        lane: DeviceLane,
        config: ImitationConfig,
        seed: int = 0,
    ) -> None:
        self._ranks, self._weights, self._model = ranks, weights, model
        self._lane, self._config, self._seed = lane, config, seed
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._weights.weight_version

    async def train_step(self, demonstrations: Sequence[Demonstration]) -> UpdateReport:
        """Take one optimizer step. Raises: ValueError if no control step is valid, no token is to
        be learnt, or shapes differ."""
        rows = await self._lane.prepare(self._make_rows, demonstrations)
        async with self._turn:
            losses = await self.forward_backward(rows)
            report = await self._weights.optim_step(True)
            loss = await self._weights.sum_losses(losses)
        metrics = {
            "imitation/loss": loss,
            "imitation/grad_norm": report.grad_norm,
            "imitation/lr": report.lr,
            "imitation/skipped_steps": float(report.is_skipped),
        }
        return UpdateReport(self.weight_version, metrics)

    async def forward_backward(self, rows: SftRows) -> list[Tensor]:
        """Compute the gradient of the mean over all tokens to learn.

        Return each micro-batch's part of the loss.
        """
        # counted over all micro-batches before the first: the mean must not depend on how rows are
        # cut
        num_tokens, lengths = int(rows.mask.sum()), rows.num_input_tokens

        def call(
            rank: LocalImitationRank, observations: tuple[Observation, ...], part: Pass
        ) -> Awaitable[Tensor]:
            chosen = rows._replace(observations=observations).rows(part.index)
            if part.is_idle:  # a masked row adds exact zeros to every gradient
                chosen = chosen._replace(mask=torch.zeros_like(chosen.mask))
            # the word is part of the seed: another one would draw other noise for the same run
            seed = derive_seed(self._seed, "lesson", self.weight_version, int(part.index[0]))
            return rank.imitate(chosen, seed, num_tokens, part.is_last)

        return await compute_passes(
            self._ranks,
            self._ranks.deal_rows(lengths, self._config.micro_batch_size),
            lengths,
            rows.observations,
            call,
            begin=lambda rank: rank.gather_weights(True),
            least=1,
        )

    async def fetch_weights(self) -> None:
        """Bring the weights of the model in this process up to date, to save or to evaluate it."""
        async with self._turn:
            await self._weights.fetch_weights()

    async def evaluate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """Compare greedy actions with the demonstrated ones: mean |a - a*| in the environment's
        units, and for policies with tokens their accuracy.

        Raises: TypeError for a language policy, which has to be evaluated by running episodes.
        """
        model = self._model
        if isinstance(model, LanguageModel):
            raise TypeError(
                "a language policy has no distance from a demonstration; evaluate it "
                "by running episodes"
            )
        tokens, mask = await self._lane.prepare(self._targets, demonstrations)
        chosen: list[np.ndarray] = []
        for first in range(0, len(demonstrations), self._config.micro_batch):
            part = demonstrations[first : first + self._config.micro_batch]
            batch = await self._lane.prepare(model.prepare, [d.observation for d in part])
            chosen.append(await self._lane.run(_greedy, model, batch, len(part), work="evaluate"))
        greedy = np.concatenate(chosen)
        valid = mask.numpy()
        # in the environment's units: token accuracy counts the neighbouring bin as wrong, which is
        # nearly as good
        wanted = np.stack([d.actions for d in demonstrations])
        decoded = model.decode(greedy)
        # a policy may execute the first rows of a chunk alone, and decides those
        error = np.abs(decoded - wanted[:, : decoded.shape[1]])
        is_valid_step = np.arange(error.shape[1])[None] < np.array(
            [[d.num_valid] for d in demonstrations]
        )
        distance = {"imitation/l1": float(error[is_valid_step].mean())}
        if tokens.is_floating_point():  # continuous actions never match exactly
            return distance
        return {
            "imitation/token_accuracy": float((greedy == tokens.numpy())[valid].mean()),
            **distance,
        }

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on, between two updates."""
        async with self._turn:
            return await self._weights.snapshot()

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish its weights."""
        async with self._turn:
            await self._weights.restore(state)

    def _make_rows(self, demonstrations: Sequence[Demonstration]) -> SftRows:
        tokens, mask = self._targets(demonstrations)
        is_text, num_rows = isinstance(self._model, LanguageModel), len(demonstrations)
        lengths, prompts = torch.full((num_rows,), tokens.shape[1]), torch.zeros(num_rows)
        if is_text:
            lengths = torch.tensor([len(each.actions[0]) for each in demonstrations])
            prompts = torch.tensor(
                [len(each.observation["prompt_tokens"]) for each in demonstrations]
            )
        observations = tuple(each.observation for each in demonstrations)
        return SftRows(observations, tokens, mask, lengths, prompts.long() + lengths)

    def _targets(self, demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [B, T] and mask bool [B, T]."""
        # a mean over no token is NaN, and would end in a skipped step instead of a sentence
        if not any(demonstration.num_valid > 0 for demonstration in demonstrations):
            raise ValueError("no demonstrated control step is valid, expected at least one.")
        # the steps after an episode's end may hold NaN: they are masked below, but they have to
        # have tokens
        rows = [self._model.encode(np.nan_to_num(each.actions)[None])[0] for each in demonstrations]
        if not isinstance(self._model, LanguageModel):
            _require_whole_chunks(demonstrations, self._model.decode(rows[0][None]).shape[1:])
        shape = len(rows), max(len(row) for row in rows)
        tokens = torch.full(shape, NO_TOKEN, dtype=torch.from_numpy(rows[0]).dtype)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for number, (row, each) in enumerate(zip(rows, demonstrations, strict=True)):
            tokens[number, : len(row)] = torch.from_numpy(row)
            mask[number, : each.num_valid * (len(row) // len(each.actions))] = True
            if each.trained_tokens is not None:
                mask[number, : len(row)] &= torch.from_numpy(each.trained_tokens)
        if not mask.any():
            raise ValueError(
                f"none of the {tokens.numel()} demonstrated tokens is marked in "
                "Demonstration.trained_tokens, expected at least one; check how `trained_tokens` is computed, "
                "and look for conversations that are cut before their first reply."
            )
        return tokens, mask


class Imitator(PolicyImitator):
    """A `PolicyImitator` that computes in this process.

    Args:
        model: trained in place.
        lane: runs the model.
        config: optimizer and micro-batches.
        publish_to: engines that get the new weights after every update.
        weight_version: number of updates already applied.
        prepare: makes training batches if they differ from those for acting, for example with
            augmentation.
    """

    def __init__(
        self,
        model: PolicyModel[Any] | LanguageModel[Any],
        lane: DeviceLane,
        config: ImitationConfig,
        publish_to: Sequence[WeightSink] = (),
        *,
        weight_version: int = 0,
        prepare: Callable[[Sequence[Observation]], Any] | None = None,
    ) -> None:
        training = Training(model, config.optimizer, publish_to, weight_version)
        log_probs = make_sft_log_probs(model, config.label_width)
        rank = LocalImitationRank(training, lane, log_probs, prepare or model.prepare)
        super().__init__(OneRank(rank, lane), LocalWeights(training, lane), model, lane, config)


def _require_whole_chunks(demonstrations: Sequence[Demonstration], shape: tuple[int, ...]) -> None:
    for number, each in enumerate(demonstrations):
        if each.actions.shape != shape:
            raise ValueError(
                f"demonstration {number} is a chunk {list(each.actions.shape)}, expected "
                f"{list(shape)}, as the policy decides; pad a chunk at the end of an episode and "
                "set num_valid."
            )


def _greedy(model: PolicyModel[Any], batch: Any, num_rows: int) -> np.ndarray:
    with torch.inference_mode():
        sampled = model.sample(batch, [Sampling(greedy=True)] * num_rows)
    return (sampled.tokens if sampled.chunk is None else sampled.chunk).cpu().numpy()
