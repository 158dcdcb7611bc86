"""Imitation learning: cross-entropy of the demonstrated action tokens, which produces a base
checkpoint.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.language_model import LanguageModel
from vla_rl.engines.policy_model import NO_TOKEN, PolicyModel
from vla_rl.engines.transfers import to_device
from vla_rl.learning.config import ImitationConfig
from vla_rl.learning.learner import UpdateReport
from vla_rl.learning.micro_batches import micro_batches
from vla_rl.learning.scoring import place_choices
from vla_rl.learning.training import Training, TrainingState, WeightSink
from vla_rl.types import Observation, Sampling


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """One demonstrated action chunk, and the observation before it."""

    observation: Observation

    actions: np.ndarray
    """Actions, float32 [H, D], in the environment's units; for a language policy the tokens of a
    reply, int64 [1, T]."""

    num_valid: int
    """Number of demonstrated control steps in the chunk; the rest, after the episode's end, may
    hold anything and is ignored."""

    teaches: np.ndarray | None = None
    """Tokens to learn from, bool [T]; None for all. In a conversation, tokens of other speakers are
    excluded."""


class Imitator:
    """Updates a policy model by supervised learning; updates run one after another.

    The loss is the mean over all valid tokens of the update, and does not depend on the
    micro-batches.

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
        self._model, self._lane, self._config, self._prepare = (
            model,
            lane,
            config,
            prepare or model.prepare,
        )
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    async def update(self, demonstrations: Sequence[Demonstration]) -> UpdateReport:
        """Take one optimizer step. Raises: ValueError if no control step is valid, no token is to
        be learnt, or shapes differ."""
        tokens, mask = await self._lane.prepare(self._targets, demonstrations)
        num_tokens = int(mask.sum())
        is_text = isinstance(self._model, LanguageModel)
        async with self._turn:
            await self._lane.run(self._training.optimizer.zero_grad, work="update")
            losses: list[Tensor] = []
            lengths = [
                len(each.actions[0]) if is_text else tokens.shape[1] for each in demonstrations
            ]
            num_read = [
                len(each.observation["prompt_tokens"]) if is_text else 0 for each in demonstrations
            ]
            sizes = torch.tensor(num_read) + torch.tensor(lengths)
            parts = micro_batches(sizes, self._config.micro_batch_size)
            observations = [
                [demonstrations[row].observation for row in part.tolist()] for part in parts
            ]
            async with aclosing(self._lane.prepared_ahead(self._prepare, observations)) as prepared:
                rows = iter(parts)
                async for _, batch in prepared:
                    part = next(rows)
                    width = max(lengths[row] for row in part.tolist())
                    arguments = (batch, tokens[part, :width], mask[part, :width], num_tokens)
                    losses.append(await self._lane.run(self._backward, *arguments, work="update"))
            report = await self._lane.run(self._training.step, True, work="update")
            loss = await self._lane.run(_total, losses, work="update")
        metrics = {
            "imitation/loss": loss,
            "imitation/grad_norm": report.grad_norm,
            "imitation/lr": report.lr,
            "imitation/skipped_steps": float(report.is_skipped),
        }
        return UpdateReport(self.weight_version, metrics)

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
        wanted = np.stack([d.actions for d in demonstrations])
        error = np.abs(model.decode(greedy) - wanted)
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
            return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish its weights."""
        async with self._turn:
            await self._lane.run(self._training.restore, state, work="checkpoint")

    def _targets(self, demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [B, T] and mask bool [B, T]."""
        if not any(demonstration.num_valid > 0 for demonstration in demonstrations):
            raise ValueError("no demonstrated control step is valid, expected at least one.")
        rows = [self._model.encode(np.nan_to_num(each.actions)[None])[0] for each in demonstrations]
        if not isinstance(self._model, LanguageModel):
            _require_whole_chunks(demonstrations, self._model.decode(rows[0][None]).shape[1:])
        shape = len(rows), max(len(row) for row in rows)
        tokens = torch.full(shape, NO_TOKEN, dtype=torch.from_numpy(rows[0]).dtype)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for number, (row, each) in enumerate(zip(rows, demonstrations, strict=True)):
            tokens[number, : len(row)] = torch.from_numpy(row)
            mask[number, : each.num_valid * (len(row) // len(each.actions))] = True
            if each.teaches is not None:
                mask[number, : len(row)] &= torch.from_numpy(each.teaches)
        if not mask.any():
            raise ValueError(
                f"none of the {tokens.numel()} demonstrated tokens is marked in "
                "Demonstration.teaches, expected at least one; check how `teaches` is computed, "
                "and look for conversations that are cut before their first reply."
            )
        return tokens, mask

    def _backward(self, batch: Any, tokens: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        mask = to_device(mask, self._training.device)
        # entropies are let go at once: their graph would keep all logits (see `PolicyPasses`)
        log_prob = self._training.model.log_probs(
            batch, *place_choices(self._model, tokens, torch.ones(len(tokens)))
        )[0]
        loss = -torch.where(mask, log_prob, 0.0).sum() / num_tokens
        torch.autograd.backward(loss)
        return loss.detach()


def _total(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).sum())


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
        tokens, _ = model.sample(batch, [Sampling(greedy=True)] * num_rows)
    return tokens.cpu().numpy()
