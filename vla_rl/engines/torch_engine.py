"""The in-process engine: batches whoever waits, computes on the device lane, stamps the version that acted."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import nn

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.rollout import BatchStats, DynamicBatcher
from vla_rl.types import ActionChunk, Observation, Sampling


class _Request(msgspec.Struct, frozen=True):
    observation: Observation
    sampling: Sampling


class TorchEngine:
    """Answers `act` for any number of episodes with one policy model.

    Owned by `async with`. Invariant: weights and version change together, on the device lane and between batches, so every
    chunk of a batch was made by exactly the weights that its `weight_version` names.

    Args:
        model: acts; it may be the learner's own (then nothing is copied) or a copy of it.
        lane: computes; shared with the learner.
        config: batching.
        weight_version: updates already applied to the weights of `model`.
    """

    def __init__(
        self, model: PolicyModel[Any], lane: DeviceLane, config: EngineConfig, weight_version: int = 0
    ) -> None:
        self._model, self._lane = model, lane
        self._weight_version = weight_version
        self._batcher: DynamicBatcher[_Request, ActionChunk] = DynamicBatcher(
            self._answer,
            max_batch=config.max_batch,
            max_wait_s=config.max_wait_s,
            deterministic=config.is_deterministic,
            name="policy",
        )

    async def __aenter__(self) -> Self:
        await self._batcher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._batcher.__aexit__(kind, error, traceback)

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that act from now on."""
        return self._weight_version

    @property
    def network(self) -> nn.Module:
        """The weights that act."""
        return self._model.network

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; waits for its batch.

        Raises: ValueError where the observation is not what the policy expects. The whole batch it was in gets it.
        """
        return await self._batcher.submit(_Request(observation, sampling or Sampling()))

    def stats(self) -> BatchStats:
        """Batch sizes, waits and the share of the time with a batch in flight."""
        return self._batcher.stats()

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and their version. To be called on the device lane: it is what keeps batches whole."""
        if network is not self._model.network:
            with torch.no_grad():
                for own, new in zip(self._model.network.parameters(), network.parameters(), strict=True):
                    own.copy_(new)
        self._weight_version = weight_version

    async def _answer(self, requests: list[_Request]) -> list[ActionChunk]:
        samplings = [request.sampling for request in requests]
        batch = await self._lane.prepare(self._model.prepare, [request.observation for request in requests])
        tokens, log_probs, version = await self._lane.run(self._act, batch, samplings, work="act")
        actions = self._model.decode(tokens)
        return [
            ActionChunk(actions=chunk, tokens=row, log_probs=row_log_probs, weight_version=version)
            for chunk, row, row_log_probs in zip(actions, tokens, log_probs, strict=True)
        ]

    def _act(self, batch: Any, samplings: Sequence[Sampling]) -> tuple[np.ndarray, np.ndarray, int]:
        with torch.inference_mode():
            tokens, log_probs = self._model.sample(batch, samplings)
        return tokens.cpu().numpy(), log_probs.float().cpu().numpy(), self._weight_version
