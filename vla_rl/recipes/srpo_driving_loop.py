"""SRPO on the driving world in closed loop: `python -m vla_rl.recipes.srpo_driving_loop`.

An episode is a drive of 60 m among others that react, with a decision every 0.5 s; it is a success
without a collision, a red light or a detour. Each failure is rewarded by how near it came to the
successes of the same layout of roads in the same update. Before the first update and after the
last, held-out drives are graded by Bench2Drive's driving score, and the first plan of each drive by
PDMS.
"""

import asyncio
import os
import sys
from functools import partial
from typing import Annotated, Final

import msgspec

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.driving.closed_loop import STEP_LIMITS
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction
from vla_rl.envs.driving.roads import LAYOUTS
from vla_rl.envs.driving.scores import Version
from vla_rl.evaluation.conditions import POLICY_DIGEST
from vla_rl.evaluation.drive_sheets import write_drive_sheet
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models.loading import compute_digest_as_read
from vla_rl.pipelines.config import EmbodiedConfig, FilterConfig, RunConfig
from vla_rl.recipes.driving_training import (
    CROP,
    FORMAT,
    IMAGE_SIZE,
    ROUTE_BASE,
    HeldOutScenesConfig,
    make_scene_evaluator,
    train_driver,
)
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import EnvSpec, EpisodeSpec, PositiveFloat, PositiveInt, derive_seed

CLOSED_LOOP: Final = "vla_rl/driving_waypoints-v0"
KINDS: Final = tuple(LAYOUTS)
PLAN_SCORE: Final[Version] = "pdms_v1"
"""Score of a held-out drive's first plan."""


class SrpoDrivingLoopConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """SRPO on the driving world in closed loop."""

    run: RunConfig = RunConfig(
        name="srpo_driving_loop", updates=40, checkpoint_every=20, videos_every=40
    )
    pipeline: str = "embodied_srpo"
    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.7
    """Sampling temperature for rollout and training. Held-out drives are greedy."""

    filter: FilterConfig = FilterConfig(accuracy_bounds=(0.0, 0.99))
    embedding: EmbeddingConfig = EmbeddingConfig()
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=8, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=5e-4, warmup_steps=10, decay_steps=160),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=16,
        micro_batch=256,
    )

    kinds: tuple[str, ...] = KINDS
    """Layouts of roads, each of them a task."""

    scenes: PositiveInt = 200
    """Training scenes of each layout, from number 0 on."""

    action: PlanAction = "along_route"
    """Meaning of the policy's 8 rows of 3 numbers: `along_route`, as the shipped policy was trained,
    `moves` from waypoint to waypoint, or `profiles`."""

    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = ROUTE_POINTS
    """Points of the route, every 5 m ahead, that the policy reads with the car's state. The
    shipped policy reads ten."""

    policy: str = str(ROUTE_BASE)
    """Folder of the checkpoint to start from, of any family with a likelihood: OpenVLA-OFT, or a flow policy."""

    held_out: HeldOutScenesConfig = HeldOutScenesConfig(scenes=500, by_mean=True)
    """Held-out drives, over all layouts in turn. The mean of 500 has a 95 % interval of 2 points."""

    simulators: SimulatorConfig = SimulatorConfig(num_envs=2 * (os.cpu_count() or 1))
    """Processes that drive; two for each core by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            len(self.kinds) > 0 and set(self.kinds) <= set(KINDS),
            "kinds",
            f"some of {', '.join(KINDS)}",
        )


def layout_env(config: SrpoDrivingLoopConfig, kind: str, split: str) -> EnvSpec:
    """Return the environment of one layout over one split."""
    kwargs = {
        "action": config.action,
        "route_points": config.route_points,
        "kind": kind,
        "split": split,
        "image_size": IMAGE_SIZE,
        "crop": CROP,
    }
    if split == "held_out":
        kwargs["first_plan"] = PLAN_SCORE
    return EnvSpec(id=CLOSED_LOOP, kwargs=kwargs)


def training_starts(config: SrpoDrivingLoopConfig) -> list[TaskStart]:
    """Return the training scenes, the layouts in turn."""
    return [
        TaskStart(
            env=layout_env(config, kind, "train"), task=kind, options={"init_state_id": number}
        )
        # layouts in turn, so that an update of a few groups has several of them
        for number in range(config.scenes)
        for kind in config.kinds
    ]


def held_out_episodes(config: SrpoDrivingLoopConfig) -> list[EpisodeSpec]:
    """Return the held-out drives, the layouts in turn: those that are reported, and then those that
    choose the best checkpoint.
    """
    wanted = config.held_out
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=layout_env(config, config.kinds[number % len(config.kinds)], "held_out"),
            task=config.kinds[number % len(config.kinds)],
            options={"init_state_id": number},
            sampling=config.held_out.sampling(config.temperature),
            seed=0,
            policy_seed=derive_seed(config.run.seed, "held out", number),
        )
        for number in range(wanted.scenes + wanted.num_choosing if wanted.scenes else 0)
    ]


async def main(command: Command[TrainingLaunch, SrpoDrivingLoopConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    episodes = held_out_episodes(config)
    digest = await asyncio.to_thread(compute_digest_as_read, config.policy, FORMAT)
    return await train_driver(
        command,
        config.policy,
        training_starts(config),
        make_scene_evaluator(episodes, config.held_out, write_drive_sheet, digest),
        {
            "layouts": ", ".join(config.kinds),
            "score": "driving score",
            POLICY_DIGEST: digest,
        },
        num_chunks=STEP_LIMITS[config.action] // NUM_WAYPOINTS,
    )


cli = partial(run_recipe, TrainingLaunch, SrpoDrivingLoopConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
