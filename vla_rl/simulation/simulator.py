"""One environment's place in a simulator process, as whoever plays it sees it."""

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
    """Knows what is built and sound in its place. Calls of the process's worker go through `ask`, or tell `remember` what
    they raise, so that this stays true.

    Args:
        process: where it lives, alone or beside others.
        index: its number there, which every call of the worker begins with.
    """

    def __init__(self, process: "SimulatorProcess", index: int) -> None:
        self.process, self.index = process, index
        self.worker = process.worker
        self._held: EnvSpec | None = None
        self._description: EnvDescription | None = None

    @property
    def held(self) -> EnvSpec | None:
        """The environment that is built and sound here."""
        return self._held if self.process.death is None else None

    async def open(self, spec: EnvSpec) -> EnvDescription:
        """Have the environment built, unless it is here already; what it takes and gives."""
        if self._description is None or self.held != spec:
            self._held = None
            self.process.note_opening(spec)
            self._description = await self.ask(self.worker.open(self.index, spec))
            self._held = spec
        return self._description

    async def reset(self, seed: int | None, options: dict[str, Any] | None, batch: int = 0) -> tuple[Packed, Info]:
        """Begin an episode; `batch` says where the observation is written, where its process has been given batches."""
        return await self.ask(self.worker.reset(self.index, seed, options, batch))

    async def ask(self, call: Awaitable[T]) -> T:
        """Await a call of the worker, remembering what it raises."""
        try:
            return await call
        except (ActorDied, EnvError) as error:
            self.remember(error)
            raise

    def remember(self, error: ActorDied | EnvError) -> None:
        """What a call raised: a broken environment is built anew, a death is final for all in the process."""
        self._held = None
        if isinstance(error, ActorDied):
            self.process.note_death(error)

    async def close(self) -> None:
        """Close the environment, and end the process where it lives there alone."""
        if len(self.process.simulators) == 1:
            await self.process.stop()
        elif self.process.is_alive():
            self._held = None
            await self.ask(self.worker.close_env(self.index))
