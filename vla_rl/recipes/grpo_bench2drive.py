"""GRPO on Bench2Drive's routes:
`python -m vla_rl.recipes.grpo_bench2drive --servers 10.0.0.3:5700 --routes 1711 1773`.

Each episode is one route, driven in closed loop on a machine with CARLA, where
`vla_rl_route_server.py` of `vla-rl export carla` serves it; its reward is the
leaderboard's driving score. One server for each CARLA, one simulator process for each server.
"""

import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.evaluation import embodied_agent_within_range
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.driving_training import (
    BY_GROUP_MEAN,
    DRIVING_BASE,
    FORMAT,
    IMAGE_SIZE,
    load_driver,
    score_settings,
)
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import EnvSpec, PositiveFloat, PositiveInt

START_S = 600.0


class GrpoBench2DriveConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """GRPO on routes that are served from machines with CARLA."""

    run: RunConfig = RunConfig(name="grpo_bench2drive", updates=20, checkpoint_every=1)
    pipeline: str = "embodied_grpo"
    group_size: PositiveInt = 4
    temperature: PositiveFloat = 1.0
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=2, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=10),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=4,
    )
    reward: RewardConfig = RewardConfig(function="environment")
    advantage: AdvantageConfig = BY_GROUP_MEAN

    servers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("127.0.0.1:5700",)
    """Addresses of the route servers, host:port, one for each CARLA."""

    routes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("1711",)
    """Ids of the training routes. Train on other routes than those you evaluate."""

    image_size: int = IMAGE_SIZE
    """Side of the images in pixels, which CARLA renders."""

    action: PlanAction = "moves"
    """Meaning of the policy's 8 rows of 3 numbers: `moves` from waypoint to waypoint, as the shipped
    policy was trained with, `profiles`, or `along_route`."""

    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = 0
    """Points of the route, every 5 m ahead, that the policy reads with the car's state. The
    shipped policy reads none."""

    policy: str = str(DRIVING_BASE)
    """Folder of the checkpoint to start from, of any family with a likelihood: OpenVLA-OFT, or a flow policy."""

    simulators: SimulatorConfig = SimulatorConfig(
        reset_timeout_s=START_S + 60, step_timeout_s=300.0, learned_timeout_factor=None
    )
    """Timeouts of a route: its start includes CARLA's. `num_envs` follows from `servers`."""

    @classmethod
    def task_settings(cls, pipeline: str) -> Mapping[str, Any]:
        """Return what the task needs of this pipeline."""
        return score_settings(pipeline)

    def __post_init__(self) -> None:
        super().__post_init__()


def training_starts(config: GrpoBench2DriveConfig) -> list[TaskStart]:
    """Return one start for each route."""
    env = EnvSpec(
        id="vla_rl/bench2drive-v0",
        kwargs={
            "servers": list(config.servers),
            "routes": list(config.routes),
            "image_size": config.image_size,
            "action": config.action,
            "route_points": config.route_points,
            "start_s": START_S,
        },
    )
    return [
        TaskStart(env=env, task=f"route {route}", options={"init_state_id": number})
        for number, route in enumerate(config.routes)
    ]


async def main(command: Command[TrainingLaunch, GrpoBench2DriveConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    given = command.config
    # a second process on one server would wait for the first one's route for ever
    simulators = msgspec.structs.replace(given.simulators, num_envs=len(given.servers))
    config = msgspec.structs.replace(given, simulators=simulators)
    command = Command(launch=command.launch, config=config)
    model = await asyncio.to_thread(
        load_driver,
        config.policy,
        FORMAT,
        config.run.device,
        config.action,
        config.route_points,
    )
    print(f"starting from the policy in {config.policy}; {model.describe()}", flush=True)
    return await launch(
        command,
        training_starts(config),
        model,
        EpisodeFootprint(
            what_runs="routes of Bench2Drive",
            simulator_mb=45,
            server_mb=60,
            chunk_bytes=3 * config.image_size**2 + 1024,
            num_chunks=400,
        ),
        {"routes": ", ".join(config.routes)},
        None,
        embodied_agent_within_range,
    )


cli = partial(run_recipe, TrainingLaunch, GrpoBench2DriveConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
