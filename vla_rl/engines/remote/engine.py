"""`RemoteChatEngine`: replies from model servers that run elsewhere, and their weights.

    generate ─► least loaded server that is ready ─► tokens, log-probs, versions
    adopt (device lane) ─► checkpoint folder ─► running requests end ─► every server loads it ─► probe
    care: a server that was lost and answers again loads the newest weights, then takes requests

Invariant: a server takes requests only while its weights are those of `weight_version`, which its
log-probs of a few tokens have shown: servers that load nothing, half or other weights say nothing.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import aiohttp
import msgspec
import numpy as np
import torch
from torch import nn

from vla_rl.engines.atomic_folder import writing_folder
from vla_rl.engines.chat_interface import Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.remote.server import ModelServer
from vla_rl.engines.remote.sglang_server import SglangServer
from vla_rl.engines.remote.vllm_server import VllmServer
from vla_rl.engines.replying import ReplyingEngine
from vla_rl.engines.vllm.layout import write_folder
from vla_rl.engines.vllm.requests import Answer, ReplyRules
from vla_rl.engines.vllm.served import ServedLanguage
from vla_rl.errors import ActorDied, CheckpointError, ConfigError
from vla_rl.rollout import BatchStats, DecisionGauge
from vla_rl.rollout.owned_tasks import leave
from vla_rl.types import Sampling

logger = logging.getLogger(__name__)

MAX_QUEUE: Final = 4096
"""Maximum number of requests in progress; further callers wait."""

PROBE: Final = Sampling(temperature=0.7)
"""Sampling of the requests that compare a server with the learner; at 1 a server that ignores the
temperature would look right."""

NUM_PROBES: Final = 4

MAX_PROBE_GAP: Final = 0.2
"""Largest difference of log-probs that passes: bfloat16 stays below 0.1, other weights do not."""


class _Weights(NamedTuple):
    """One version of the weights, for servers."""

    folder: Path
    """A checkpoint that loads by itself."""

    probe: np.ndarray
    """float32 [V]: the log-probs of a short prompt's next token, at `PROBE`'s temperature."""


_KINDS: Final[dict[str, type[ModelServer]]] = {"vllm": VllmServer, "sglang": SglangServer}


class RemoteChatEngine(ReplyingEngine):
    """The `ChatEngine` of servers that run elsewhere.

    Owned by `async with`; opening it gives every server the policy's weights.

    Args:
        served: the language policy, made by `vla_rl.models.serving.serve`.
        lane: prepares conversations, and calls `adopt`; shared with the learner.
        config: `config.remote` for the servers, and the limits of replies.
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
        remote = config.remote
        if served.layout.num_tokens is not None:
            raise ConfigError(
                "engine 'remote' serves language policies; this policy chooses action chunks: take "
                "engine 'torch' or 'vllm'"
            )
        remote.require(bool(remote.urls), "urls", "at least one address, such as http://host:8000")
        if config.is_deterministic:
            raise ConfigError(
                "EngineConfig.is_deterministic is True, expected False with engine 'remote': what a "
                "server computes together depends on timing. Take engine 'torch'"
            )
        super().__init__(served.chat, lane, config, served.layout.context_size)
        self._served, self._config = served, remote
        self._weight_version, self._current = weight_version, _Weights(Path(), np.zeros(0))
        self._servers: list[ModelServer] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._network, self._elsewhere = served.network, nn.Module()
        self._num_written, self._num_updates = 0, 0
        self._pause_s = self._total_s = self._opened_at = 0.0
        self._turn, self._room = asyncio.Lock(), asyncio.Semaphore(MAX_QUEUE)
        self._open_gate, self._changed = asyncio.Event(), asyncio.Event()
        self._gauge = DecisionGauge()

    async def __aenter__(self) -> Self:
        """Give the policy's weights to all servers.

        Raises: ActorDied or ConfigError with the reason if one of them does not take them.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._folder = self._make_folder(stack)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers=self._headers(), connector=aiohttp.TCPConnector(limit=0)
                )
            )
            kind = _KINDS[self._config.api]
            self._servers = [kind(url, self._config, session) for url in self._config.urls]
            self._current = await self._lane.run(
                self._write, self._network, self._weight_version, work="publish"
            )
            await _all(server.open() for server in self._servers)
            await _all(self._join(server) for server in self._servers)
            self._tasks = asyncio.TaskGroup()
            await self._tasks.__aenter__()
            self._caring = self._tasks.create_task(self._care(), name="model servers")
            self._loop, self._opened_at = loop, loop.time()
            self._open_gate.set()
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
        self._caring.cancel()
        try:
            await leave(self._tasks, kind, error, traceback)
        finally:
            async with self._turn:  # a started update has to finish first
                for server in self._servers:
                    server.is_ready = False
                await self._resources.aclose()
            self._open_gate.set()
            self._changed.set()

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._weight_version

    @property
    def network(self) -> nn.Module:
        """None: the weights that reply are on servers, and never the learner's own."""
        return self._elsewhere

    @property
    def takes_requests(self) -> bool:
        """Whether requests are sent now; during a weight update they wait."""
        return self._open_gate.is_set()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight update and the number of servers that reply."""
        figures = {"engine/num_ready": float(len(self._ready()))}
        if self._num_updates:
            figures |= {
                "engine/update_pause_s": self._pause_s,
                "engine/update_total_s": self._total_s,
            }
        return figures

    def stats(self) -> BatchStats:
        """Return the number of requests and the share of the time with at least one running."""
        loop = self._loop
        now = loop.time() if loop is not None else self._opened_at
        elapsed = now - self._opened_at
        return BatchStats(
            num_batches=0,
            num_requests=self._gauge.num_decisions,
            busy_share=self._gauge.asked_s(now) / elapsed if elapsed > 0 else 0.0,
            num_queued=self._gauge.num_waiting,
            batch_sizes={},
        )

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Give weights and their version to the servers.

        Call it on the device lane, which waits for it. A server that cannot load them is lost and
        takes no requests; it is tried again. While the engine is not open, the weights are kept for its
        opening.

        Raises: CheckpointError if no server took them.
        """
        began = time.perf_counter()
        loop = self._loop
        if loop is None:
            self._network, self._weight_version = network, weight_version
            return
        weights = self._write(network, weight_version)
        asyncio.run_coroutine_threadsafe(
            self._publish(weights, weight_version, began), loop
        ).result()

    # ---- replies

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        rules = ReplyRules(
            stop_tokens=tuple(sorted(self._chat.stop_tokens)),
            stop=asked.options.stop,
            grammar=asked.grammar,
            num_alternatives=asked.options.top_log_probs or 0,
        )
        clock = asyncio.get_running_loop().time
        async with self._room:
            self._gauge.enter(clock())
            try:
                parts = await self._continued(asked.tokens.tolist(), sampling, max_tokens, rules)
            finally:
                self._gauge.leave(clock())
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
        parts: list[Answer] = []
        losses = 0
        while True:
            server = await self._route()
            updates = self._num_updates
            try:
                part = await server.sample(prompt, sampling, max_tokens, rules)
            except ActorDied:
                losses += 1
                if losses >= self._config.attempts:
                    raise
                continue
            finally:
                self._changed.set()
            parts.append(part)
            prompt = [*prompt, *part.tokens.tolist()]
            max_tokens -= len(part.tokens)
            if not part.is_aborted or max_tokens < 1:
                return parts
            if self._open_gate.is_set() and updates == self._num_updates:
                losses += 1  # aborted by somebody else: not for ever
                if losses >= self._config.attempts:
                    raise ActorDied(server.url, 0, "it aborted a request that we did not interrupt")

    async def _route(self) -> ModelServer:
        """Return the least loaded server; wait until one is ready and no update is on its way.

        Raises: ActorDied if none became ready within `request_timeout_s`.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                while True:
                    await self._open_gate.wait()
                    if self._loop is None:
                        raise RuntimeError(
                            "the remote engine is not open; ask inside its `async with`"
                        )
                    if ready := self._ready():
                        return min(ready, key=lambda server: server.num_running)
                    if limit.when() is None:
                        limit.reschedule(self._loop.time() + self._config.request_timeout_s)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            losses = [server.loss for server in self._servers if server.loss is not None]
            raise (losses or [ActorDied("servers", 0, "none became ready")])[-1] from error

    def _ready(self) -> list[ModelServer]:
        return [server for server in self._servers if server.is_ready]

    # ---- weights

    async def _publish(self, weights: _Weights, version: int, began: float) -> None:
        async with self._turn:
            before, self._current = self._current, weights
            self._open_gate.clear()
            paused_at = time.perf_counter()
            try:
                servers = self._ready()
                if self._config.update_mode == "interrupt":
                    await self._each(servers, lambda server: server.pause())
                await self._until_idle(servers)
                self._weight_version = version
                await self._each(servers, self._load)
            finally:
                self._num_updates += 1
                self._open_gate.set()
                self._changed.set()
                now = time.perf_counter()
                self._pause_s, self._total_s = now - paused_at, now - began
        await asyncio.to_thread(shutil.rmtree, before.folder, True)  # no server loads it any more
        if not self._ready():
            raise CheckpointError(
                f"no model server took the weights of version {version}: "
                + "; ".join(str(server.loss) for server in self._servers)
            )

    async def _each(
        self, servers: Sequence[ModelServer], act: Callable[[ModelServer], Awaitable[None]]
    ) -> None:
        """Act on the servers that are ready, side by side; one that fails is lost."""

        async def one(server: ModelServer) -> None:
            try:
                await act(server)
            except ActorDied:
                pass
            except (ConfigError, ValueError) as error:
                server.note_loss(str(error))

        await asyncio.gather(*(one(server) for server in servers if server.is_ready))

    async def _until_idle(self, servers: Sequence[ModelServer]) -> None:
        """Wait until the servers have answered; one that does not in time is lost."""
        limit_s = self._config.update_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(server.num_running for server in servers if server.is_ready):
                    self._changed.clear()
                    await self._changed.wait()
        for server in servers:
            if server.is_ready and server.num_running:
                server.note_loss(
                    f"{server.num_running} requests did not end within update_timeout_s = "
                    f"{limit_s:g} s"
                )

    async def _load(self, server: ModelServer) -> None:
        """Have a server load the current weights, and see in its log-probs that it has.

        Raises: ActorDied; ConfigError.
        """
        await server.load(self._current.folder, self._weight_version)
        if self._config.update_mode == "interrupt":
            await server.resume()
        prompt = self._served.sample_request().token_ids
        answers = await asyncio.gather(
            *(
                server.sample(prompt, msgspec.structs.replace(PROBE, seed=seed), 1, ReplyRules())
                for seed in range(NUM_PROBES)
            )
        )
        expected = self._current.probe
        gap = max(abs(expected[each.tokens[0]] - each.log_probs[0]) for each in answers)
        if not gap <= MAX_PROBE_GAP:
            raise ConfigError(
                f"{server.url} loaded weights {self._weight_version}, but its log-probs differ from "
                f"the learner's by {gap:.2f}, expected at most {MAX_PROBE_GAP}. Start a vLLM server "
                "with --logprobs-mode processed_logprobs; a CPU build of vLLM does not load new "
                "weights into an output head that is tied to the embedding"
            )

    async def _join(self, server: ModelServer) -> None:
        """Give a server that was just opened the current weights, then requests."""
        await self._load(server)
        server.is_ready = True
        self._changed.set()

    async def _care(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_every_s)
            await asyncio.gather(*(self._care_for(server) for server in self._servers))

    async def _care_for(self, server: ModelServer) -> None:
        try:
            if server.is_ready:
                await server.check()
                return
            await server.open()
            async with self._turn:
                await self._join(server)
            logger.warning("%s answers again, with weights %d", server.url, self._weight_version)
        except ActorDied:
            pass  # noted, and logged when it was lost
        except (ConfigError, ValueError) as error:
            server.note_loss(str(error))

    # ---- folders

    def _headers(self) -> dict[str, str]:
        name = self._config.key_variable
        if name is None:
            return {}
        key = os.environ.get(name)
        if not key:
            raise ConfigError(
                f"the environment variable {name} (engine.remote.key_variable) is not set; expected "
                "the servers' API key"
            )
        return {"Authorization": f"Bearer {key}"}

    def _make_folder(self, stack: AsyncExitStack) -> Path:
        """Return a folder of this engine's own, which is removed when the engine is closed."""
        parent = self._config.weights_folder
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="vla_rl-weights-", dir=parent)).absolute()
        except OSError as error:
            raise ConfigError(f"engine.remote.weights_folder cannot be written: {error}") from error
        folder.chmod(0o755)  # servers may belong to another user
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _write(self, network: nn.Module, version: int) -> _Weights:
        """Write a checkpoint folder that loads by itself. Raises: CheckpointError."""
        prompt = torch.tensor([self._served.sample_request().token_ids])
        with torch.inference_mode():
            logits = network(prompt.to(next(network.parameters()).device)).logits[0, -1].float()
            probe = torch.log_softmax(logits / PROBE.temperature, -1).cpu().numpy()
        tensors = {
            name: tensor.detach().cpu() for name, tensor in self._served.tensors(network).items()
        }
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._num_written += 1
        target = self._folder / f"version-{version}-{self._num_written}"
        with writing_folder(target, num_bytes) as writer:
            write_folder(writer.new_path("config.json").parent, self._served.layout)
            writer.write_tensors("model.safetensors", tensors)
        return _Weights(target, probe)


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, then raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if outcome is not None:
            raise outcome
