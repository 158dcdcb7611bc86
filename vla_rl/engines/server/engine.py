"""`ServerChatEngine`: replies from model servers that run elsewhere, with the learner's weights.

generate ─► ServerPool.route ─► ModelServer.sample_reply ─► tokens, log-probs, versions
apply_weights (device lane) ─► checkpoint folder ─► ServerPool.publish
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np
from torch import nn

from vla_rl.engines.chat_interface import ChatEngineBase, Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.server.pool import ServerPool, WeightFolders
from vla_rl.engines.server.servers import ServerLost
from vla_rl.engines.vllm.served import Answer, ReplyRules, ServedLanguage
from vla_rl.errors import ConfigError
from vla_rl.rollout import BatchStats, DecisionCounter
from vla_rl.types import Sampling

MAX_QUEUE: Final = 4096
"""Maximum number of requests in progress; further callers wait."""


class ServerChatEngine(ChatEngineBase):
    """The `ChatEngine` of servers that run elsewhere.

    Owned by `async with`; opening it gives every server the policy's weights.

    Args:
        served: the language policy, made by `vla_rl.models.vllm.serve`.
        lane: prepares conversations, and calls `apply_weights`; shared with the learner.
        config: `config.server` for the servers, and the limits of replies.
        weight_version: number of updates already applied to the weights of `served.network`.

    Raises: ConfigError for a policy over actions, and for a configuration without servers.
    """

    def __init__(
        self,
        served: ServedLanguage,
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
    ) -> None:
        servers = config.server
        if served.layout.num_tokens is not None:
            raise ConfigError(
                "engine 'server' serves language policies; this policy chooses action chunks: take "
                "engine 'torch' or 'vllm'"
            )
        servers.require(
            bool(servers.urls), "urls", "at least one address, such as http://host:8000"
        )
        if config.is_deterministic:
            raise ConfigError(
                "EngineConfig.is_deterministic is True, expected False with engine 'server': what a "
                "server computes together depends on timing. Take engine 'torch'"
            )
        super().__init__(served.chat, lane, config, served.layout.context_size)
        self._config, self._weight_version = servers, weight_version
        self._folders = WeightFolders(served, servers.weights_folder)
        self._network, self._no_network = served.network, nn.Module()
        self._pool: ServerPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened_at = self._update_s = 0.0
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._counter = DecisionCounter()

    async def __aenter__(self) -> Self:
        """Give the policy's weights to all servers.

        Raises: ConfigError with the reason if one of them does not take them.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            folders = stack.enter_context(self._folders)
            weights = await self._lane.run(
                folders.write_version, self._network, self._weight_version, work="publish"
            )
            pool = ServerPool(self._config, folders.probe_prompt, weights, self._weight_version)
            self._pool = await stack.enter_async_context(pool)
            self._loop, self._opened_at = loop, loop.time()
            self._resources = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the servers running; callers that still wait get a RuntimeError."""
        self._loop = None
        await self._resources.__aexit__(kind, error, traceback)

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._weight_version if self._loop is None else self._open_pool.weight_version

    @property
    def network(self) -> nn.Module:
        """None: the weights that reply are on servers, and never the learner's own."""
        return self._no_network

    @property
    def takes_requests(self) -> bool:
        """Whether requests are sent now; during a weight update they wait."""
        return self._open_pool.takes_requests

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight update and the number of servers that reply."""
        pool = self._open_pool
        figures = {"engine/num_ready": float(pool.num_ready)}
        if pool.num_updates:
            figures |= {
                "engine/update_pause_s": pool.pause_s,
                "engine/update_total_s": self._update_s,
            }
        return figures

    def stats(self) -> BatchStats:
        """Return the number of requests and the share of the time with at least one running."""
        loop = self._loop
        now = loop.time() if loop is not None else self._opened_at
        elapsed = now - self._opened_at
        return BatchStats(
            num_batches=0,
            num_requests=self._counter.num_decisions,
            busy_share=self._counter.asked_s(now) / elapsed if elapsed > 0 else 0.0,
            num_queued=self._counter.num_waiting,
            batch_sizes={},
        )

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Give weights and their version to the servers.

        Call it on the device lane, which waits for it. A server that cannot load them is lost and
        takes no requests; it is tried again. While the engine is not open, the weights are kept for
        its opening.

        Raises: CheckpointError if no server took them.
        """
        began = time.perf_counter()
        self._weight_version = weight_version
        if self._loop is None:
            self._network = network
            return
        weights = self._folders.write_version(network, weight_version)
        publishing = self._open_pool.publish(weights, weight_version)
        asyncio.run_coroutine_threadsafe(publishing, self._loop).result()
        self._update_s = time.perf_counter() - began

    @property
    def _open_pool(self) -> ServerPool:
        if self._pool is None:
            raise RuntimeError("the engine is not open; ask inside its `async with`")
        return self._pool

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        rules = ReplyRules(
            stop_tokens=tuple(sorted(self._chat.stop_tokens)),
            stop=asked.options.stop,
            grammar=asked.grammar,
            num_alternatives=asked.options.top_log_probs or 0,
        )
        clock = asyncio.get_running_loop().time
        async with self._room:
            self._counter.begin_decision(clock())
            try:
                parts = await self._continued(asked.tokens.tolist(), sampling, max_tokens, rules)
            finally:
                self._counter.end_decision(clock())
        return Sampled(
            tokens=np.concatenate([part.tokens for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish_reason="stop" if parts[-1].finish_reason == "stop" else "length",
            stopped_by=parts[-1].stopped_by,
            alternatives=[
                row[: rules.num_alternatives] for part in parts for row in part.alternatives
            ],
        )

    async def _continued(
        self, prompt: list[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Sequence[Answer]:
        """Return the parts of one reply: several if weight updates interrupted it."""
        pool, parts, losses = self._open_pool, list[Answer](), 0
        while True:
            server = await pool.route()
            updates = pool.num_updates
            try:
                part = await server.sample_reply(prompt, sampling, max_tokens, rules)
            except ServerLost:
                losses += 1
                if losses >= self._config.attempts:
                    raise
                continue
            finally:
                pool.wake_waiters()
            parts.append(part)
            prompt = [*prompt, *part.tokens.tolist()]
            max_tokens -= len(part.tokens)
            if not part.is_aborted or max_tokens < 1:
                return parts
            if pool.takes_requests and updates == pool.num_updates:
                losses += 1  # aborted by somebody else: not for ever
                if losses >= self._config.attempts:
                    raise ServerLost(server.url, "it aborted a request that we did not interrupt")
