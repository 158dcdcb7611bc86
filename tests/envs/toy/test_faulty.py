"""The environment that fails on request fails there, as often as it was asked to, and then works."""

from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.toy import FaultyEnv

IDLE = np.zeros(7, np.float32)


def test_a_fault_comes_at_its_step_and_no_more_often_than_asked_for() -> None:
    env = FaultyEnv("raise", at_step=2, times=1)
    env.reset(seed=0)
    env.step(IDLE)
    with pytest.raises(RuntimeError, match="as it was told to"):
        env.step(IDLE)
    env.reset(seed=0)
    env.step(IDLE)
    env.step(IDLE)


def test_step_zero_is_the_reset() -> None:
    env = FaultyEnv("raise", at_step=0)
    with pytest.raises(RuntimeError):
        env.reset(seed=0)
    env.reset(seed=0)


def test_a_ledger_counts_faults_of_processes_that_came_before(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            FaultyEnv("raise", at_step=0, times=2, ledger=str(tmp_path)).reset(seed=0)
    FaultyEnv("raise", at_step=0, times=2, ledger=str(tmp_path)).reset(seed=0)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fault", ["wrong_shape", "wrong_dtype", "missing_key"])
def test_an_observation_at_fault_is_not_of_its_space(fault: str) -> None:
    env = FaultyEnv(fault, at_step=1)
    assert env.observation_space.contains(env.reset(seed=0)[0])
    assert not env.observation_space.contains(env.step(IDLE)[0])


def test_a_reward_at_fault_is_no_number() -> None:
    env = FaultyEnv("not_finite_reward", at_step=1)
    env.reset(seed=0)
    assert np.isnan(env.step(IDLE)[1])
    assert np.isfinite(env.step(IDLE)[1])


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="'sulks' is not a valid Fault"):
        FaultyEnv("sulks")
