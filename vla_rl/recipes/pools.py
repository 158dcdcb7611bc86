"""Where a run's episodes are played: simulators in processes of their own, or text environments in this one."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from vla_rl.actors import Runtime
from vla_rl.envs.text import TextEnvPool
from vla_rl.errors import ConfigError
from vla_rl.recipes.training_config import LearningConfig, TextTrainingConfig, TrainingConfig
from vla_rl.rollout import TaskStart
from vla_rl.simulation import SimulatorPool
from vla_rl.types import EnvPool


class RunPool(EnvPool, Protocol):
    """A pool that a run opens and asks for its figures."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        """By path."""
        ...


def pool_of(config: LearningConfig, runtime: Runtime, starts: Sequence[TaskStart]) -> RunPool:
    """The pool that a configuration asks for. Raises: ConfigError for one that says nothing about environments."""
    specs = [start.env for start in starts]
    if isinstance(config, TextTrainingConfig):
        return TextEnvPool(config.text, specs)
    if isinstance(config, TrainingConfig):
        return SimulatorPool(runtime, config.simulators, specs=specs)
    raise ConfigError(
        f"a {type(config).__name__} says nothing of environments; use TrainingConfig for simulators, or TextTrainingConfig"
    )


def what_plays(config: LearningConfig) -> str:
    """What there are several of, in words."""
    return "text environments" if isinstance(config, TextTrainingConfig) else "simulators"
