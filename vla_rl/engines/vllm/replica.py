"""One engine process: start, requests, weights, checks, and its stop in whatever state.

    build ─► join: weights, first token ─► ready ─► dead          every exit stops the process

Callers that wait for a dead engine get `ActorDied` as soon as its socket or process is gone.
Callers that wait for a stopped engine get it within seconds; its process is killed then.
"""

import asyncio
import hashlib
import itertools
import threading
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vla_rl.engines.config import UpdateMode, VllmConfig
from vla_rl.engines.vllm import adapter
from vla_rl.engines.vllm.adapter import require_vllm
from vla_rl.engines.vllm.launch import TRANSFER_BACKEND, engine_arguments, engine_environment
from vla_rl.engines.vllm.process import EngineLifecycle
from vla_rl.engines.vllm.served import (
    NO_RULES,
    Answer,
    EngineRequest,
    ReplyRules,
    ServedPolicy,
    engine_input,
    engine_parameters,
    generated_answer,
    pooled_answer,
)
from vla_rl.engines.vllm.staging import StagedWeights
from vla_rl.errors import ActorDied, CheckpointError
from vla_rl.types import Sampling
from vla_rl.util.stalls import note_progress, waiting
from vla_rl.util.tasks import run_in_thread

T = TypeVar("T")

_building = threading.Lock()
"""Engines are built one at a time: each needs the environment variables of this process for
itself."""

_names = itertools.count()

SHUTDOWN_S = 0.5


class EngineFault(RuntimeError):
    """An engine process answered with an exception of its own.

    It still runs; its caller has to decide whether it is usable.
    """


