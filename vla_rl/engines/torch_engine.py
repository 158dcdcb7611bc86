"""Engines in this process: they batch waiting requests and compute on the device lane.

    TorchActionEngine   act        decisions, a batch per forward pass
    TorchChatEngine     generate   replies, token by token in a running batch

Both are a `TorchEngine`, which holds the weights and their version; `make_torch_engine` makes the one
that suits a model.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, overload

import msgspec
import torch
from torch import nn

from vla_rl.engines.chat_interface import ChatEngineBase, Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.cuda_graphs import ReplayedModel
from vla_rl.engines.device_lane import DeviceLane, to_host
from vla_rl.engines.policy_model import LanguageModel, PolicyModel, SampledTokens
from vla_rl.engines.reply_queue import ReplyQueue
from vla_rl.errors import PolicyError
from vla_rl.rollout import BatchStats, DynamicBatcher
from vla_rl.types import (
    ActionChunk,
    Observation,
    Sampling,
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
        sampled, version = await self._lane.run(self._act, batch, samplings, work="act")
        tokens, log_probs = sampled.tokens.numpy(), sampled.log_probs.numpy()
        drawn = {name: values.numpy() for name, values in sampled.drawn.items()}
        actions = self._model.decode(tokens if sampled.chunk is None else sampled.chunk.numpy())
        # A decoder of somebody's own that drops a row would hand each later episode the actions of
        # another.
        if actions.ndim != 3 or len(actions) != len(requests):
            raise PolicyError(
                f"{type(self._model).__name__}.decode gave {list(actions.shape)} for "
                f"{len(requests)} decisions, expected [{len(requests)}, H, D]"
            )
        return [
            ActionChunk(
                actions=actions[row],
                tokens=tokens[row],
                log_probs=log_probs[row],
                weight_version=version,
                # [row, ...]: a row of one number stays an array, as the wire wants it
                drawn={name: values[row, ...] for name, values in drawn.items()} or None,
            )
            for row in range(len(requests))
        ]

    def _act(self, batch: Any, samplings: Sequence[Sampling]) -> tuple[SampledTokens, int]:
        with torch.inference_mode():
            sampled = self._model.sample(batch, samplings)
            self._require_rows(sampled, len(samplings))
            # One copy for all, and the host waits for the device once for a batch.
            chunk = () if sampled.chunk is None else (sampled.chunk,)
            tokens, log_probs, *others = to_host(
                sampled.tokens, sampled.log_probs.float(), *sampled.drawn.values(), *chunk
            )
        drawn = dict(zip(sampled.drawn, others, strict=False))
        on_host = SampledTokens(tokens, log_probs, drawn, others[-1] if chunk else None)
        return on_host, self._version()

    def _require_rows(self, sampled: Any, num_rows: int) -> None:
        """Raise PolicyError unless a family's `sample` gave one row for each decision."""
        name = f"{type(self._model).__name__}.sample"
        if not isinstance(sampled, SampledTokens):
            raise PolicyError(
                f"{name} gave a {type(sampled).__name__}, expected "
                "vla_rl.engines.SampledTokens(tokens, log_probs)"
            )
        named = {"tokens": sampled.tokens, "log_probs": sampled.log_probs, **sampled.drawn}
        for field, values in named.items():
            if not values.ndim or len(values) != num_rows:
                raise PolicyError(
                    f"{name} gave {field} {list(values.shape)} for {num_rows} decisions, expected "
                    f"{num_rows} rows"
                )


