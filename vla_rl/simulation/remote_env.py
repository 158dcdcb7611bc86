"""One environment's place in a simulator process, as its owner sees it."""

from collections.abc import Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from vla_rl.errors import ActorDied, EnvError
from vla_rl.simulation.checked import EnvDescription
from vla_rl.simulation.worker import EnvWorker
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from vla_rl.simulation.process import SimulatorProcess

T = TypeVar("T")


class RemoteEnv:
    """Records which environment is built and intact in its place.

        with env as worker:  # an EnvError or a death in here is recorded
            answer = await worker.render(env.index)

    To keep that true, all calls of the process's worker are made so.

    Args:
        process: its process, which may have other environments too.
        index: its number there, the first argument of each call of the worker.
    """

    def __init__(self, process: "SimulatorProcess", index: int) -> None:
        self.process, self.index, self.worker = process, index, process.worker
        self._held: EnvSpec | None = None
        self._description: EnvDescription | None = None

    def __enter__(self) -> EnvWorker:
        return self.worker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ActorDied | EnvError):
            self.note_error(error)

    @property
    def held(self) -> EnvSpec | None:
        """The environment that is built and intact here."""
        return self._held if self.process.death is None else None

    async def open(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is already open; return its description."""
        if self._description is None or self.held != spec:
            self._held = None
            self.process.note_opening(spec)
            with self as worker:
                self._description = await worker.open(self.index, spec)
            self._held = spec
        return self._description

    async def answered(self, call: Awaitable[T]) -> T:
        """Await a call of the worker whose errors are recorded: for calls that are awaited together
        with others.
        """
        with self:
            return await call

    def note_error(self, error: ActorDied | EnvError) -> None:
        """Record an error: a broken environment is built anew.

        A death is final for all environments in the process.
        """
        self._held = None
        if isinstance(error, ActorDied):
            self.process.note_death(error)

    async def close(self) -> None:
        """Close the environment, and end the process if it has no other environment."""
        if len(self.process.envs) == 1:
            await self.process.stop()
        elif self.process.is_alive():
            self._held = None
            with self as worker:
                await worker.close_env(self.index)
