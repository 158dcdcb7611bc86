"""The learner's weights on their way from its thread to the engines' loop.

    device lane    adopt: write ──────────────────────────────┐
                   share ─► ranks write ─► adopt_shared ──────┤
    event loop              publish, in every engine or none ◄┘ ─► ServedVersion

The lane waits for the loop, unless the learner goes ahead. While the engines are not open, a version
is only stored.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from vla_rl.engines.shared_places import SharedPlaces
from vla_rl.engines.vllm.publication import Publication
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.served_version import ServedVersion
from vla_rl.engines.vllm.staging import StagedWeights
from vla_rl.errors import CheckpointError


class Adoption:
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

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Apply every version from now on, in this loop.

        Args: `tasks`, owns the application of a version that the learner does not wait for.
        """
        self._loop, self._tasks = asyncio.get_running_loop(), tasks

    def close(self) -> None:
        """Store later versions only."""
        self._loop = self._tasks = None

    def write(self, network: nn.Module, version: int) -> StagedWeights:
        """Write a version to memory that engines open. Raises: as `Publication.write`."""
        return self._publication.write(self._tensors(network), version)

    def adopt(self, network: nn.Module, version: int) -> None:
        """Apply weights and their version in all engines or in none: see `VllmEngine.adopt`."""
        self._wait_for_last()
        began = time.perf_counter()
        self._apply(self.write(network, version), began)

    def share(self, network: nn.Module, version: int) -> SharedPlaces | None:
        """Open memory for a version that other processes write: see `VllmEngine.share`."""
        self._wait_for_last()
        self._shared_began = time.perf_counter()
        found = self._publication.share(network, self._tensors(network), version)
        self._shared, places = found or (None, None)
        return places

    def adopt_shared(self, version: int) -> None:
        """Apply the version that `share` opened. Raises: CheckpointError if it is another one."""
        shared, self._shared = self._shared, None
        if shared is None or shared.version != version:
            found = "none" if shared is None else f"version {shared.version}"
            raise CheckpointError(f"{found} is shared, expected version {version}")
        self._apply(shared, self._shared_began)

    def _apply(self, staged: StagedWeights, began: float) -> None:
        loop, tasks = self._loop, self._tasks
        if loop is None or tasks is None:
            self._publication.current = staged
            self._version.note(staged.version)
            return
        begun = self._version.begin(staged.version, self._publish(staged, began), tasks)
        asyncio.run_coroutine_threadsafe(begun, loop).result()

    def _wait_for_last(self) -> None:
        """Wait on the device lane until the memory of the version before the last may be written."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._version.arrive(), self._loop).result()

    async def _publish(self, staged: StagedWeights, began: float) -> None:
        async with self._publication.turn:
            try:
                await self._publication.publish(staged, self._ready(), began)
            finally:
                assert self._publication.current is not None
                self._version.note(self._publication.current.version)
