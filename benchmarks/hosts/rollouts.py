"""A rollout over hosts whose simulators and policies sleep, as a run opens it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from benchmarks.hosts.measured import BATCH, GROUP_SIZE
from benchmarks.hosts.sleepers import SLEEPER_ID
from benchmarks.hosts.sleeping_policy import timed_agent
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.listed_hosts import ListedHosts
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.models.mlp import MlpPolicy
from vla_rl.pipelines.config import RunConfig, TrainingConfig
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.host_recipe import make_host_recipe
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.team.members import Team
from vla_rl.types import EnvSpec

STARTS: Final = (TaskStart(env=EnvSpec(id=SLEEPER_ID), task="sleep"),)

ANSWER_WITHIN_S: Final = 300.0
"""Longest start of a process on a host: on two cores all of them start at the same time."""


def config_for(hosts: Path, *, num_envs: int, scheduler: SchedulerConfig) -> TrainingConfig:
    """Return the settings of a rollout over listed hosts, with `num_envs` simulators on each."""
    return TrainingConfig(
        run=RunConfig(device="cpu"),
        group_size=GROUP_SIZE,
        scheduler=scheduler,
        engine=EngineConfig(max_batch=BATCH),
        cluster=ClusterConfig(hosts=str(hosts)),
        simulators=SimulatorConfig(num_envs=num_envs),
    )


@contextlib.asynccontextmanager
async def rollout_over(
    config: TrainingConfig,
    model: MlpPolicy,
    *,
    answer_within_s: float = ANSWER_WITHIN_S,
    images: ImageRoutes | None = None,
) -> AsyncIterator[HostFleet]:
    """Bring up the hosts that a configuration lists; images go by `images`, if given."""
    assert config.cluster.hosts is not None
    team = Team.of(model)
    async with DeviceLane(1) as lane:
        rollout = HostFleet(
            ListedHosts(Path(config.cluster.hosts), answer_within_s=answer_within_s),
            config,
            make_host_recipe(config, STARTS, team, timed_agent),
            team,
            lane,
            local_runner=None,
            weight_version=0,
        )
        if images is not None:
            rollout.images = images
        async with rollout:
            yield rollout
