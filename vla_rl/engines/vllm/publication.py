"""New weights, applied in all engines or in none.

stage    the learner's thread writes memory of both; every engine opens and checks it, generating on
         may be rejected
pause    nothing new begins; what runs ends, freezes or is aborted
apply    every engine loads; one that cannot is killed and starts again with the new weights
         may not be
resume   always, whatever happened; an engine that fails in any of the three is killed
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from torch import Tensor, nn

from vla_rl.actors.waits import waiting
from vla_rl.engines.shared_places import SharedPlaces
from vla_rl.engines.vllm.config import UpdateMode, VllmConfig, WeightRoute
from vla_rl.engines.vllm.replica import EngineFault, Replica
from vla_rl.engines.vllm.staging import Stage, StagedWeights
from vla_rl.errors import ActorDied, CheckpointError


class UpdateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one publication, in seconds."""

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
        self.awake.set()
        self.current: StagedWeights | None = None
        self.times: list[UpdateTimes] = []

    def write(self, tensors: Mapping[str, Tensor], version: int) -> StagedWeights:
        """Write a version to memory, beside the current one, which starting engines still read.

        Raises: CheckpointError, and then nothing was written; ConfigError if the configured memory
        is not available.
        """
        if self._stage is None:
            self._stage = Stage(tensors, self._route)
        return self._stage.write(tensors, version, self.current)

    def share(
        self, network: nn.Module, tensors: Mapping[str, Tensor], version: int
    ) -> tuple[StagedWeights, SharedPlaces] | None:
        """Let other processes write a version, as `Stage.share`. Raises: as `write`."""
        if self._stage is None:
            self._stage = Stage(tensors, self._route)
        return self._stage.share(network, tensors, version, self.current)

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
                await each_or_end(ready, lambda replica: replica.pause(self._mode), "pause")
                await self._apply(staged, ready)
        finally:
            await each_or_end(ready, lambda replica: replica.resume(), "resume")
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

    def close(self) -> None:
        """Free the memory, and discard the weights."""
        if self._stage is not None:
            self._stage.close()
        self._stage = self.current = None

    async def _apply(self, staged: StagedWeights, replicas: Sequence[Replica]) -> None:
        """Load weights in all replicas.

        However this ends, `staged` is current; an engine without it, or half loaded, is killed.
        """
        try:
            await each_or_end(
                replicas,
                lambda replica: replica.apply(staged),
                f"apply the weights {staged.version}",
            )
        finally:
            # engines that have it cannot go back, so the others must not go on: they restart with it
            self.current = staged
            for replica in replicas:
                if replica.weight_version != staged.version and not replica.died.is_set():
                    replica.note_death(
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


async def each_or_end(
    replicas: Sequence[Replica], act: Callable[[Replica], Awaitable[None]], what: str
) -> None:
    """Do the same in all living replicas at once.

    One that fails is killed, because its state is unknown; its keeper replaces it.
    """

    async def act_or_end(replica: Replica) -> None:
        try:
            await act(replica)
        except ActorDied:
            return
        except EngineFault as error:
            replica.note_death(f"could not {what}: {error}", frozen=True)

    outcomes = await asyncio.gather(
        *(act_or_end(replica) for replica in replicas if not replica.died.is_set()),
        return_exceptions=True,
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
