"""`VllmEngine`: the methods of `TorchEngine`, with vLLM in separate engine processes.

    act, generate ─► route ─► Replica ─► answer            the request of a dead replica goes to another one
    adopt (device lane) ─► stage ─► publish (loop) ─► every replica, or none
    keeper of each replica: start ─► health ─► death ─► start again, with the current weights

Invariant: a replica gets requests only while its weights are those of `weight_version`, so nothing
is sampled from weights without a version. Publications and newly started replicas take turns under
one lock.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import nn

from vla_rl.engines.chat_interface import Sampled, completion, question
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.vllm.adapter import require_grammars, require_plugin, require_vllm
from vla_rl.engines.vllm.engine_folder import engine_folder
from vla_rl.engines.vllm.keeper import Keeper
from vla_rl.engines.vllm.layout import refuse_heads_without_kernel, write_folder
from vla_rl.engines.vllm.publication import Publication, UpdateTimes, each_or_end
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.requests import NO_RULES, Answer, ReplyRules
from vla_rl.engines.vllm.served import EngineRequest, ServedActions, ServedLanguage
from vla_rl.engines.vllm.staging import StagedWeights
from vla_rl.errors import ActorDied, ConfigError, ContextOverflow
from vla_rl.rollout import BatchStats, DecisionGauge
from vla_rl.rollout.owned_tasks import leave
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

MAX_QUEUE = 4096
"""Maximum number of requests in progress; further callers wait."""


class VllmEngine:
    """Answers `act` or `generate` calls of any number of episodes with engine processes that hold
    copies of the weights.

    Owned by `async with`; opening it starts the engines one after another.

    Args:
        served: the policy, made by `vla_rl.models.serving.serve`.
        lane: prepares observations, and calls `adopt`; shared with the learner.
        config: `config.vllm` for the engines, and the limits of replies.
        weight_version: number of updates already applied to the weights of `served.network`.

    Raises: ConfigError if vLLM is missing, has an unsupported version, or cannot do what the
    configuration requires.
    """

    def __init__(
        self,
        served: ServedActions | ServedLanguage,
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
    ) -> None:
        build, _ = require_vllm()
        require_plugin()
        if config.vllm.can_sleep and build == "cpu":
            raise ConfigError(
                "VllmConfig.can_sleep is True, but a CPU build of vLLM cannot "
                "sleep; expected False here"
            )
        if config.is_deterministic:
            raise ConfigError(
                "EngineConfig.is_deterministic is True, expected False with engine 'vllm': what "
                "is computed together in an "
                "engine process depends on timing. Take engine 'torch' to reproduce a run bit by "
                "bit."
            )
        self._served, self._lane, self._config = served, lane, config
        self._layout = served.layout
        if build == "cpu":
            refuse_heads_without_kernel(self._layout)
        self._weight_version = weight_version
        self._remote = nn.Module()
        mode = config.vllm.update_mode or ("keep" if self._layout.num_tokens is None else "drain")
        is_on_host = build == "cpu" and config.vllm.weights_through == "auto"
        self._publication = Publication(
            config.vllm, mode, "host" if is_on_host else config.vllm.weights_through
        )
        self._gauge = DecisionGauge()
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._changed = asyncio.Event()
        self._homes: WeakKeyDictionary[asyncio.Task[Any], Replica] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._keepers: list[Keeper] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._caring: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened_at = 0.0

    async def __aenter__(self) -> Self:
        """Start all engines. Raises: ActorDied with the reason if one does not start."""
        loop = asyncio.get_running_loop()
        self._opened_at = loop.time()
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(engine_folder())
            write_folder(folder, self._layout)
            stack.callback(self._publication.close)
            if self._publication.current is None:
                network, version = self._served.network, self._weight_version
                self._publication.current = await self._lane.run(
                    self._write, network, version, work="publish"
                )
            self._loop = loop
            self._publication.awake.set()
            for _ in range(self._config.vllm.num_engines):
                keeper = Keeper(
                    lambda: self._new_replica(folder),
                    self._publication,
                    self._config.vllm,
                    self._wake_callers,
                )
                stack.push_async_callback(keeper.close)
                self._keepers.append(keeper)
                await keeper.open()
            self._tasks = asyncio.TaskGroup()
            await self._tasks.__aenter__()
            self._caring = [
                self._tasks.create_task(keeper.run(), name="vllm engine")
                for keeper in self._keepers
            ]
            self._resources = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop all engines; callers that still wait get a RuntimeError or `ActorDied`."""
        self._loop = None
        assert self._tasks is not None
        for task in self._caring:
            task.cancel()
        try:
            await leave(self._tasks, kind, error, traceback)
        finally:
            async with self._publication.turn:  # a started update has to finish first
                await self._resources.aclose()
                self._keepers.clear()
            self._wake_callers()

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._weight_version

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are in other processes, and never the learner's own."""
        return self._remote

    @property
    def update_times(self) -> list[UpdateTimes]:
        """Times of the publications so far, in order."""
        return self._publication.times

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight update and of the engines' restarts."""
        figures = {
            "engine/num_ready": float(len(self._ready())),
            "engine/restarts": float(self.num_restarts),
        }
        if self.update_times:
            times = self.update_times[-1]
            figures |= {
                "engine/update_pause_s": times.pause_s,
                "engine/update_total_s": times.total_s,
            }
        return figures

    @property
    def num_restarts(self) -> int:
        """Number of engine restarts, over all engines."""
        return sum(keeper.num_restarts for keeper in self._keepers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that take requests now."""
        return [replica.pid for replica in self._ready()]

    @property
    def num_answers(self) -> dict[int, int]:
        """Number of requests that each engine which takes requests now has answered, by its process
        id.
        """
        return {replica.pid: replica.num_answers for replica in self._ready()}

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; all of its tokens come from the weights that its version names.

        Raises: ValueError if the observation does not suit the policy; ActorDied if engines died in
        all `attempts` at the request; TypeError for a language policy.
        """
        served: Any = self._served
        if self._layout.num_tokens is None:
            raise TypeError(
                "this engine's policy generates text and has no `act`; use "
                "`generate`, as chat_agent does"
            )
        request = await self._lane.prepare(served.request, observation)
        answer = await self._answer(
            request, sampling or Sampling(), self._layout.num_tokens, NO_RULES
        )
        return ActionChunk(
            actions=served.decode(answer.tokens),
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            weight_version=int(answer.versions[0]),
        )

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply. Cancelling the call aborts the reply.

        Args:
            prompt: the conversation so far, or text or tokens to continue.
            tools: tools that the prompt describes to the policy.
            sampling: temperature, or greedy, and the seed of all tokens of this reply.
            max_tokens: maximum number of tokens of the reply; at most `EngineConfig.max_reply`.
            options: form of the reply, stop texts, and what is reported with it.

        Raises: ContextOverflow if the prompt leaves no room for a reply; ValueError for a prompt or
        options that the model cannot take; ActorDied if engines died in all `attempts` at the
        request; TypeError for a policy over action chunks.
        """
        served: Any = self._served
        if self._layout.num_tokens is not None:
            raise TypeError(
                "this engine's policy chooses action chunks and does not generate text; use `act`"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, expected at least 1 token of a reply.")
        asked = await self._lane.prepare(question, served.chat, prompt, tuple(tools), options)
        if asked.grammar is not None:
            require_grammars()
        room = self._layout.context_size - len(asked.tokens)
        if room < 1:
            raise ContextOverflow(len(asked.tokens), self._layout.context_size)
        limit = min(room, max_tokens or self._config.max_reply, self._config.max_reply)
        rules = ReplyRules(
            stop_tokens=tuple(sorted(served.chat.stop_tokens)),
            stop=options.stop,
            grammar=asked.grammar,
            num_alternatives=options.top_log_probs or 0,
        )
        answer = await self._answer(
            EngineRequest(asked.tokens.tolist()), sampling or Sampling(), limit, rules
        )
        sampled = Sampled(
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            versions=answer.versions,
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
            stopped_by=answer.stopped_by,
            alternatives=[row[: rules.num_alternatives] for row in answer.alternatives],
        )
        return await self._lane.prepare(completion, served.chat, asked, sampled)

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Apply weights and their version in all engines or in none; call it on the device lane,
        which waits for it.

        While the engine is not open, they are only stored.

        Raises: CheckpointError if they are not weights of the policy that the engine was made for;
        then nothing is applied.
        """
        began = time.perf_counter()
        staged = self._write(network, weight_version)
        loop = self._loop
        if loop is None:
            self._publication.current, self._weight_version = staged, weight_version
            return
        asyncio.run_coroutine_threadsafe(self._publish(staged, began), loop).result()

    async def checksums(self) -> dict[str, str]:
        """Return a digest of the weights of each engine that takes requests now, by its name.

        Raises: ActorDied.
        """
        return await self._publication.checksums(self._ready())

    async def sleep(self) -> None:
        """Free the engines' memory of weights and caches on the GPU for the learner. Callers wait
        until `wake`.

        No engine is started before `wake`; one that is starting frees its memory when it is ready.

        Raises: ConfigError if `can_sleep` is off, as it has to be on CPUs.
        """
        self._require_sleep()
        async with self._publication.turn:
            self._publication.awake.clear()
            await each_or_end(self._ready(), lambda replica: replica.sleep(), "sleep")

    async def wake(self) -> None:
        """Let the engines allocate their memory again, and give them the current weights.

        Raises: ActorDied for an engine that could not wake up; the others are awake.
        """
        self._require_sleep()
        async with self._publication.turn:
            assert self._publication.current is not None
            errors = []
            for replica in [
                each.replica
                for each in self._keepers
                if each.replica is not None and each.replica.is_asleep
            ]:
                try:
                    await replica.wake()
                    await replica.join(self._publication.current)
                except ActorDied as error:  # its keeper replaces it
                    errors.append(error)
            self._publication.awake.set()
        self._wake_callers()
        if errors:
            raise errors[0]

    def stats(self) -> BatchStats:
        """Return the number of requests and the share of the time with at least one running. The
        engines decide what they batch.

        May be called from any thread; the share is 0 while the engine is not open.
        """
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

    async def _answer(
        self, request: EngineRequest, sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Repeat a request until an engine has answered it completely."""
        is_chunk = self._layout.num_tokens is not None
        clock = asyncio.get_running_loop().time
        deaths = 0
        async with self._room:
            self._gauge.enter(clock())
            try:
                while True:
                    replica = await self._route()
                    try:
                        answer = await replica.ask(request, sampling, max_tokens, rules)
                    except ActorDied:
                        deaths += 1
                        if deaths >= self._config.vllm.attempts:
                            raise
                        continue
                    if not answer.is_aborted and not (is_chunk and answer.is_mixed):
                        return answer
            finally:
                self._gauge.leave(clock())

    async def _route(self) -> Replica:
        """Return the replica to ask: the one with this conversation's keys and values, else the
        least loaded. Waits for one.

        Raises: ActorDied if no engine is started again any more; RuntimeError if the engine is not
        open.
        """
        while True:
            ready = self._ready()
            if ready:
                task = asyncio.current_task()
                home = self._homes.get(task) if task is not None else None
                if home not in ready or home is None:
                    home = min(ready, key=lambda replica: replica.num_running)
                if task is not None and self._layout.reuses_prefixes:
                    self._homes[task] = home
                return home
            if self._loop is None:
                raise RuntimeError("the vLLM engine is not open; ask inside its `async with` block")
            failures = [keeper.failure for keeper in self._keepers if keeper.failure is not None]
            if len(failures) == len(self._keepers):
                raise failures[0]
            self._changed.clear()
            await self._changed.wait()

    def _ready(self) -> list[Replica]:
        replicas = [keeper.replica for keeper in self._keepers]
        return [replica for replica in replicas if replica is not None and replica.is_ready]

    def _wake_callers(self) -> None:
        self._changed.set()

    def _new_replica(self, folder: Path) -> Replica:
        return Replica(f"vllm-{next(self._numbers)}", self._served, self._config.vllm, folder)

    def _write(self, network: nn.Module, version: int) -> StagedWeights:
        return self._publication.write(self._served.tensors(network), version)

    async def _publish(self, staged: StagedWeights, began: float) -> None:
        async with self._publication.turn:
            try:
                await self._publication.publish(staged, self._ready(), began)
            finally:
                assert self._publication.current is not None
                self._weight_version = self._publication.current.version

    def _require_sleep(self) -> None:
        if not self._config.vllm.can_sleep:
            raise ConfigError(
                "VllmConfig.can_sleep is False, so the engines keep their memory; expected True, "
                "on CUDA. A CPU build of "
                "vLLM cannot sleep."
            )
