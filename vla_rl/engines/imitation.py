"""Learning from demonstrations: cross-entropy of the demonstrated action tokens; what makes a base checkpoint."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.config import ImitationConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.learner import UpdateReport
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.engines.training import Training, TrainingState, WeightSink
from vla_rl.types import Observation, Sampling


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """One demonstrated action chunk and what was seen before it."""

    observation: Observation

    actions: np.ndarray
    """float32 [H, D], in the environment's units."""

    num_valid: int
    """Control steps of the chunk that were demonstrated; the rest, after the end, may hold anything and teaches nothing."""


class Imitator:
    """Updates a policy model by supervised learning; its updates run one after another.

    The loss is the mean over all valid tokens of the update, whatever the micro-batches are.

    Args:
        model: trained in place.
        lane: computes.
        config: optimizer and micro-batches.
        publish_to: told the new weights after every update.
        weight_version: updates already applied.
        prepare: makes the batches that are learnt from, where that is not how the model acts, such as with augmentation.
    """

    def __init__(
        self,
        model: PolicyModel[Any],
        lane: DeviceLane,
        config: ImitationConfig,
        publish_to: Sequence[WeightSink] = (),
        *,
        weight_version: int = 0,
        prepare: Callable[[Sequence[Observation]], Any] | None = None,
    ) -> None:
        self._lane, self._config, self._prepare = lane, config, prepare or model.prepare
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Updates applied."""
        return self._training.weight_version

    async def update(self, demonstrations: Sequence[Demonstration]) -> UpdateReport:
        """One optimizer step. Raises: ValueError where no control step is valid or a chunk has another shape."""
        tokens, mask = await self._lane.prepare(self._targets, demonstrations)
        num_tokens = int(mask.sum())
        async with self._turn:
            await self._lane.run(self._training.optimizer.zero_grad, work="update")
            losses: list[Tensor] = []
            parts = torch.split(torch.arange(len(demonstrations)), self._config.micro_batch)
            observations = [[demonstrations[row].observation for row in part.tolist()] for part in parts]
            async with aclosing(self._lane.prepared_ahead(self._prepare, observations)) as prepared:
                rows = iter(parts)
                async for _, batch in prepared:
                    part = next(rows)
                    arguments = (batch, tokens[part], mask[part], num_tokens)
                    losses.append(await self._lane.run(self._backward, *arguments, work="update"))
            report = await self._lane.run(self._training.step, True, work="update")
        metrics = {
            "imitation/loss": float(torch.stack(losses).sum()),
            "imitation/grad_norm": report.grad_norm,
            "imitation/lr": report.lr,
            "imitation/skipped_steps": float(report.is_skipped),
        }
        return UpdateReport(self.weight_version, metrics)

    async def evaluate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """Greedy actions against the demonstrated ones: token accuracy, and mean |a - a*| in the environment's units."""
        tokens, mask = await self._lane.prepare(self._targets, demonstrations)
        chosen: list[np.ndarray] = []
        for first in range(0, len(demonstrations), self._config.micro_batch):
            part = demonstrations[first : first + self._config.micro_batch]
            batch = await self._lane.prepare(self._training.model.prepare, [d.observation for d in part])
            chosen.append(await self._lane.run(self._greedy, batch, len(part), work="evaluate"))
        greedy = np.concatenate(chosen)
        valid = mask.numpy()
        wanted = np.stack([d.actions for d in demonstrations])
        error = np.abs(self._training.model.decode(greedy) - wanted)
        is_valid_step = np.arange(error.shape[1])[None] < np.array([[d.num_valid] for d in demonstrations])
        return {
            "imitation/token_accuracy": float((greedy == tokens.numpy())[valid].mean()),
            "imitation/l1": float(error[is_valid_step].mean()),
        }

    async def snapshot(self) -> TrainingState:
        """A copy of everything the next update depends on, between two updates."""
        async with self._turn:
            return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Go on from a snapshot, and publish it."""
        async with self._turn:
            await self._lane.run(self._training.restore, state, work="checkpoint")

    def _targets(self, demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, T] and mask bool [B, T]."""
        if not any(demonstration.num_valid > 0 for demonstration in demonstrations):
            raise ValueError("no demonstrated control step is valid, expected at least one.")
        actions = np.stack([demonstration.actions for demonstration in demonstrations])
        tokens = self._training.model.encode(np.nan_to_num(actions))
        tokens_per_step = tokens.shape[1] // actions.shape[1]
        num_valid = np.array([[demonstration.num_valid] for demonstration in demonstrations])
        mask = np.arange(tokens.shape[1])[None] < num_valid * tokens_per_step
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def _backward(self, batch: Any, tokens: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        device = self._training.device
        mask = mask.to(device)
        log_prob, _ = self._training.model.log_probs(batch, tokens.to(device), torch.ones(len(tokens), device=device))
        loss = -torch.where(mask, log_prob, 0.0).sum() / num_tokens
        torch.autograd.backward(loss)
        return loss.detach()

    def _greedy(self, batch: Any, num_rows: int) -> np.ndarray:
        with torch.inference_mode():
            tokens, _ = self._training.model.sample(batch, [Sampling(greedy=True)] * num_rows)
        return tokens.cpu().numpy()
