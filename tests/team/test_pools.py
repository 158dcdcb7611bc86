"""Environments of a run, made from its configuration; the device that it computes on."""

import pytest
import torch

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.text import TextEnvPool, TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    RunConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.rollout import TaskStart
from vla_rl.team.devices import resolve_device, why_no_gpu
from vla_rl.team.pools import (
    MixedPool,
    describe_environments,
    make_pool,
    simulator_pids,
    start_kinds,
)
from vla_rl.types import EnvSpec

ROBOT = TaskStart(env=EnvSpec(id="vla_rl/toy_reach-v0"), task="reach")
TWO, CONVERSATIONS = SimulatorConfig(num_envs=2), TextPoolConfig(num_envs=3)
TEXT = TaskStart(env=EnvSpec(id="text/arithmetic"), task="sums")


@pytest.mark.parametrize(
    ("config", "starts", "kind", "words"),
    [
        (TrainingConfig(simulators=TWO), [ROBOT], SimulatorPool, "simulators"),
        (TextTrainingConfig(text=CONVERSATIONS), [TEXT], TextEnvPool, "text environments"),
        (
            MixedTrainingConfig(simulators=TWO, text=CONVERSATIONS),
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


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def test_a_run_on_the_cpu_does_not_ask_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(RunConfig(device="cpu")).type == "cpu"
    assert resolve_device(RunConfig(device="auto")).type == "cuda"
    assert why_no_gpu() is None


def test_a_run_on_any_device_says_why_it_takes_the_cpu(
    without_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_device(RunConfig(device="auto")).type == "cpu"
    assert "is a build without CUDA): the policy and the learner compute on the CPU" in (
        capsys.readouterr().out
    )


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(without_gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch sees no GPU \(torch .*\)"):
        resolve_device(RunConfig(device="cuda"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The driver is too old.\nUpdate it."), "The driver is too old"),
        (None, "CUDA lists none"),
    ],
)
def test_the_reason_is_the_first_line_of_the_drivers(
    error: Exception | None, reason: str, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert why_no_gpu() == reason
