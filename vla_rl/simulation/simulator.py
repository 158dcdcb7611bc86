"""One environment's place in a simulator process, as its user sees it."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from vla_rl.errors import ActorDied, EnvError
from vla_rl.simulation.checked import EnvDescription
from vla_rl.simulation.layout import Packed
from vla_rl.types import EnvSpec, Info

if TYPE_CHECKING:
    from vla_rl.simulation.process import SimulatorProcess

T = TypeVar("T")


class Simulator:
    """Records which environment is built and intact in its place. To keep that true, calls of the
    process's worker go through `ask`, or pass their errors to `remember`.

    Args:
        process: its process, which may have other environments too.
        index: its number there, the first argument of each call of the worker.
    """

    def __init__(self, process: "SimulatorProcess", index: int) -> None:
        self.process, self.index = process, index
        self.worker = process.worker
        self._held: EnvSpec | None = None
        self._description: EnvDescription | None = None

    @property
    def held(self) -> EnvSpec | None:
        """The environment that is built and intact here."""
        return self._held if self.process.death is None else None

    async def open(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is already open; return its description."""
        if self._description is None or self.held != spec:
            self._held = None
            self.process.note_opening(spec)
            self._description = await self.ask(self.worker.open(self.index, spec))
            self._held = spec
        return self._description

    async def reset(
        self, seed: int | None, options: dict[str, Any] | None, batch: int = 0
    ) -> tuple[Packed, Info]:
        """Begin an episode; `batch` is the number of the batch to write to, if its process shares
        batches.
        """
        return await self.ask(self.worker.reset(self.index, seed, options, batch))

    async def ask(self, call: Awaitable[T]) -> T:
        """Await a call of the worker, and record its error."""
        try:
            return await call
        except (ActorDied, EnvError) as error:
            self.remember(error)
            raise

    def remember(self, error: ActorDied | EnvError) -> None:
        """Record an error: a broken environment is built anew.

        A death is final for all environments in the process.
        """
        self._held = None
        if isinstance(error, ActorDied):
            self.process.note_death(error)

    async def close(self) -> None:
        """Close the environment, and end the process if it has no other environment."""
        if len(self.process.simulators) == 1:
            await self.process.stop()
        elif self.process.is_alive():
            self._held = None
            await self.ask(self.worker.close_env(self.index))
