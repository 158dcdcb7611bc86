"""New weights on their way into all engines, or into none.

    device lane    apply_weights: write ──────────────────────┐
                   stage_shared ─► ranks write ─► apply_shared ──────┤
    event loop              publish, in every engine or none ◄┘ ─► ServedVersion

    stage    the learner's thread writes memory of both; every engine opens and checks it, generating on
             may be rejected
    pause    nothing new begins; what runs ends, freezes or is aborted
    apply    every engine loads; one that cannot is killed and starts again with the new weights
             may not be rejected
    resume   always, whatever happened; an engine that fails in any of the three is killed

The lane waits for the loop, unless the learner goes ahead. While the engines are not open, a version
is only stored.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from vla_rl.engines.config import UpdateMode, VllmConfig, WeightRoute
from vla_rl.engines.vllm.replica import EngineFault, Replica
from vla_rl.engines.vllm.staging import Stage, StagedWeights
from vla_rl.engines.weight_shards import SharedParameters
from vla_rl.errors import ActorDied, CheckpointError
from vla_rl.util.stalls import waiting


class ServedVersion:
    """The versions of one policy's engines. Owned by one event loop.

    Args: `version`, the one that they begin with.

    Attributes:
        now: version that all engines serve.
        pending: version that they will serve; `now` if none is on its way.
        applies_in_background: whether `start_applying` returns before a version is applied.
    """

    def __init__(self, version: int) -> None:
        self.now = self.pending = version
        self.applies_in_background = False
        self._applying: asyncio.Task[None] | None = None
        self._calls: list[Callable[[], None]] = []

    async def start_applying(
        self, version: int, applying: Coroutine[Any, Any, None], tasks: asyncio.TaskGroup
    ) -> None:
        """Apply a version; return once it is applied, or at once if the learner goes ahead.

        Args:
            version: its number.
            applying: applies it, and calls `mark_applied`.
            tasks: owns it if the learner goes ahead; an error is theirs then.
        """
        if not self.applies_in_background:
            await applying
            return
        # The learner computes its next update meanwhile, and the scheduler counts with this
        # version.
        self.pending = version
        self._applying = tasks.create_task(applying, name=f"weights {version} to the engines")

    async def wait_until_idle(self) -> None:
        """Wait until nothing is on its way."""
        if self._applying is not None:
            await asyncio.wait((self._applying,))

    def mark_applied(self, version: int) -> None:
        """Note that all engines serve this version."""
        self.now = self.pending = version
        for call in self._calls:
            call()

    def on_weights_applied(self, call: Callable[[], None]) -> None:
        """Call `call` each time that engines serve another version."""
        self._calls.append(call)


class UpdateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one publication, in seconds.

    Example:
        UpdateTimes(stage_s=0.039, pause_s=0.095)
    """

    stage_s: float
    """Time until every engine had mapped and checked the weights; generation went on."""

    pause_s: float
    """Time from the first engine's pause to the last engine's resumption."""

    @property
    def total_s(self) -> float:
        """Duration of the whole publication."""
        return self.stage_s + self.pause_s


