"""The agents of the recipes run on other hosts, which import them by name."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import (
    driving_training,
    grpo_bench2drive,
    libero_training,
    srpo_driving_loop,
    suite_training,
)
from vla_rl.recipes.grpo_bench2drive import GrpoBench2DriveConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.remote_rollout.host_recipe import make_agent, make_agent_recipe

CPU = RunConfig(name="hosts", device="cpu")


@pytest.mark.parametrize(
    ("main", "launches", "config"),
    [
        (libero_training.main, suite_training, SrpoLiberoConfig(run=CPU, assets="stand-ins")),
        (driving_training.main, driving_training, GrpoDrivingConfig(run=CPU)),
        (srpo_driving_loop.main, driving_training, SrpoDrivingLoopConfig(run=CPU)),
        (grpo_bench2drive.main, grpo_bench2drive, GrpoBench2DriveConfig(run=CPU)),
    ],
)
async def test_another_host_can_import_the_agent(
    main: Callable[[Any], Awaitable[int]],
    launches: Any,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = []

    async def launch(*arguments: Any) -> int:
        agents.append(arguments[-1])
        return 0

    monkeypatch.setattr(launches, "launch", launch)
    assert await main(Command(launch=TrainingLaunch(), config=config)) == 0
    (agent,) = agents
    assert make_agent(make_agent_recipe(agent)) is agent
