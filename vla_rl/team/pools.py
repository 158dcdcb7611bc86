"""Environments of a run: simulators in their own processes, text environments in this one.

`chaos` kills and freezes simulators on purpose.
"""

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorPool
from vla_rl.envs.text import TextEnvPool, is_text_task
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.rollout import TaskStart
from vla_rl.types import EnvPool, EpisodeSpec


class RunPool(EnvPool, Protocol):
    """A pool that a run opens and whose metrics it reads."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        """Return metrics by path."""
        ...


class MixedPool:
    """Simulators and text environments as one pool; an episode leases one of its own kind.

    An episode waits for its kind even if the other kind is free, so let the starts take turns
    (`GroupSource.kinds`), or all running episodes may be of one kind.

    Args:
        simulators, text: pools, opened and closed by this one.
    """

    def __init__(self, simulators: SimulatorPool, text: TextEnvPool) -> None:
        self.simulators, self._text = simulators, text
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            # Text first: a task that is wrong is refused before simulators are started, which takes long.
            await stack.enter_async_context(self._text)
            await stack.enter_async_context(self.simulators)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open.__aexit__(kind, error, traceback)

    @property
    def num_envs(self) -> int:
        """Number of environments of both kinds together."""
        return self.simulators.num_envs + self._text.num_envs

    def lease(self, episode: EpisodeSpec) -> AbstractAsyncContextManager[Any]:
        """Lease an environment for this episode: a `TextEnv` for a text task, else a simulator."""
        return (
            self._text.lease(episode)
            if is_text_task(episode.env)
            else self.simulators.lease(episode)
        )

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of both pools."""
        return {**self.simulators.metrics(), **self._text.metrics()}


def make_pool(config: LearningConfig, runtime: Runtime, starts: Sequence[TaskStart]) -> RunPool:
    """Make the pool for a configuration.

    Raises: ConfigError if the configuration has no environments.
    """
    # Asked first: such a configuration is also of one of the kinds below.
    own: Any = config.make_own_pool(runtime)
    if own is not None:
        return own  # type: ignore[no-any-return]
    if isinstance(config, MixedTrainingConfig):
        text = [start.env for start in starts if is_text_task(start.env)]
        others = [start.env for start in starts if not is_text_task(start.env)]
        return MixedPool(
            SimulatorPool(runtime, config.simulators, specs=others), TextEnvPool(config.text, text)
        )
    specs = [start.env for start in starts]
    if isinstance(config, TextTrainingConfig):
        return TextEnvPool(config.text, specs)
    if isinstance(config, TrainingConfig):
        return SimulatorPool(runtime, config.simulators, specs=specs)
    raise ConfigError(
        f"a {type(config).__name__} has no settings for environments; use TrainingConfig for "
        "simulators, TextTrainingConfig for text environments, or MixedTrainingConfig for both"
    )


def start_kinds(starts: Sequence[TaskStart]) -> list[str]:
    """Return the kind of each start: `simulator` or `text`."""
    return ["text" if is_text_task(start.env) else "simulator" for start in starts]


def simulator_pids(pool: RunPool) -> list[int]:
    """Return the simulator processes that are running."""
    simulators = pool.simulators if isinstance(pool, MixedPool) else pool
    return simulators.pids if isinstance(simulators, SimulatorPool) else []


def describe_environments(config: LearningConfig) -> str:
    """Return the kind of environments in words, and where they are if not on this host."""
    if config.cluster.has_hosts:
        return f"{_describe_kind(config)} on each host"
    return _describe_kind(config)


def _describe_kind(config: LearningConfig) -> str:
    if isinstance(config, MixedTrainingConfig):
        return "simulators and text environments"
    return "text environments" if isinstance(config, TextTrainingConfig) else "simulators"


logger = logging.getLogger(__name__)


@asynccontextmanager
async def chaos(
    pids: Callable[[], Sequence[int]], every_s: float | None, seed: int
) -> AsyncIterator[None]:
    """While the context is open, repeatedly kill (SIGKILL) or freeze (SIGSTOP) one of `pids()`.

    Args:
        pids: returns the processes that are running.
        every_s: mean seconds between two faults, a Poisson process; None does nothing.
        seed: seed of the times, the processes and the kinds of faults.
    """
    if every_s is None:
        yield
        return
    breaking = asyncio.create_task(
        _break_simulators(pids, every_s, random.Random(seed)), name="chaos"
    )
    try:
        yield
    finally:
        breaking.cancel()
        await asyncio.wait((breaking,))
    if not breaking.cancelled():
        breaking.result()  # it ends by itself only if it failed


async def _break_simulators(
    pids: Callable[[], Sequence[int]], every_s: float, dice: random.Random
) -> None:
    while True:
        await asyncio.sleep(dice.expovariate(1.0 / every_s))
        if not (up := pids()):
            continue
        # Stopped as well as killed: a stopped process closes no connection, so that only the watch for
        # frozen processes can find it.
        pid, fault = dice.choice(up), dice.choice((signal.SIGKILL, signal.SIGSTOP))
        try:
            os.kill(pid, fault)
        except ProcessLookupError:  # it died meanwhile
            continue
        logger.warning("chaos: %s to simulator process %d", fault.name, pid)
