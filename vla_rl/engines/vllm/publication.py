"""New weights for all engines or for none.

stage    the learner's thread writes memory of both; every engine opens and checks it, generating on      may be refused
pause    nothing new begins; what runs ends, freezes or is aborted
apply    every engine loads; one that cannot is killed and starts again with the new weights            may not be
resume   always, whatever happened; an engine that fails in any of the three is killed
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from torch import Tensor

from vla_rl.actors.waits import waiting
from vla_rl.engines.vllm.config import UpdateMode, VllmConfig, WeightRoute
from vla_rl.engines.vllm.replica import EngineFault, Replica
from vla_rl.engines.vllm.staging import Stage, StagedWeights
from vla_rl.errors import ActorDied, CheckpointError


class UpdateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one publication took."""

    stage_s: float
    """Until every engine had mapped and checked the weights; generation went on."""

    pause_s: float
    """From the first engine's pause to the last one's resumption."""

    @property
    def total_s(self) -> float:
        """Of the whole publication."""
        return self.stage_s + self.pause_s


class Publication:
    """The weights of now in memory that engines open, and how they reach engines.

    Attributes:
        turn: held by whoever changes what an engine computes with.
        awake: unset while the engines leave the GPU to the learner; none is started then.
        current: what a new engine starts with; None before the first.
        times: of every publication to running engines so far, the last `KEPT_TIMES`.
    """

    KEPT_TIMES = 1000

    def __init__(self, config: VllmConfig, mode: UpdateMode, route: WeightRoute) -> None:
        self._config, self._mode, self._route = config, mode, route
        self._stage: Stage | None = None
        self.turn = asyncio.Lock()
        self.awake = asyncio.Event()
        self.awake.set()
        self.current: StagedWeights | None = None
        self.times: list[UpdateTimes] = []

    def write(self, tensors: Mapping[str, Tensor], version: int) -> StagedWeights:
        """Put a version into that memory, beside the current one, which engines that start go on reading.

        Raises: CheckpointError, then nothing was written; ConfigError where that memory cannot be.
        """
        if self._stage is None:
            self._stage = Stage(tensors, self._route)
        return self._stage.write(tensors, version, self.current)

    async def publish(self, staged: StagedWeights, replicas: Sequence[Replica], began: float) -> None:
        """Give a written version to all engines that are ready; `began` is when it was begun to be written.

        Raises: CheckpointError where an engine refuses it; then all go on with the weights they had.
        """
        with waiting(f"weights {staged.version}", on="the engines to accept them"):
            ready = await self._accepted(staged, [replica for replica in replicas if replica.is_ready])
        paused_at = time.perf_counter()
        try:
            with waiting(f"weights {staged.version}", on="the engines to apply them"):
                await each_or_end(ready, lambda replica: replica.pause(self._mode), "pause")
                await self._apply(staged, ready)
        finally:
            await each_or_end(ready, lambda replica: replica.resume(), "resume")
        resumed_at = time.perf_counter()
        times = UpdateTimes(stage_s=paused_at - began, pause_s=resumed_at - paused_at)
        self.times = [*self.times[1 - self.KEPT_TIMES :], times]

    async def checksums(self, replicas: Sequence[Replica]) -> dict[str, str]:
        """A digest of the weights that each ready engine holds now, by its name; equal weights have equal digests."""
        async with self.turn:
            return {replica.name: await replica.checksum() for replica in replicas if replica.is_ready}

    def close(self) -> None:
        """Give the memory back, and forget the weights."""
        if self._stage is not None:
            self._stage.close()
        self._stage = self.current = None

    async def _apply(self, staged: StagedWeights, replicas: Sequence[Replica]) -> None:
        """Load weights. Whatever ends this, they are those of now: an engine without them, or half loaded, is ended."""
        try:
            await each_or_end(replicas, lambda replica: replica.apply(staged), f"apply the weights {staged.version}")
        finally:
            self.current = staged
            for replica in replicas:
                if replica.weight_version != staged.version and not replica.died.is_set():
                    replica.note_death(f"was left with older weights than {staged.version}", frozen=True)

    async def _accepted(self, staged: StagedWeights, replicas: Sequence[Replica]) -> list[Replica]:
        """Those that are alive once all of them have mapped and checked the weights."""
        verify = self._config.verify_checksums
        outcomes = await asyncio.gather(
            *(replica.stage(staged, verify=verify) for replica in replicas), return_exceptions=True
        )
        assert self._stage is not None
        expected = await asyncio.to_thread(self._stage.checksum) if verify else 0
        accepted = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, ActorDied):
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            if set(outcome) != {expected}:
                raise CheckpointError(
                    f"engine {replica.name!r} sees weights with the CRC-32 {outcome}, expected {expected}; nothing was "
                    "applied"
                )
            accepted.append(replica)
        return accepted


async def each_or_end(replicas: Sequence[Replica], act: Callable[[Replica], Awaitable[None]], what: str) -> None:
    """Do the same to all that are alive, together. One that cannot is ended: its state is unknown, its keeper sees to it."""

    async def act_or_end(replica: Replica) -> None:
        try:
            await act(replica)
        except ActorDied:
            return
        except EngineFault as error:
            replica.note_death(f"could not {what}: {error}", frozen=True)

    outcomes = await asyncio.gather(
        *(act_or_end(replica) for replica in replicas if not replica.died.is_set()), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
