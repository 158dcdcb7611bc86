"""A run whose simulators are killed and frozen all the time ends as if nothing had happened."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from toy_runs import small_run

from vla_rl.env_workers import SimulatorConfig
from vla_rl.recipes.srpo_toy import policy_of, starts_of
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.run.train import TrainingRun


@pytest.mark.parametrize(
    ("updates", "least_faults"), [(3, 2), pytest.param(8, 5, marks=pytest.mark.proof)]
)
async def test_killed_and_frozen_simulators_cost_time_and_nothing_else(
    updates: int, least_faults: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(tmp_path)
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, updates=updates, chaos_every_s=0.3),
        group_size=8,
        simulators=SimulatorConfig(
            num_envs=3, step_timeout_s=1.0, reset_timeout_s=3.0, max_restarts=1000
        ),
        scheduler=msgspec.structs.replace(config.scheduler, max_staleness=1, max_attempts=50),
    )
    run = TrainingRun(config, starts_of(config), policy_of(config))
    async with asyncio.timeout(110):
        outcome = await run.execute(RunDirectory.create(tmp_path, "chaos", config))
    num_faults = sum("chaos: SIG" in message for message in caplog.messages)
    metrics = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in metrics] == list(range(1, updates + 1))
    assert outcome.progress.num_episodes == updates * 2 * 8
    assert num_faults >= least_faults
    replaced = metrics[-1]["simulation/replaced/died"] + metrics[-1]["simulation/replaced/frozen"]
    assert replaced >= least_faults // 2
    assert metrics[-1]["rollout/staleness/max"] <= 1
