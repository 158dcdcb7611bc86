"""`VllmEngine`: one policy's engine processes, with the weights that they hold.

    VllmActionEngine.act, VllmChatEngine.generate ─► ReplicaPool ─► Replica ─► answer
    apply_weights (device lane) ─► WeightPublisher ─► publish (loop) ─► every replica, or none
    EngineSlot of each replica: start ─► health ─► death ─► start again, with the current weights

Invariant: a replica gets requests only while its weights are those of `weight_version`, so nothing
is sampled from weights without a version. Publications and newly started replicas take turns under
one lock.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.vllm.adapter import require_plugin, require_vllm
from vla_rl.engines.vllm.launch import (
    assign_gpus,
    engine_folder,
    require_head_kernels,
    require_shareable,
    spread_engines,
    write_folder,
)
from vla_rl.engines.vllm.pool import EngineSlot, ReplicaPool
from vla_rl.engines.vllm.publication import (
    Publication,
    ServedVersion,
    UpdateTimes,
    WeightPublisher,
    run_in_each,
)
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.served import ServedPolicy
from vla_rl.engines.weight_shards import SharedParameters
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.rollout import BatchStats
from vla_rl.util.tasks import leave_group


class VllmEngine:
    """Engine processes that hold copies of one policy's weights; its two subclasses answer episodes.

    Owned by `async with`; opening it starts the engines one after another.

    Args:
        served: the policy, made by `vla_rl.models.vllm.serve`.
        lane: prepares observations, and calls `apply_weights`; shared with the learner.
        config: `config.vllm` for the engines, and the limits of replies.
        weight_version: number of updates already applied to the weights of `served.network`.
        gpus: ids of the GPUs that the engines share out, as in CUDA_VISIBLE_DEVICES; each gets
            `tensor_parallel_size` of its own. Empty: every engine sees what this process sees.

    Raises: ConfigError if vLLM is missing, has an unsupported version, or cannot do what the
    configuration requires.
    """

    def __init__(
        self,
        served: ServedPolicy,
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
        gpus: Sequence[str] = (),
    ) -> None:
        build, _ = require_vllm()
        require_plugin()
        require_shareable(served.layout, config.vllm.tensor_parallel_size)
        if config.vllm.can_sleep and build == "cpu":
            raise ConfigError(
                "VllmConfig.can_sleep is True, but a CPU build of vLLM cannot "
                "sleep; expected False here"
            )
        if config.is_deterministic:
            raise ConfigError(
                "EngineConfig.is_deterministic is True, expected False with engine 'vllm': what is "
                "computed together in an engine process depends on timing. Take engine 'torch' to "
                "reproduce a run bit by bit."
            )
        self._served, self._lane, self._config = served, lane, spread_engines(config, gpus)
        self._gpus = assign_gpus(self._config.vllm, gpus)
        self._layout = served.layout
        if build == "cpu":
            require_head_kernels(self._layout)
        self._version = ServedVersion(weight_version)
        # The learner looks whether an engine acts with its own network; these never do.
        self._no_network = nn.Module()
        mode = config.vllm.update_mode or ("keep" if self._layout.num_tokens is None else "drain")
        # A learner on a GPU beside a CPU build of vLLM: the engines could not open memory of the
        # GPU.
        is_on_host = build == "cpu" and config.vllm.weights_through == "auto"
        self._publication = Publication(
            config.vllm, mode, "host" if is_on_host else config.vllm.weights_through
        )
        self._numbers = itertools.count()
        self._slots: list[EngineSlot] = []
        self._pool = ReplicaPool(self._slots, self._layout, config.vllm.attempts)
        self._publisher = WeightPublisher(
            served.tensors, self._publication, self._version, self._pool.ready
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened_at = 0.0

    async def __aenter__(self) -> Self:
        """Start all engines. Raises: ActorDied with the reason if one does not start."""
        loop = asyncio.get_running_loop()
        self._opened_at = loop.time()
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(engine_folder())
            # Without weights: the engines start with random ones and get the learner's through
            # memory before their first answer, so that each start is one way for weights and not
            # two.
            write_folder(folder, self._layout)
            stack.callback(self._publication.free_memory)
            if self._publication.current is None:
                network, version = self._served.network, self.weight_version
                self._publication.current = await self._lane.run(
                    self._publisher.write_version, network, version, work="publish"
                )
            self._loop, self._pool.is_open = loop, True
            self._publication.awake.set()
            # One after the other: each start sets variables of this whole process, and reads
            # gigabytes.
            for gpus in self._gpus:
                slot = EngineSlot(
                    partial(self._new_replica, folder, gpus),
                    self._publication,
                    self._config.vllm,
                    self._pool.wake_callers,
                )
                stack.push_async_callback(slot.stop_engine)
                self._slots.append(slot)
                await slot.start_engine()
            self._tasks = asyncio.TaskGroup()
            await self._tasks.__aenter__()
            self._keeping = [
                self._tasks.create_task(slot.keep_running(), name="vllm engine")
                for slot in self._slots
            ]
            self._publisher.start_publishing(self._tasks)
            self._resources = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop all engines; callers that still wait get a RuntimeError or `ActorDied`."""
        self._loop, self._pool.is_open = None, False
        self._publisher.stop_publishing()
        assert self._tasks is not None
        for task in self._keeping:
            task.cancel()
        try:
            await leave_group(self._tasks, kind, error, traceback)
        finally:
            # Else an engine would be closed while it still reads the memory that is freed next.
            async with self._publication.turn:  # a started update has to finish first
                await self._resources.aclose()
                self._slots.clear()
            self._pool.wake_callers()

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the current weights."""
        return self._version.now

    @property
    def pending_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        return self._version.pending

    def apply_in_background(self) -> None:
        """Let `apply_weights` and `apply_shared` return before the engines have applied the weights.

        The learner's next update computes meanwhile. An error of the engines ends the `async with`
        block then, and the next version waits for this one.
        """
        self._version.applies_in_background = True

    async def wait_applied(self) -> None:
        """Wait until the engines have applied what they were given."""
        await self._version.wait_until_idle()

    def on_weights_applied(self, call: Callable[[], None]) -> None:
        """Call `call` in this loop each time that the engines serve other weights."""
        self._version.on_weights_applied(call)

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are in other processes, and never the learner's own."""
        return self._no_network

    @property
    def update_times(self) -> list[UpdateTimes]:
        """Times of the publications so far, in order."""
        return self._publication.times

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight update and of the engines' restarts."""
        figures = {
            "engine/num_ready": float(len(self._pool.ready())),
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
        return sum(slot.num_restarts for slot in self._slots)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that take requests now."""
        return [replica.pid for replica in self._pool.ready()]

    @property
    def num_answers(self) -> dict[int, int]:
        """Number of answers of each engine that takes requests now, by its process id."""
        return {replica.pid: replica.num_answers for replica in self._pool.ready()}

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Apply weights and their version in all engines or in none.

        Call it on the device lane, which waits for it, unless `apply_in_background` was called.

        While the engine is not open, they are only stored.

        Raises: CheckpointError if they are not weights of the policy that the engine was made for;
        then nothing is applied.
        """
        self._publisher.apply_weights(network, weight_version)

    def stage_shared(self, network: nn.Module, weight_version: int) -> SharedParameters | None:
        """Open memory for a version whose trained weights other processes write.

        Call it on the device lane. Engines go on with the weights that they have.

        Return where the trained weights go; None if they have no places of their own, such as
        adapters, or if the memory is on a GPU. Raises: CheckpointError as `apply_weights`.
        """
        return self._publisher.stage_shared(network, weight_version)

    def apply_shared(self, weight_version: int) -> None:
        """Apply the version that `stage_shared` opened in all engines or in none, as `apply_weights`."""
        self._publisher.apply_shared(weight_version)

    async def checksums(self) -> dict[str, str]:
        """Return a digest of the weights of each engine that takes requests now, by its name.

        Raises: ActorDied.
        """
        return await self._publication.checksums(self._pool.ready())

    async def sleep(self) -> None:
        """Free the engines' GPU memory for the learner. Callers wait until `wake`.

        It holds weights and caches.

        No engine is started before `wake`; one that is starting frees its memory when it is ready.

        Raises: ConfigError if `can_sleep` is off, as it has to be on CPUs.
        """
        self._require_sleep()
        async with self._publication.turn:
            self._publication.awake.clear()
            await run_in_each(self._pool.ready(), lambda replica: replica.sleep(), "sleep")

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
                for each in self._slots
                if each.replica is not None and each.replica.is_asleep
            ]:
                try:
                    await replica.wake()
                    await replica.join(self._publication.current)
                except ActorDied as error:  # its slot replaces it
                    errors.append(error)
            self._publication.awake.set()
        self._pool.wake_callers()
        if errors:
            # After all were tried: one engine that cannot wake must not keep the others asleep.
            raise errors[0]

    def stats(self) -> BatchStats:
        """Return the number of requests and the share of the time with at least one running.

        May be called from any thread; the share is 0 while the engine is not open.
        """
        loop = self._loop
        now = loop.time() if loop is not None else self._opened_at
        return self._pool.stats(now, self._opened_at)

    def _new_replica(self, folder: Path, gpus: tuple[str, ...]) -> Replica:
        name = f"vllm-{next(self._numbers)}"
        return Replica(name, self._served, self._config.vllm, folder, gpus)

    def _require_sleep(self) -> None:
        if not self._config.vllm.can_sleep:
            raise ConfigError(
                "VllmConfig.can_sleep is False, so the engines keep their memory; expected True, "
                "on CUDA. A CPU build of vLLM cannot sleep."
            )
