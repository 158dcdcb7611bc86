"""One simulator process as its owner sees it: what it holds, how often it was used, whether it still lives."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from vla_rl.actors import Runtime
from vla_rl.actors.interpreter import check_interpreter
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.simulation.checked import EnvDescription
from vla_rl.simulation.config import SimulatorConfig
from vla_rl.simulation.layout import Packed
from vla_rl.simulation.memory import private_mb
from vla_rl.simulation.worker import EnvWorker
from vla_rl.types import EnvSpec, Info

T = TypeVar("T")


class SimulatorProcess:
    """A child process with one `EnvWorker`. Made by `start`; whoever made it awaits `stop` in the end.

    Calls of `worker` go through `ask`, or tell `remember` what they raise, so that `held` and `death` stay true.
    """

    def __init__(self, runtime: Runtime, worker: EnvWorker, name: str, config: SimulatorConfig) -> None:
        self.worker = worker
        self.name = name
        self.pid = runtime.info(worker).pid
        self.num_episodes = 0
        self.description: EnvDescription | None = None
        self.death: ActorDied | None = None
        self._held: EnvSpec | None = None
        self._is_stopped = False
        self._runtime = runtime
        self._reset_timeout_s = config.reset_timeout_s

    @classmethod
    async def start(
        cls, runtime: Runtime, name: str, config: SimulatorConfig, index: int = 0, specs: Sequence[EnvSpec] = ()
    ) -> "SimulatorProcess":
        """Start a process and wait until it is up.

        Args:
            runtime, name, config: its owner, its name, its limits.
            index: its number among those of the same pool.
            specs: environments that those will play, as far as that is known, for whoever forks them to prepare.

        Raises: ActorDied where it does not come up in time; EnvError where an environment cannot be prepared;
            ConfigError for an interpreter that will not do.
        """
        await cls.prepare(runtime, config, specs)
        try:
            worker = await runtime.spawn(
                EnvWorker,
                name=name,
                placement=config.placement_of(index, specs),
                deadline_s=config.step_timeout_s,
                start_timeout_s=config.start_timeout_s,
            )
        except TimeoutError as error:
            raise ActorFrozen(name, 0, str(error)) from error
        return cls(runtime, worker, name, config)

    @staticmethod
    async def prepare(runtime: Runtime, config: SimulatorConfig, specs: Sequence[EnvSpec]) -> None:
        """Check the interpreter, and have the process ready that the others are forked from. Raises: see `start`."""
        if config.python is not None:
            await check_interpreter(config.python, {"gymnasium": "gymnasium"})
        try:
            await runtime.prepare(config.placement_of(0, specs))
        except ActorFrozen as error:
            raise EnvError(
                f"the environments were not prepared in time: {error}; raise prepare_timeout_s if they need longer"
            ) from error

    @property
    def held(self) -> EnvSpec | None:
        """The environment that is built and sound there."""
        return self._held

    async def open(self, spec: EnvSpec) -> EnvDescription:
        """Have the environment built, unless it is there already; what it takes and gives."""
        if self.description is None or self._held != spec:
            self._held = None
            self.description = await self._patiently("building the environment", self.worker.open(spec))
            self._held = spec
        return self.description

    async def reset(self, seed: int | None, options: dict[str, Any] | None, batch: int = 0) -> tuple[Packed, Info]:
        """Begin an episode; `batch` says where the observation is written, where its process has been given batches."""
        return await self._patiently("reset", self.worker.reset(seed, options, batch))

    async def ask(self, call: Awaitable[T]) -> T:
        """Await a call of `worker`, remembering what it raises: a broken environment is built anew, a death is final."""
        try:
            return await call
        except (ActorDied, EnvError) as error:
            self.remember(error)
            raise

    def remember(self, error: ActorDied | EnvError) -> None:
        """What a call of `worker` raised."""
        self._held = None
        if isinstance(error, ActorDied):
            self.death = error

    def is_alive(self) -> bool:
        """Whether the process runs, as far as its runtime knows."""
        return self.death is None and self._runtime.info(self.worker).state == "running"

    def private_mb(self) -> float:
        """Memory that the process holds for itself, in MiB; 0 where it is gone."""
        return private_mb(self.pid)

    async def stop(self) -> None:
        """Close the environment and end the process; one that does not answer is killed. Again does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.is_alive():
            await self._runtime.stop(self.worker)
        else:
            await self._runtime.kill(self.worker)

    async def _patiently(self, what: str, call: Awaitable[T]) -> T:
        """Await a call that may take as long as a reset; after that the process counts as frozen, and is killed."""
        try:
            async with asyncio.timeout(self._reset_timeout_s):
                return await self.ask(call)
        except TimeoutError:
            cause = f"{what} did not answer within {self._reset_timeout_s} s"
            self.death, self._held = ActorFrozen(self.name, self.pid, cause), None
            await self._runtime.kill(self.worker)
            raise self.death from None
