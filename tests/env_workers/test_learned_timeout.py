"""Timeouts learnt from earlier calls: the pure classes, and a simulator that is ended by one."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.env_workers.config import (
    ENOUGH_RESETS,
    ENOUGH_STEPS,
    REMEMBERED,
    LearnedTimeout,
    LearnedTimeouts,
    Leniency,
)
from vla_rl.errors import ActorFrozen
from vla_rl.types import EpisodeSpec

Episode = Callable[..., EpisodeSpec]
seconds = st.floats(0.0, 1e4)


def timeout_of(leniency: Leniency) -> LearnedTimeout:
    return LearnedTimeout("env-0", "control step", ENOUGH_STEPS, leniency)


def test_nothing_is_learnt_from_too_few_calls() -> None:
    timeout = timeout_of(Leniency(20.0, 5.0))
    for _ in range(ENOUGH_STEPS - 1):
        timeout.record_duration(1, 0.01)
    assert timeout.timeout_s(1) is None
    timeout.record_duration(1, 0.01)
    assert timeout.timeout_s(1) == 5.0


def test_a_timeout_is_a_multiple_of_the_slowest_step_for_each_step_of_the_call() -> None:
    timeout = timeout_of(Leniency(20.0, 5.0))
    for _ in range(ENOUGH_STEPS):
        timeout.record_duration(8, 1.6)  # 0.2 s a control step
    timeout.record_duration(8, 4.0)  # 0.5 s
    assert timeout.timeout_s(8) == 20.0 * 0.5 * 8
    assert timeout.timeout_s(1) == 20.0 * 0.5


def test_a_slow_call_long_ago_is_forgotten() -> None:
    timeout = timeout_of(Leniency(20.0, 5.0))
    timeout.record_duration(1, 30.0)  # code is compiled
    for _ in range(REMEMBERED - 2):
        timeout.record_duration(1, 0.01)
    assert timeout.timeout_s(1) == 600.0
    for _ in range(REMEMBERED + 1):
        timeout.record_duration(1, 0.01)
    assert timeout.timeout_s(1) == 5.0


def test_a_timeout_that_fires_makes_those_of_the_whole_pool_longer() -> None:
    leniency = Leniency(20.0, 5.0)
    one, other = timeout_of(leniency), timeout_of(leniency)
    for timeout in (one, other):
        for _ in range(ENOUGH_STEPS):
            timeout.record_duration(1, 0.01)
    reason = one.record_overdue(1)
    assert reason == (
        "learned_timeout_factor is 20, learned_timeout_floor_s 5; the slowest control step lately "
        "took 0.01 s"
    )
    assert (one.timeout_s(1), other.timeout_s(1)) == (20.0, 20.0)


def test_without_a_factor_nothing_is_learnt() -> None:
    timeout = timeout_of(Leniency(None, 5.0))
    for _ in range(1000):
        timeout.record_duration(1, 0.01)
    assert timeout.timeout_s(1) is None


def test_another_environment_begins_anew() -> None:
    timeouts = LearnedTimeouts("env-0", Leniency(20.0, 5.0))
    chunk, reset = timeouts.by_endpoint["step_chunk"], timeouts.by_endpoint["reset"]
    for _ in range(ENOUGH_STEPS):
        chunk.record_duration(
            chunk.num_units((0, np.zeros((8, 7)), None)), 4.0
        )  # half a second for each row
    for _ in range(ENOUGH_RESETS):
        reset.record_duration(1, 1.0)
    step, step_all = timeouts.by_endpoint["step"], timeouts.by_endpoint["step_all"]
    assert step.limit_s(step.num_units((0, "action", 0))) == 10.0
    assert step_all.limit_s(step_all.num_units(([None] * 4, 0))) == 40.0
    assert reset.limit_s(1) == 20.0
    timeouts.forget()
    assert (step.limit_s(1), reset.limit_s(1)) == (None, None)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 64), seconds), min_size=ENOUGH_STEPS, max_size=600))
def test_no_call_like_one_of_the_last_would_have_been_too_slow(
    calls: list[tuple[int, float]],
) -> None:
    timeout = timeout_of(Leniency(20.0, 5.0))
    for num_units, took_s in calls:
        timeout.record_duration(num_units, took_s)
    for num_units, took_s in calls[-REMEMBERED:]:
        limit = timeout.timeout_s(num_units)
        assert limit is not None
        assert limit >= 5.0
        assert limit >= took_s


async def test_a_step_that_never_returns_is_ended_by_what_earlier_steps_took(
    runtime: Runtime, episode: Episode, tmp_path: Path
) -> None:
    config = SimulatorConfig(  # timeouts longer than this test may take
        num_envs=1, learned_timeout_floor_s=0.5, step_timeout_s=3600, reset_timeout_s=3600
    )
    hangs = {
        "fault": "never_answer",
        "at_step": ENOUGH_STEPS + 1,
        "step_limit": 200,
        "ledger": str(tmp_path),
    }
    async with asyncio.timeout(90), SimulatorPool(runtime, config) as pool:
        with pytest.raises(
            ActorFrozen,
            match=r"step did not answer within .* \(learned_timeout_factor is 20, .* took",
        ):
            await run_episode(pool, episode(0, "vla_rl/faulty-v0", **hangs))
        assert pool.metrics()["simulation/replaced/frozen"] == 1
        await run_episode(pool, episode(0, "vla_rl/faulty-v0", **hangs))


HANGS_IN_NATIVE_CODE = """
import re
import gymnasium
from vla_rl.envs.toy import ToyReachEnv

class HangsInNativeCode(ToyReachEnv):
    def __init__(self, at_step):
        super().__init__(step_limit=1000)
        self.at_step = at_step

    def step(self, action):
        if self._num_steps == self.at_step:
            re.match("(a+)+$", 64 * "a" + "b")  # takes an age, and never lets go of the interpreter
        return super().step(action)

gymnasium.register(id="test/hangs-v0", entry_point="hangs_in_native_code:HangsInNativeCode")
"""


async def test_native_code_that_never_lets_go_of_the_interpreter_is_ended_too(
    runtime: Runtime, episode: Episode, import_folder: Path
) -> None:
    (import_folder / "hangs_in_native_code.py").write_text(HANGS_IN_NATIVE_CODE)
    config = SimulatorConfig(
        num_envs=1, learned_timeout_floor_s=0.5, step_timeout_s=3600, reset_timeout_s=3600
    )
    async with asyncio.timeout(90), SimulatorPool(runtime, config) as pool:
        with pytest.raises(
            ActorFrozen,
            match=r"step did not answer within .* \(learned_timeout_factor is 20, .* took",
        ):
            await run_episode(
                pool, episode(0, "hangs_in_native_code:test/hangs-v0", at_step=ENOUGH_STEPS)
            )


async def run_episode(pool: SimulatorPool, spec: EpisodeSpec) -> None:
    async with pool.lease(spec) as env:
        await env.reset()
        for _ in range(ENOUGH_STEPS + 1):
            await env.step(np.zeros(7, np.float32))
