"""One engine process: started, asked, given weights, checked, and ended whatever state it is in.

    build ─► join: weights, first token ─► ready ─► dead          each way out ends the process

Callers that wait for a dead engine get `ActorDied` as soon as its socket or process is gone. Those of a stopped one get it
within seconds, whatever they wait for; the process is killed then.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vla_rl.actors.completion import run_to_its_end
from vla_rl.actors.waits import note_progress, waiting
from vla_rl.engines.vllm.adapter import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    WeightTransferConfig,
    engine_environment,
    require_vllm,
)
from vla_rl.engines.vllm.config import UpdateMode, VllmConfig
from vla_rl.engines.vllm.engine_thread import EngineThread
from vla_rl.engines.vllm.layout import TRANSFER_BACKEND, engine_arguments
from vla_rl.engines.vllm.requests import (
    NO_RULES,
    Answer,
    ReplyRules,
    engine_input,
    engine_parameters,
    generated_answer,
    pooled_answer,
)
from vla_rl.engines.vllm.served import EngineRequest, ServedPolicy
from vla_rl.engines.vllm.staging import StagedWeights
from vla_rl.engines.vllm.watch import EngineWatch
from vla_rl.errors import ActorDied, ActorFrozen, CheckpointError
from vla_rl.types import Sampling

T = TypeVar("T")

_building = threading.Lock()
"""Engines are built one after another: each needs the process's environment variables for itself."""

_names = itertools.count()

SHUTDOWN_S = 0.5


class EngineFault(RuntimeError):
    """An engine process answered with an exception of its own; it lives on, in a state that only its caller can judge."""