class Replica:
    """An engine process and its client. `build` starts it, with a thread of its own.

    Args:
        name: its name in messages.
        served: the policy.
        config: settings of engines.
        folder: checkpoint folder without weights, and place of its sockets.
        gpus: ids of its own GPUs, as in CUDA_VISIBLE_DEVICES; empty: those that this process sees.

    Attributes:
        name: name in messages.
        num_running: number of requests without an answer yet.
        weight_version: version of its weights; -1 before the first.
        died: set when it is dead.
        num_answers: number of answers since it started.
        is_asleep: true between `sleep` and `wake`.
    """

    def __init__(
        self,
        name: str,
        served: ServedPolicy,
        config: VllmConfig,
        folder: Path,
        gpus: tuple[str, ...] = (),
    ) -> None:
        self.name, self._layout, self._config = name, served.layout, config
        self._sample = served.sample_request()
        self._folder, self._gpus = folder, gpus
        # The learner's own: an engine in another one would sample from a distribution whose
        # log-probs the learner does not compute.
        self._dtype = str(next(served.network.parameters()).dtype).removeprefix("torch.")
        self.num_running = self.num_answers = 0
        self.weight_version = -1
        self._has_joined = self.is_asleep = False
        self._lifecycle = EngineLifecycle(name)
        self.died = self._lifecycle.died
        self._llm: Any = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the process has reported it."""
        return self._lifecycle.pid

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._has_joined and not self.died.is_set()

    @property
    def cause(self) -> str:
        """Cause of its death."""
        return self._lifecycle.cause

    @property
    def _client(self) -> Any:
        """vLLM's client of the running engine.

        Raises: ActorDied; its slot may have closed a dead engine since its caller saw it ready.
        """
        if self.died.is_set():
            raise self.make_exit_error()
        return self._llm

    async def build(self) -> None:
        """Start the process, without weights. Raises: ActorDied for any error."""
        self._lifecycle.start_watch()
        try:
            async with self._lifecycle.limit(self._config.startup_s):
                with waiting(f"engine {self.name!r}", on="its process to start"):
                    await self._lifecycle.start_processes(self._build)
                # Asked of the workers, since vLLM's client does not tell the ids of what it has
                # started.
                (pid,) = set(await self._call("process_id"))
                self._lifecycle.watch_process(pid)
        except TimeoutError as error:
            raise self._lifecycle.mark_overdue(
                f"did not start within startup_s = {self._config.startup_s}"
            ) from error
        except ActorDied:
            raise
        except Exception as error:  # any error here means that this engine cannot be used
            raise self.mark_dead(f"could not start: {error}") from error

    async def join(self, staged: StagedWeights) -> None:
        """Take weights, answer a test request, and become ready.

        Raises: ActorDied for any error.
        """
        try:
            # By the way of every update, so that a new engine cannot have weights that an update
            # would refuse.
            await self.stage(staged, verify=False)
            await self.apply_version(staged)
            await self.check_health()
        except (EngineFault, CheckpointError) as error:
            raise self.mark_dead(f"could not become ready: {error}", frozen=True) from error
        self._has_joined = True
        note_progress("engines started")

    async def answer_request(
        self,
        request: EngineRequest,
        sampling: Sampling,
        max_tokens: int = 1,
        rules: ReplyRules = NO_RULES,
    ) -> Answer:
        """Answer one request; cancelling the call aborts the request.

        Raises: ActorDied; EngineFault if it cannot answer this request; ValueError for input that
        vLLM does not accept.
        """
        # Unique in this process: vLLM keeps images by this name, and would show a request those of
        # another one.
        name = f"{self.name}-{next(_names)}"
        prompt = engine_input(request, self._layout.features, name)
        parameters = engine_parameters(self._layout, sampling, max_tokens, rules)
        is_pooling = self._layout.runner == "pooling"
        ask = self._client.encode if is_pooling else self._client.generate
        self.num_running += 1
        cancelled: asyncio.Timeout | None = None
        try:
            async with self._lifecycle.limit(None) as cancelled:
                async for output in ask(prompt, parameters, name):
                    last = output
        # vLLM raises this in every caller at once, without a cause; how the process ended is read
        # from the kernel.
        except adapter.EngineDeadError as error:
            raise self._lifecycle.mark_ended() from error
        except adapter.EngineGenerateError as error:
            raise _make_fault(self, error.__cause__ or error) from error
        except TimeoutError as error:
            if cancelled is None or not cancelled.expired():
                raise
            raise self.make_exit_error() from error
        finally:
            self.num_running -= 1
        self.num_answers += 1
        return pooled_answer(last, self._layout) if is_pooling else generated_answer(last)

    async def check_health(self) -> None:
        """Let it sample one token of a real prompt.

        Raises: ActorFrozen if it fails or takes too long; it is killed then.
        """
        try:
            async with self._lifecycle.limit(self._config.health_timeout_s):
                await self.answer_request(
                    self._sample, Sampling(greedy=True), self._layout.num_tokens or 1
                )
        except TimeoutError as error:
            raise self._lifecycle.mark_overdue(
                f"gave no token for {self._config.health_timeout_s} s"
            ) from error
        except (EngineFault, ValueError) as error:
            raise self.mark_dead(f"gave no token: {error}", frozen=True) from error

    async def stage(self, staged: StagedWeights, *, verify: bool) -> list[int]:
        """Let it map and check new weights while it goes on with the old ones.

        Return the CRC-32 that each worker sees.

        Raises: CheckpointError if they do not fit; ActorDied.
        """
        try:
            seen: list[int] = await self._call(
                "stage_weights", (msgspec.msgpack.encode(staged), verify)
            )
            return seen
        except EngineFault as error:
            raise CheckpointError(f"engine {self.name!r} rejects the weights: {error}") from error

    async def pause(self, mode: UpdateMode) -> None:
        """Start no new requests; running ones finish, freeze or are aborted, by `mode`.

        All caches are cleared.

        Raises: ActorDied; EngineFault.
        """
        if mode == "drain":
            await self._drain()
            return
        vllm_mode = {"keep": "keep", "restart": "abort"}[mode]
        await self._await(self._client.pause_generation(mode=vllm_mode, clear_cache=mode != "keep"))
        if mode == "keep":  # vLLM has to be told to read the frozen requests again
            await self._await(self._client.reset_prefix_cache(reset_running_requests=True))
            await self._await(self._client.reset_encoder_cache())

    async def apply_version(self, staged: StagedWeights) -> None:
        """Load staged weights.

        No request may be running, and no cache of older weights may be left.

        Raises: ActorDied; EngineFault, and then the weights may be half loaded.
        """
        await self._call("apply_weights", (staged.version,))
        await self._await(self._client.update_weight_version(str(staged.version)))
        self.weight_version = staged.version

    async def resume(self) -> None:
        """Continue with waiting requests. Raises: ActorDied; EngineFault."""
        await self._await(self._client.resume_generation())

    async def checksum(self) -> str:
        """Return a digest of its weights, in the layout of its kernels.

        Raises: ActorDied; EngineFault.
        """
        # In the layout of the kernels: a worker's packed weights are what acts, and a checksum of
        # what was sent would not show that packing failed.
        return _digest_parts(await self._await(self._client.compute_weight_checksums()))

    async def sleep(self) -> None:
        """Free the memory of weights and caches; it takes no requests until `wake`.

        Raises: ActorDied for any error.
        """
        # Before it sleeps: no request may be on its way to an engine without weights.
        self._has_joined, self.is_asleep = False, True
        try:
            await self._await(self._client.sleep(level=2))
        except EngineFault as error:
            raise self.mark_dead(f"could not go to sleep: {error}", frozen=True) from error

    async def wake(self) -> None:
        """Allocate memory again; call `join` next. Raises: ActorDied for any error."""
        try:
            await self._await(self._client.wake_up())
        except EngineFault as error:
            raise self.mark_dead(f"could not wake up: {error}", frozen=True) from error
        self.is_asleep = False

    def mark_dead(self, cause: str, *, frozen: bool = False) -> ActorDied:
        """Mark it as dead and return the error for callers.

        A frozen process is killed, so that it cannot answer later.
        """
        return self._lifecycle.mark_dead(cause, frozen=frozen)

    def make_exit_error(self) -> ActorDied:
        """Return the error that callers get from now on."""
        return self._lifecycle.make_exit_error()

    async def close(self) -> None:
        """Stop the process, gently if it still responds, and free what the client holds."""
        self.mark_dead("closed")
        # taken away first: a second close must not shut down the same client again
        llm, self._llm = self._llm, None
        if llm is not None:
            await run_in_thread(llm.shutdown, SHUTDOWN_S)
        await self._lifecycle.kill_and_release()

    def _build(self) -> None:
        build, _ = require_vllm()
        arguments = engine_arguments(
            self._folder, self._layout, self._config, build=build, dtype=self._dtype
        )
        with _building:
            # imported before the environment changes: what its import reads and sets is this process's
            llm, engine_args = adapter.AsyncLLM, adapter.AsyncEngineArgs
            transfer = adapter.WeightTransferConfig(backend=TRANSFER_BACKEND)
            with engine_environment(self._folder, self._config, self._gpus):
                self._llm = llm.from_engine_args(
                    engine_args(**arguments, weight_transfer_config=transfer)
                )

    async def _call(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return await self._await(self._client.collective_rpc(method, args=args))

    async def _drain(self) -> None:
        """Wait for running requests to be answered, which may take long."""
        # A limit of its own, because a long reply may rightly take minutes where an engine that
        # takes weights is stuck after two.
        limit_s = self._config.drain_timeout_s
        what = f"running requests did not end within drain_timeout_s = {limit_s:g} s"
        drained = self._client.pause_generation(mode="wait", clear_cache=True)
        await self._await(drained, limit_s, f"{what}; raise it, or use 'keep'")

    async def _await(
        self, call: Awaitable[T], limit_s: float | None = None, too_late: str = ""
    ) -> T:
        """Await an answer of the engine's bookkeeping, within `limit_s`.

        None: within `update_timeout_s`.

        Raises: ActorDied; ActorFrozen past the limit, with the cause `too_late`; EngineFault.
        """
        limit_s = self._config.update_timeout_s if limit_s is None else limit_s
        try:
            async with self._lifecycle.limit(limit_s):
                return await call
        except adapter.EngineDeadError as error:
            raise self._lifecycle.mark_ended() from error
        except TimeoutError as error:
            raise self._lifecycle.mark_overdue(
                too_late or f"did not answer for {limit_s} s"
            ) from error
        except Exception as error:  # vLLM turns any error of the process into a plain Exception
            raise _make_fault(self, error) from error


def _make_fault(replica: Replica, error: BaseException) -> EngineFault:
    return EngineFault(
        f"engine {replica.name!r} (pid {replica.pid}) answered with an error: {error}"
    )


def _digest_parts(parts: Iterable[Mapping[str, object]]) -> str:
    """Return one digest of the checksums that the parts of an engine report by tensor."""
    text = "\n".join(f"{name} {value}" for part in parts for name, value in sorted(part.items()))
    return hashlib.sha256(text.encode()).hexdigest()