class _Queue(Protocol):
    """Requests that wait for the model, and the task that runs them."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def batch_stats(self) -> BatchStats: ...


class TorchEngine:
    """The weights of one policy in this process, with their version. Owned by `async with`.

    Invariant: weights and version change together, on the device lane and between batches, so every
    answer of a batch comes from exactly the weights that its version names.
    """

    _queue: _Queue

    def __init__(self, network: nn.Module, lane: DeviceLane, weight_version: int) -> None:
        self._network, self._lane, self._weight_version = network, lane, weight_version

    async def __aenter__(self) -> Self:
        await self._queue.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._queue.__aexit__(kind, error, traceback)

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._weight_version

    @property
    def network(self) -> nn.Module:
        """The weights that act."""
        return self._network

    def stats(self) -> BatchStats:
        """Return batch sizes, waiting times, and the share of time in which a batch was running."""
        return self._queue.batch_stats()

    def metrics(self) -> dict[str, float]:
        """Return no metrics: an engine in this process has no restarts and no pauses."""
        return {}

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and their version.

        Call it on the device lane, so that no batch sees two versions.
        """
        # The engine may act with the learner's own network: then the optimizer's step was the
        # publication, and only the version changes.
        if network is not self._network:
            with torch.no_grad():
                for own, new in zip(self._network.parameters(), network.parameters(), strict=True):
                    own.copy_(new)
        self._weight_version = weight_version


class TorchActionEngine(TorchEngine):
    """The `ActionEngine` in this process.

    Args:
        model: the policy; either the learner's own model (then nothing is copied) or a copy of it.
        lane: runs the model; shared with the learner.
        config: batching. weight_version: number of updates already applied to the weights of
            `model`.
    """

    def __init__(
        self,
        model: PolicyModel[Any],
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
    ) -> None:
        super().__init__(model.network, lane, weight_version)
        self.token_ids: range | None = getattr(model, "token_ids", None)
        """Ids of the tokens that the policy chooses from; None if it does not name them."""
        self._replayed = (
            model if isinstance(model, ReplayedModel) and _is_on_gpu(model.network) else None
        )
        if self._replayed is not None:
            self._replayed.replay_acting(config.cuda_graphs)
        self._queue = self._decisions = _Decisions(
            model, lane, config, lambda: self._weight_version
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            # recordings hold GPU memory; a batch whose caller left may still replay one
            if self._replayed is not None:
                await self._lane.run(self._replayed.replay_acting, False, work="act")

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; waits for its batch.

        Raises: ValueError if the observation does not suit the policy, for every request of its
        batch.
        """
        return await self._decisions.submit(_Request(observation, sampling or Sampling()))


class TorchChatEngine(TorchEngine, ChatEngineBase):
    """The `ChatEngine` in this process.

    Args: those of `TorchActionEngine`, with a language model.
    """

    def __init__(
        self,
        model: LanguageModel[Any],
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
    ) -> None:
        TorchEngine.__init__(self, model.network, lane, weight_version)
        context_size = min(model.context_size, config.max_context or model.context_size)
        ChatEngineBase.__init__(self, model, lane, config, context_size)
        self._queue = self._conversations = ReplyQueue(
            model, lane, config, lambda: self._weight_version
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of prompt tokens that were not computed again."""
        return self._conversations.metrics()

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        return await self._conversations.sample(asked, sampling, max_tokens)


def engine_class(model: object) -> type[TorchActionEngine] | type[TorchChatEngine]:
    """Return the class of engine that suits a model: a language model replies, all others act."""
    return TorchChatEngine if isinstance(model, LanguageModel) else TorchActionEngine


@overload
def make_torch_engine(
    model: LanguageModel[Any], lane: DeviceLane, config: EngineConfig, weight_version: int = 0
) -> TorchChatEngine: ...
@overload
def make_torch_engine(
    model: PolicyModel[Any] | LanguageModel[Any],
    lane: DeviceLane,
    config: EngineConfig,
    weight_version: int = 0,
) -> TorchActionEngine | TorchChatEngine: ...
def make_torch_engine(
    model: Any, lane: DeviceLane, config: EngineConfig, weight_version: int = 0
) -> TorchActionEngine | TorchChatEngine:
    """Make the engine that suits a model whose kind is not known before."""
    return engine_class(model)(model, lane, config, weight_version)


def _is_on_gpu(network: nn.Module) -> bool:
    return next(network.parameters()).device.type == "cuda"
