"""The in-process engine: it batches waiting requests, computes on the device lane, and records the
weight version of each answer.

`act` is for policies that choose action chunks, `generate` for language policies; the model's
methods decide.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import nn

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.conversations import Conversations
from vla_rl.engines.cuda_graphs import ReplayedModel
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.language_model import LanguageModel
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.errors import PolicyError
from vla_rl.rollout import BatchStats, DynamicBatcher
from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    Completion,
    Observation,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolSpec,
)


class _Request(msgspec.Struct, frozen=True):
    observation: Observation
    sampling: Sampling


class _Decisions(DynamicBatcher[_Request, ActionChunk]):
    """Batches of decisions, with one forward pass each."""

    def __init__(
        self,
        model: PolicyModel[Any],
        lane: DeviceLane,
        config: EngineConfig,
        version: Callable[[], int],
    ) -> None:
        self._model, self._lane, self._version = model, lane, version
        super().__init__(
            self._decide,
            max_batch=config.max_batch,
            max_wait_s=config.max_wait_s,
            deterministic=config.is_deterministic,
            name="policy",
        )

    async def _decide(self, requests: list[_Request]) -> list[ActionChunk]:
        samplings = [request.sampling for request in requests]
        batch = await self._lane.prepare(
            self._model.prepare, [request.observation for request in requests]
        )
        tokens, log_probs, version = await self._lane.run(self._act, batch, samplings, work="act")
        actions = self._model.decode(tokens)
        if actions.ndim != 3 or len(actions) != len(requests):
            raise PolicyError(
                f"{type(self._model).__name__}.decode gave {list(actions.shape)} for "
                f"{len(requests)} decisions, expected "
                f"[{len(requests)}, H, D]"
            )
        return [
            ActionChunk(actions=chunk, tokens=row, log_probs=row_log_probs, weight_version=version)
            for chunk, row, row_log_probs in zip(actions, tokens, log_probs, strict=True)
        ]

    def _act(self, batch: Any, samplings: Sequence[Sampling]) -> tuple[np.ndarray, np.ndarray, int]:
        with torch.inference_mode():
            tokens, log_probs = self._model.sample(batch, samplings)
        return tokens.cpu().numpy(), log_probs.float().cpu().numpy(), self._version()


class TorchEngine:
    """Answers `act` or `generate` calls of any number of episodes with one policy model.

    Owned by `async with`. Invariant: weights and version change together, on the device lane and
    between batches, so every chunk of a batch comes from exactly the weights that its
    `weight_version` names.

    Args:
        model: the policy; either the learner's own model (then nothing is copied) or a copy of it.
        lane: runs the model; shared with the learner.
        config: batching. weight_version: number of updates already applied to the weights of
            `model`.
    """

    def __init__(
        self,
        model: PolicyModel[Any] | LanguageModel[Any],
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
    ) -> None:
        self._network, self._weight_version, self._lane = model.network, weight_version, lane
        self._answering: _Decisions | Conversations
        self._replayed: ReplayedModel | None = None
        if isinstance(model, LanguageModel):
            self._answering = Conversations(model, lane, config, lambda: self._weight_version)
        else:
            self._replayed = (
                model if isinstance(model, ReplayedModel) and _is_on_gpu(model.network) else None
            )
            if self._replayed is not None:
                self._replayed.replay_acting(config.cuda_graphs)
            self._answering = _Decisions(model, lane, config, lambda: self._weight_version)

    async def __aenter__(self) -> Self:
        await self._answering.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._answering.__aexit__(kind, error, traceback)
        finally:
            # recordings hold GPU memory; a batch whose caller left may still replay one
            if self._replayed is not None:
                await self._lane.run(self._replayed.replay_acting, False, work="act")

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._weight_version

    @property
    def network(self) -> nn.Module:
        """The weights that act."""
        return self._network

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; waits for its batch.

        Raises: ValueError if the observation does not suit the policy, for every request of its
        batch. TypeError for a language policy.
        """
        if isinstance(self._answering, Conversations):
            raise TypeError(
                "this engine's policy generates text and has no `act`; use "
                "`generate`, as chat_agent does"
            )
        return await self._answering.submit(_Request(observation, sampling or Sampling()))

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply in the running batch. Cancelling the call aborts the reply.

        Args:
            prompt: the conversation so far, or text or tokens to continue.
            tools: tools that the prompt describes to the policy.
            sampling: temperature, or greedy, and the seed of all tokens of this reply.
            max_tokens: maximum number of tokens of the reply; at most `EngineConfig.max_reply`.
            options: form of the reply, stop texts, and what is reported with it.

        Raises: ContextOverflow if the prompt leaves no room for a reply; ValueError for a prompt or
        options that the model cannot take; TypeError for a policy over action chunks.
        """
        if not isinstance(self._answering, Conversations):
            raise TypeError(
                "this engine's policy chooses action chunks and does not generate text; use `act`"
            )
        return await self._answering.generate(
            prompt, tuple(tools), sampling or Sampling(), max_tokens, options
        )

    def stats(self) -> BatchStats:
        """Return batch sizes, waiting times, and the share of the time in which a batch was
        running.
        """
        return self._answering.stats()

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and their version.

        Call it on the device lane, so that no batch sees two versions.
        """
        if network is not self._network:
            with torch.no_grad():
                for own, new in zip(self._network.parameters(), network.parameters(), strict=True):
                    own.copy_(new)
        self._weight_version = weight_version


def _is_on_gpu(network: nn.Module) -> bool:
    return next(network.parameters()).device.type == "cuda"
