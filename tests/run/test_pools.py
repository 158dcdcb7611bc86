"""The environments of a run follow from its configuration."""

import pytest

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.text import TextEnvPool, TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.rollout import TaskStart
from vla_rl.team.pools import (
    MixedPool,
    describe_environments,
    make_pool,
    simulator_pids,
    start_kinds,
)
from vla_rl.types import EnvSpec

ROBOT = TaskStart(env=EnvSpec(id="vla_rl/toy_reach-v0"), task="reach")
TWO, TALKS = SimulatorConfig(num_envs=2), TextPoolConfig(num_envs=3)
TEXT = TaskStart(env=EnvSpec(id="text/arithmetic"), task="sums")


@pytest.mark.parametrize(
    ("config", "starts", "kind", "words"),
    [
        (TrainingConfig(simulators=TWO), [ROBOT], SimulatorPool, "simulators"),
        (TextTrainingConfig(text=TALKS), [TEXT], TextEnvPool, "text environments"),
        (
            MixedTrainingConfig(simulators=TWO, text=TALKS),
            [ROBOT, TEXT],
            MixedPool,
            "simulators and text environments",
        ),
    ],
)
def test_a_configuration_chooses_its_environments(
    config: LearningConfig, starts: list[TaskStart], kind: type, words: str
) -> None:
    pool = make_pool(config, Runtime("pools"), starts)
    assert type(pool) is kind
    assert pool.num_envs == config.num_envs
    assert describe_environments(config) == words
    assert simulator_pids(pool) == []


def test_starts_are_of_the_kind_of_their_environment() -> None:
    assert start_kinds([ROBOT, TEXT]) == ["simulator", "text"]


class Nowhere(LearningConfig, frozen=True, kw_only=True):
    """A configuration without environments."""

    @property
    def num_envs(self) -> int:
        return 1


def test_a_configuration_without_environments_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Nowhere has no settings for environments; use"):
        make_pool(Nowhere(), Runtime("pools"), [ROBOT])