class Publication:
    """The current weights, in memory that engines open, and their transfer to the engines.

    Attributes:
        turn: lock, held while engines' weights or caches change.
        awake: unset while the engines sleep; no engine is started then.
        current: weights that a new engine starts with; None before the first.
        times: durations of the last `KEPT_TIMES` publications to running engines.
    """

    KEPT_TIMES = 1000

    def __init__(self, config: VllmConfig, mode: UpdateMode, route: WeightRoute) -> None:
        self._config, self._mode, self._route = config, mode, route
        self._stage: Stage | None = None
        self.turn = asyncio.Lock()
        self.awake = asyncio.Event()
        # Set unless `sleep` was called: a build for CPUs never sleeps.
        self.awake.set()
        self.current: StagedWeights | None = None
        self.times: list[UpdateTimes] = []

    def write_version(self, tensors: Mapping[str, Tensor], version: int) -> StagedWeights:
        """Write a version to memory, beside the current one, which starting engines still read.

        Raises: CheckpointError, and then nothing was written; ConfigError if the configured memory
        is not available.
        """
        # Made with the first version, whose tensors say how large the memory is and on which
        # device.
        if self._stage is None:
            self._stage = Stage(tensors, self._route)
        return self._stage.write_version(tensors, version, self.current)

    def write_shared(
        self, network: nn.Module, tensors: Mapping[str, Tensor], version: int
    ) -> tuple[StagedWeights, SharedParameters] | None:
        """Let other processes write a version, as `Stage.write_shared`. Raises: as `write_version`."""
        if self._stage is None:
            self._stage = Stage(tensors, self._route)
        return self._stage.write_shared(network, tensors, version, self.current)

    # who waits            for                      woken by
    # `_accepted`          every engine             its answer or death; `update_timeout_s`
    # `pause`, in `drain`  running requests         their ends; `drain_timeout_s`, after which the engine is killed
    # `_wait_for_last`     `wait_until_idle`        the loop: the version before has been applied
    # an engine's start    `turn`                   the end of an update

    async def publish(
        self, staged: StagedWeights, replicas: Sequence[Replica], began: float
    ) -> None:
        """Apply a written version in all ready engines.

        `began` is the time at which writing it began.

        Raises: CheckpointError if an engine rejects it; then all engines go on with the weights
        they had.
        """
        with waiting(f"weights {staged.version}", on="the engines to accept them"):
            ready = await self._accepted(
                staged, [replica for replica in replicas if replica.is_ready]
            )
        # all that can be rejected was rejected: from here on, no engine may keep the old weights
        paused_at = time.perf_counter()
        try:
            with waiting(f"weights {staged.version}", on="the engines to apply them"):
                await run_in_each(ready, lambda replica: replica.pause(self._mode), "pause")
                await self._apply(staged, ready)
        finally:
            await run_in_each(ready, lambda replica: replica.resume(), "resume")
        resumed_at = time.perf_counter()
        times = UpdateTimes(stage_s=paused_at - began, pause_s=resumed_at - paused_at)
        self.times = [*self.times[1 - self.KEPT_TIMES :], times]

    async def checksums(self, replicas: Sequence[Replica]) -> dict[str, str]:
        """Return a digest of the weights that each ready engine holds, by its name.

        Equal weights have equal digests.
        """
        async with self.turn:
            return {
                replica.name: await replica.checksum() for replica in replicas if replica.is_ready
            }

    def free_memory(self) -> None:
        """Free the memory, and discard the weights."""
        if self._stage is not None:
            self._stage.free_buffers()
        self._stage = self.current = None

    async def _apply(self, staged: StagedWeights, replicas: Sequence[Replica]) -> None:
        """Load weights in all replicas.

        However this ends, `staged` is current; an engine without it, or half loaded, is killed.
        """
        try:
            await run_in_each(
                replicas,
                lambda replica: replica.apply_version(staged),
                f"apply the weights {staged.version}",
            )
        finally:
            # engines that have it cannot go back, so the others must not go on: they restart with it
            self.current = staged
            for replica in replicas:
                if replica.weight_version != staged.version and not replica.died.is_set():
                    replica.mark_dead(
                        f"was left with older weights than {staged.version}", frozen=True
                    )

    async def _accepted(self, staged: StagedWeights, replicas: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that are alive after all have mapped and checked the weights."""
        verify = self._config.verify_checksums
        # gathered with exceptions: one engine must not still be mapping memory that is written again
        outcomes = await asyncio.gather(
            *(replica.stage(staged, verify=verify) for replica in replicas), return_exceptions=True
        )
        assert self._stage is not None
        # In a thread: a CRC of gigabytes takes seconds, in which the loop has requests to answer.
        expected = await asyncio.to_thread(self._stage.checksum) if verify else 0
        accepted = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, ActorDied):
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            if set(outcome) != {expected}:
                raise CheckpointError(
                    f"engine {replica.name!r} sees weights with the CRC-32 {outcome}, expected "
                    f"{expected}; nothing was applied"
                )
            accepted.append(replica)
        return accepted


async def run_in_each(
    replicas: Sequence[Replica], act: Callable[[Replica], Awaitable[None]], what: str
) -> None:
    """Do the same in all living replicas at once.

    One that fails is killed, because its state is unknown; its slot replaces it.
    """

    async def act_or_end(replica: Replica) -> None:
        try:
            await act(replica)
        except ActorDied:
            return
        except EngineFault as error:
            replica.mark_dead(f"could not {what}: {error}", frozen=True)

    outcomes = await asyncio.gather(
        *(act_or_end(replica) for replica in replicas if not replica.died.is_set()),
        return_exceptions=True,
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


class WeightPublisher:
    """Takes versions on the device lane, and has the loop of the engines apply them.

    Args:
        tensors: returns what engines read of a network.
        publication: applies a version in engines; its owner closes it.
        version: gets the number of each version that the engines serve.
        ready: returns the engines that take requests now.
    """

    def __init__(
        self,
        tensors: Callable[[nn.Module], Mapping[str, Tensor]],
        publication: Publication,
        version: ServedVersion,
        ready: Callable[[], Sequence[Replica]],
    ) -> None:
        self._tensors, self._publication = tensors, publication
        self._version, self._ready = version, ready
        self._shared: StagedWeights | None = None
        self._shared_began = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def start_publishing(self, tasks: asyncio.TaskGroup) -> None:
        """Apply every version from now on, in this loop.

        Args: `tasks`, owns the application of a version that the learner does not wait for.
        """
        self._loop, self._tasks = asyncio.get_running_loop(), tasks

    def stop_publishing(self) -> None:
        """Store later versions only."""
        self._loop = self._tasks = None

    def write_version(self, network: nn.Module, version: int) -> StagedWeights:
        """Write a version to memory that engines open. Raises: as `Publication.write_version`."""
        return self._publication.write_version(self._tensors(network), version)

    def apply_weights(self, network: nn.Module, version: int) -> None:
        """Apply weights and their version in all engines or in none: see `VllmEngine.apply_weights`."""
        # There are two buffers. The one to be written may hold the version that engines are still
        # mapping.
        self._wait_for_last()
        began = time.perf_counter()
        self._apply(self.write_version(network, version), began)

    def stage_shared(self, network: nn.Module, version: int) -> SharedParameters | None:
        """Open memory for a version that other processes write: see `VllmEngine.stage_shared`."""
        self._wait_for_last()
        self._shared_began = time.perf_counter()
        found = self._publication.write_shared(network, self._tensors(network), version)
        self._shared, offsets = found or (None, None)
        return offsets

    def apply_shared(self, version: int) -> None:
        """Apply the version that `stage_shared` opened. Raises: CheckpointError if it is another one."""
        shared, self._shared = self._shared, None
        if shared is None or shared.version != version:
            found = "none" if shared is None else f"version {shared.version}"
            raise CheckpointError(f"{found} is shared, expected version {version}")
        self._apply(shared, self._shared_began)

    def _apply(self, staged: StagedWeights, began: float) -> None:
        loop, tasks = self._loop, self._tasks
        if loop is None or tasks is None:
            self._publication.current = staged
            self._version.mark_applied(staged.version)
            return
        applying = self._version.start_applying(staged.version, self._publish(staged, began), tasks)
        # The lane waits, because an update is published only once the engines have its weights;
        # where the learner goes ahead, `start_applying` returns at once.
        asyncio.run_coroutine_threadsafe(applying, loop).result()

    def _wait_for_last(self) -> None:
        """Wait on the device lane until the memory of the version before the last may be written."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._version.wait_until_idle(), self._loop).result()

    async def _publish(self, staged: StagedWeights, began: float) -> None:
        async with self._publication.turn:
            try:
                await self._publication.publish(staged, self._ready(), began)
            finally:
                assert self._publication.current is not None
                self._version.mark_applied(self._publication.current.version)
