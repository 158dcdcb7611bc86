"""`ServerChatEngine`: replies from model servers that run elsewhere, with the learner's weights.

generate ─► ServerPool.answer ─► ModelServer.sample_reply ─► tokens, log-probs, versions
apply_weights (device lane) ─► checkpoint folder ─► ServerPool.publish
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from torch import nn

from vla_rl.engines.chat_interface import ChatEngineBase, Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.server.pool import ServerPool, WeightFolders
from vla_rl.engines.server.servers import ModelServer, ServerLost
from vla_rl.engines.vllm.served import (
    Answer,
    ReplyRules,
    ServedLanguage,
    join_answers,
    make_reply_rules,
)
from vla_rl.errors import ConfigError
from vla_rl.rollout import BatchStats
from vla_rl.types import Sampling


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

    # Both APIs ask for greedy replies by temperature 0, and then leave their log-probs unscaled: a
    # learner that took them for those of the request would find the reply off-policy.
    greedy_temperature = 1.0

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
        if served.layout.features is not None:
            raise ConfigError(
                "engine 'server' serves no policy that reads images, because its servers are not "
                "handed those of a conversation; take engine 'torch' or 'vllm'"
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
        self._folders = WeightFolders(served, servers.weights_folder)
        self._pool = ServerPool(servers, self._folders.probe_prompt, weight_version)
        # An empty module, because the learner compares an engine's network with its own to see
        # whether it must publish.
        self._network, self._no_network = served.network, nn.Module()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened_at = self._update_s = 0.0

    async def __aenter__(self) -> Self:
        """Give the policy's weights to all servers.

        Raises: ConfigError with the reason if one of them does not take them.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            folders = stack.enter_context(self._folders)
            self._pool.current = await self._lane.run(
                folders.write_version, self._network, self.weight_version, work="publish"
            )
            await stack.enter_async_context(self._pool)
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
        return self._pool.weight_version

    @property
    def network(self) -> nn.Module:
        """None: the weights that reply are on servers, and never the learner's own."""
        return self._no_network

    @property
    def takes_requests(self) -> bool:
        """Whether requests are sent now; during a weight update they wait."""
        return not self._pool.is_paused

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight update and the number of servers that reply."""
        figures = {"engine/num_ready": float(len(self._pool.ready()))}
        if self._pool.num_updates:
            figures |= {
                "engine/update_pause_s": self._pool.pause_s,
                "engine/update_total_s": self._update_s,
            }
        return figures

    def stats(self) -> BatchStats:
        """Return the number of requests and the share of the time with at least one running."""
        loop = self._loop
        now = loop.time() if loop is not None else self._opened_at
        return self._pool.stats(now, self._opened_at)

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Give weights and their version to the servers.

        Call it on the device lane, which waits for it. A server that cannot load them is lost and
        takes no requests; it is tried again. While the engine is not open, the weights are kept for
        its opening.

        Raises: CheckpointError if no server took them.
        """
        began = time.perf_counter()
        if self._loop is None:
            self._network, self._pool.weight_version = network, weight_version
            return
        weights = self._folders.write_version(network, weight_version)
        publishing = self._pool.publish(weights, weight_version)
        asyncio.run_coroutine_threadsafe(publishing, self._loop).result()
        self._update_s = time.perf_counter() - began

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        rules = make_reply_rules(asked, self._chat.stop_tokens)
        return join_answers(
            await self._ask(asked.tokens.tolist(), sampling, max_tokens, rules), rules
        )

    async def _ask(
        self, prompt: list[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Sequence[Answer]:
        """Return the parts of one reply: several if weight updates interrupted it."""
        pool, parts = self._pool, list[Answer]()

        async def ask(server: ModelServer) -> list[Answer] | None:
            updates = pool.num_updates
            # An interrupted reply goes on from its tokens so far, at whichever server: each keeps
            # the version that it was sampled with.
            done = [token for part in parts for token in part.tokens.tolist()]
            left = max_tokens - len(done)
            part = await server.sample_reply([*prompt, *done], sampling, left, rules)
            parts.append(part)
            if not part.is_aborted or len(part.tokens) >= left:
                return parts
            if not pool.is_paused and updates == pool.num_updates:
                # somebody else aborted it: counted as a loss, so that it is not for ever
                raise ServerLost(server.url, "it aborted a request that we did not interrupt")
            return None

        return await pool.answer(ask)