class Replica:
    """An engine process and the client to it. Built by `build`, in a thread of its own.

    Attributes:
        name: for messages.
        num_running: requests that were asked and not answered.
        is_ready: it may be asked.
        weight_version: of the weights that it has; -1 before the first.
        died: set once it is gone.
        num_answers: given since it started.
        is_asleep: between `sleep` and `wake`.
        cause: of its death.
    """

    def __init__(self, name: str, served: ServedPolicy, config: VllmConfig, folder: Path) -> None:
        self.name, self._layout, self._config = name, served.layout, config
        self._sample = served.sample_request()
        self._folder = folder
        self._dtype = str(next(served.network.parameters()).dtype).removeprefix("torch.")
        self.num_running = self.num_answers = self.pid = 0
        self.weight_version = -1
        self.is_ready = self.is_asleep = False
        self.died = asyncio.Event()
        self.cause = "not started"
        self._thread = EngineThread(name)
        self._watch = EngineWatch(self._processes, self._note_frozen)
        self._pidfd: int | None = None
        self._llm: Any = None

    async def build(self) -> None:
        """Start the process, without weights yet. Raises: ActorDied, whatever the reason."""
        self._watch.start()
        try:
            async with self._watch.within(self._config.startup_s):
                with waiting(f"engine {self.name!r}", on="its process to start"):
                    await self._thread.run(self._build)
                (self.pid,) = await self._call("process_id")
                self._watch_process()
        except TimeoutError as error:
            raise self._overdue(f"did not start within startup_s = {self._config.startup_s}") from error
        except ActorDied:
            raise
        except Exception as error:  # whatever it is, this engine will not be one
            raise self.note_death(f"could not start: {error}") from error

    async def join(self, staged: StagedWeights) -> None:
        """Take weights, answer once, and be ready. Raises: ActorDied, whatever the reason."""
        try:
            await self.stage(staged, verify=False)
            await self.apply(staged)
            await self.check_health()
        except (EngineFault, CheckpointError) as error:
            raise self.note_death(f"could not begin: {error}", frozen=True) from error
        self.is_ready = True
        note_progress("engines started")

    async def ask(
        self, request: EngineRequest, sampling: Sampling, max_tokens: int = 1, rules: ReplyRules = NO_RULES
    ) -> Answer:
        """One answer; cancelling it aborts the request.

        Raises: ActorDied; EngineFault where it cannot answer this one; ValueError for what vLLM does not take.
        """
        name = f"{self.name}-{next(_names)}"
        prompt = engine_input(request, self._layout.features, name)
        parameters = engine_parameters(self._layout, sampling, max_tokens, rules)
        is_pooling = self._layout.runner == "pooling"
        if self.died.is_set():
            raise self.death()
        ask = self._llm.encode if is_pooling else self._llm.generate
        self.num_running += 1
        given_up: asyncio.Timeout | None = None
        try:
            async with self._watch.within(None) as given_up:
                async for output in ask(prompt, parameters, name):
                    last = output
        except EngineDeadError as error:
            raise self.note_death(self._how_it_ended()) from error
        except EngineGenerateError as error:
            raise self._fault(error.__cause__ or error) from error
        except TimeoutError as error:
            if given_up is None or not given_up.expired():
                raise
            raise self.death() from error
        finally:
            self.num_running -= 1
        self.num_answers += 1
        return pooled_answer(last, self._layout) if is_pooling else generated_answer(last)

    async def check_health(self) -> None:
        """Have it sample a token of a real prompt. Raises: ActorFrozen where it does not, in time or at all; killed then."""
        try:
            async with self._watch.within(self._config.health_timeout_s):
                await self.ask(self._sample, Sampling(greedy=True), self._layout.num_tokens or 1)
        except TimeoutError as error:
            raise self._overdue(f"gave no token for {self._config.health_timeout_s} s") from error
        except (EngineFault, ValueError) as error:
            raise self.note_death(f"gave no token: {error}", frozen=True) from error

    async def stage(self, staged: StagedWeights, *, verify: bool) -> list[int]:
        """Have it map and check new weights; it goes on with the old ones. Gives the CRC-32 that each worker sees.

        Raises: CheckpointError where they do not fit; ActorDied.
        """
        try:
            seen: list[int] = await self._call("stage_weights", (msgspec.msgpack.encode(staged), verify))
            return seen
        except EngineFault as error:
            raise CheckpointError(f"engine {self.name!r} refuses the weights: {error}") from error

    async def pause(self, mode: UpdateMode) -> None:
        """Let nothing begin from now on; what runs ends, is frozen or is aborted. All that was computed is forgotten.

        Raises: ActorDied; EngineFault.
        """
        if mode == "drain":
            await self._drain()
            return
        vllm_mode = {"keep": "keep", "restart": "abort"}[mode]
        await self._await(self._llm.pause_generation(mode=vllm_mode, clear_cache=mode != "keep"))
        if mode == "keep":  # there what runs has to be told to begin anew
            await self._await(self._llm.reset_prefix_cache(reset_running_requests=True))
            await self._await(self._llm.reset_encoder_cache())

    async def apply(self, staged: StagedWeights) -> None:
        """Load staged weights. Nothing may be running, nor kept of what older ones computed.

        Raises: ActorDied; EngineFault, then it may be half loaded.
        """
        await self._call("apply_weights", (staged.version,))
        await self._await(self._llm.update_weight_version(str(staged.version)))
        self.weight_version = staged.version

    async def resume(self) -> None:
        """Go on with what waits. Raises: ActorDied; EngineFault."""
        await self._await(self._llm.resume_generation())

    async def checksum(self) -> str:
        """A digest of the weights it holds, in its kernels' layout. Raises: ActorDied; EngineFault."""
        parts = await self._await(self._llm.compute_weight_checksums())
        text = "\n".join(f"{name} {value}" for part in parts for name, value in sorted(part.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    async def sleep(self) -> None:
        """Give the memory of weights and caches back; nothing may be asked until `wake`.

        Raises: ActorDied, whatever the reason.
        """
        self.is_ready, self.is_asleep = False, True
        try:
            await self._await(self._llm.sleep(level=2))
        except EngineFault as error:
            raise self.note_death(f"could not go to sleep: {error}", frozen=True) from error

    async def wake(self) -> None:
        """Take memory again; `join` has to follow. Raises: ActorDied, whatever the reason."""
        try:
            await self._await(self._llm.wake_up())
        except EngineFault as error:
            raise self.note_death(f"could not wake up: {error}", frozen=True) from error
        self.is_asleep = False

    def note_death(self, cause: str, *, frozen: bool = False) -> ActorDied:
        """It is not to be used any more; a frozen process is killed, so that nothing of it answers later."""
        if not self.died.is_set():
            self.cause, self.is_ready = cause, False
            self.died.set()
            self._watch.end()  # vLLM tells those who wait too, but only once it has cleaned up
        if frozen:
            self._kill()
        return ActorFrozen(self.name, self.pid, cause) if frozen else self.death()

    async def close(self) -> None:
        """End the process, politely if it still listens; give back what the client holds."""
        self.note_death("closed")
        llm, self._llm = self._llm, None
        if llm is not None:
            await run_to_its_end(llm.shutdown, SHUTDOWN_S)
        self._kill()
        await self._thread.close()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _watch_process(self) -> None:
        """Know of its end at once, by the descriptor that the kernel makes readable then."""
        self._pidfd = os.pidfd_open(self.pid)

        def ended() -> None:
            assert self._pidfd is not None
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self.note_death(self._how_it_ended())

        asyncio.get_running_loop().add_reader(self._pidfd, ended)

    def _how_it_ended(self) -> str:
        """As far as the system still knows; whoever reaps the process first is told alone."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) if self.pid else None
        except ChildProcessError:
            end = None
        if end is None:
            return "its process is gone"
        if end.si_code == os.CLD_EXITED:
            return f"its process ended with status {end.si_status}"
        return f"its process was killed by {signal.Signals(end.si_status).name}"

    def _build(self) -> None:
        build, _ = require_vllm()
        arguments = engine_arguments(self._folder, self._layout, self._config, build=build, dtype=self._dtype)
        with (
            _building,
            engine_environment(
                self._folder, self._config.num_threads, self._config.kv_cache_gib, self._config.startup_s
            ),
        ):
            transfer = WeightTransferConfig(backend=TRANSFER_BACKEND)
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, weight_transfer_config=transfer))

    async def _call(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return await self._await(self._llm.collective_rpc(method, args=args))

    async def _drain(self) -> None:
        """Wait for the answers that are being given, which may be long ones."""
        limit_s = self._config.drain_timeout_s
        what = f"what it was answering did not end within drain_timeout_s = {limit_s:g} s; raise it, or take 'keep'"
        await self._await(self._llm.pause_generation(mode="wait", clear_cache=True), limit_s, what)

    async def _await(self, call: Awaitable[T], limit_s: float | None = None, too_late: str = "") -> T:
        """What an engine's own bookkeeping answers, within `update_timeout_s` where no limit is given.

        Raises: ActorDied; ActorFrozen past the limit, saying `too_late`; EngineFault.
        """
        limit_s = self._config.update_timeout_s if limit_s is None else limit_s
        try:
            async with self._watch.within(limit_s):
                return await call
        except EngineDeadError as error:
            raise self.note_death(self._how_it_ended()) from error
        except TimeoutError as error:
            raise self._overdue(too_late or f"did not answer for {limit_s} s") from error
        except Exception as error:  # vLLM makes a plain one of whatever the process raised
            raise self._fault(error) from error

    def _overdue(self, cause: str) -> ActorDied:
        """The error after a deadline: the engine's death if it has died, else it is frozen and is killed now."""
        return self.death() if self.died.is_set() else self.note_death(cause, frozen=True)

    def _note_frozen(self, pid: int) -> None:
        self.note_death(f"its process {pid} was stopped by a signal such as SIGSTOP", frozen=True)

    def _processes(self) -> list[int]:
        """Pids to look at: the engine's, or until that is known those of all processes started for it."""
        return [self.pid] if self.pid else self._thread.processes()

    def _fault(self, error: BaseException) -> EngineFault:
        return EngineFault(f"engine {self.name!r} (pid {self.pid}) answered with an error: {error}")

    def death(self) -> ActorDied:
        """What whoever asks it from now on is told."""
        return ActorDied(self.name, self.pid, self.cause)

    def _kill(self) -> None:
        """By its descriptor: the number may be another process's by now."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._thread.kill()
