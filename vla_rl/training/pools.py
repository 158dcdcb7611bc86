"""Where a run's episodes are played: simulators in processes of their own, text environments in this one, or both."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from vla_rl.actors import Runtime
from vla_rl.envs.text import TextEnvPool, is_text_task
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig, MixedTrainingConfig, TextTrainingConfig, TrainingConfig
from vla_rl.rollout import TaskStart
from vla_rl.simulation import SimulatorPool
from vla_rl.types import EnvPool, EpisodeSpec


class RunPool(EnvPool, Protocol):
    """A pool that a run opens and asks for its figures."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        """By path."""
        ...


class MixedPool:
    """Simulators and text environments as one pool; each episode is played where its environment lives.

    An episode that finds its own kind all taken waits for it, though others may be free: let the starts take turns
    (`GroupSource.kinds`), so that neither kind has all the episodes.

    Args:
        simulators, text: opened and closed by this one.
    """

    def __init__(self, simulators: SimulatorPool, text: TextEnvPool) -> None:
        self.simulators, self._text = simulators, text
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._text)
            await stack.enter_async_context(self.simulators)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._open.__aexit__(kind, error, traceback)

    @property
    def num_envs(self) -> int:
        """Of both kinds together."""
        return self.simulators.num_envs + self._text.num_envs

    def lease(self, episode: EpisodeSpec) -> AbstractAsyncContextManager[Any]:
        """An environment for this episode: a `TextEnv` where it is a text task, else a simulator."""
        return self._text.lease(episode) if is_text_task(episode.env) else self.simulators.lease(episode)

    def metrics(self) -> Mapping[str, float]:
        """Those of both."""
        return {**self.simulators.metrics(), **self._text.metrics()}


def pool_of(config: LearningConfig, runtime: Runtime, starts: Sequence[TaskStart]) -> RunPool:
    """The pool that a configuration asks for. Raises: ConfigError for one that says nothing about environments."""
    if isinstance(config, MixedTrainingConfig):
        text = [start.env for start in starts if is_text_task(start.env)]
        others = [start.env for start in starts if not is_text_task(start.env)]
        return MixedPool(SimulatorPool(runtime, config.simulators, specs=others), TextEnvPool(config.text, text))
    specs = [start.env for start in starts]
    if isinstance(config, TextTrainingConfig):
        return TextEnvPool(config.text, specs)
    if isinstance(config, TrainingConfig):
        return SimulatorPool(runtime, config.simulators, specs=specs)
    raise ConfigError(
        f"a {type(config).__name__} says nothing of environments; use TrainingConfig for simulators, TextTrainingConfig, or "
        "MixedTrainingConfig for both"
    )


def kinds_of(starts: Sequence[TaskStart]) -> list[str]:
    """Of each start, whether it is played in a `simulator` or as `text`."""
    return ["text" if is_text_task(start.env) else "simulator" for start in starts]


def simulator_pids(pool: RunPool) -> list[int]:
    """Simulator processes that are up now."""
    simulators = pool.simulators if isinstance(pool, MixedPool) else pool
    return simulators.pids if isinstance(simulators, SimulatorPool) else []


def what_plays(config: LearningConfig) -> str:
    """What there are several of, in words."""
    if isinstance(config, MixedTrainingConfig):
        return "simulators and text environments"
    return "text environments" if isinstance(config, TextTrainingConfig) else "simulators"
