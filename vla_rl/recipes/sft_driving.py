"""Train a small driving policy from a planner: `python -m vla_rl.recipes.sft_driving --out base`.

The demonstrations are made on the way: a driver who races, in drawn training scenes, or another one
(`--demonstrator`). The policy is a small OpenVLA-OFT with the front camera, the command as text, the
car's state and points of the route; it answers with 8 x 3 tokens in one pass.
`grpo_driving --policy base` continues from it.
"""

import asyncio
import random
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import gymnasium
import msgspec
import numpy as np
from msgspec.structs import replace

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl import learner
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.driving.observing import ROUTE_POINTS, ROUTE_STEP
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction
from vla_rl.envs.driving.planner import (
    CAREFUL,
    FULL_SPEED,
    IMPATIENT,
    NUM_PROPOSALS,
    RACING,
)
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models import openvla_oft
from vla_rl.models.loading import Device, choose_device, require_new_folder
from vla_rl.models.prismatic.config import ProprioConfig, tiny
from vla_rl.recipes.driving_training import CROP, IMAGE_SIZE, ROWS_BY_STATISTICS
from vla_rl.run.supervised import imitate_drawn, intermediate_folder
from vla_rl.types import Config, PositiveInt, derive_seed

if TYPE_CHECKING:
    from vla_rl.learner import Demonstration

LOW: Final = (0.0, -1.0, -4.0, -4.0, -0.6, -0.4, 0.0, 0.0, 0.0, 0.0)
HIGH: Final = (15.0, 1.0, 3.0, 4.0, 0.6, 0.4, 1.0, 1.0, 1.0, 1.0)
"""Range of the car's state: velocity [m/s], acceleration [m/s^2], yaw rate [rad/s], steering angle
[rad], and the command."""

BEND: Final = 50.0
"""Metres. A point of the route lies at most along^2 / BEND to one side: a bend of a radius of 25 m
leads there."""

Demonstrator = Literal["best_proposal", "any_proposal", "careful", "impatient", "racing"]


MANNERS: Final = {"careful": CAREFUL, "impatient": IMPATIENT, "racing": RACING}
"""Drivers in the middle of the lane."""


class SftDrivingConfig(Config, frozen=True, kw_only=True):
    """Supervised learning of a small driving policy."""

    scenes: PositiveInt = 4000
    """Training scenes, from number 0 on, with one demonstration each."""

    demonstrator: Demonstrator = "racing"
    """Driver that is imitated. best_proposal: the best of the planner's 15 proposals. any_proposal: one
    of them, drawn. In the middle of the lane drive: careful, the fastest of the 15; impatient, up to
    1.5 times the speed limit, 0.3 s behind the one in front; racing, with 4 m/s^2 up to 2.5 times
    the limit, 0.2 s behind."""

    action: PlanAction = "along_route"
    """Meaning of the 8 rows of 3 numbers: moves from waypoint to waypoint, profiles, or
    along_route, which needs a route to drive along."""

    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = ROUTE_POINTS
    """Points of the route, every 5 m ahead, that the policy reads with the car's state. 0:
    the command alone, for a policy that is to plan where no route is given, as on NavSim."""

    bins: Annotated[int, msgspec.Meta(ge=3)] = 32
    """Action tokens: each of the 24 numbers takes one of `bins` - 1 values, evenly spaced. With few,
    reinforcement learning tries each of them often enough to compare them."""

    out: str = "driving_base"
    """Folder that the checkpoint is written to. It must not exist yet."""

    updates: PositiveInt = 400
    """Optimizer steps. Fewer leave more to learn for reinforcement learning."""

    batch: PositiveInt = 32
    """Demonstrations in one optimizer step."""

    save_every: PositiveInt | None = None
    """Updates between saves on the way, into <out>-000500 and so on. None: only at the end."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50, decay_steps=800), label_width=1.0
    )

    device: Device = "auto"
    """Device that computes: cpu, cuda, or auto, a GPU if there is one."""

    torch_threads: PositiveInt = 1
    """Threads for the computation on a CPU."""

    seed: int = 0
    """Seed of the initial weights and the order of the demonstrations."""


def driving_state(route_points: int) -> ProprioConfig:
    """Return the scaling of the car's state and of the route's points after it.

    A point is as far ahead as it is along the route at most.
    """
    low, high = list(LOW), list(HIGH)
    for number in range(1, route_points + 1):
        along = float(ROUTE_STEP * number)
        aside = along**2 / BEND
        # a road may bend by so much at most: numbers that use their whole range are read more
        # exactly
        low += [0.0, -aside]
        high += [along + 0.5, aside]
    return ProprioConfig(low=tuple(low), high=tuple(high))


def new_policy(
    seed: int, action: PlanAction, route_points: int, bins: int = 256
) -> "openvla_oft.OpenVlaOft":
    """Create the small policy with random weights; its folder says what its rows mean, how many
    points of the route it reads, and how many action tokens it has.
    """
    small = tiny(
        image_size=IMAGE_SIZE,
        cameras=("image",),
        proprio=driving_state(route_points),
        chunk_size=NUM_WAYPOINTS,
        action_dim=3,
    )
    # the name of the statistics says what a row means, so a recipe can refuse another `--action`
    names = [name for name, rows in ROWS_BY_STATISTICS.items() if rows == action]
    return openvla_oft.OpenVlaOft.create(replace(small, norm_key=names[0], num_bins=bins), seed)


def demonstrate(
    scenes: range, demonstrator: Demonstrator, action: PlanAction, route_points: int, seed: int
) -> "list[Demonstration]":
    """Ask the planner for a trajectory in each training scene; `seed` draws among its proposals."""
    env: Any = gymnasium.make(
        "vla_rl/driving-v0",
        image_size=IMAGE_SIZE,
        crop=CROP,
        split="train",
        action=action,
        route_points=route_points,
    ).unwrapped
    made = []
    for number in scenes:
        observation, _ = env.reset(options={"init_state_id": number})
        actions: np.ndarray
        if demonstrator == "best_proposal":
            actions = env.expert_actions()
        elif demonstrator == "any_proposal":
            # drawn by the scene's number, so that fewer scenes are the first ones of more
            drawn = random.Random(derive_seed(seed, "proposal", number)).randrange(NUM_PROPOSALS)
            actions = env.proposed_actions(drawn)
        else:
            actions = env.proposed_actions(FULL_SPEED, MANNERS[demonstrator])
        made.append(
            learner.Demonstration(observation=observation, actions=actions, num_valid=len(actions))
        )
    return made


async def main(command: Command[Launch, SftDrivingConfig]) -> int:
    """Make demonstrations, train the policy and save it; return the exit status."""
    config = command.config
    require_new_folder(Path(config.out), intermediate_folder(Path(config.out), config.updates))
    policy = await asyncio.to_thread(
        new_policy,
        derive_seed(config.seed, "policy"),
        config.action,
        config.route_points,
        config.bins,
    )
    policy.network.to(choose_device(config.device))
    if command.launch.dry_run:
        await asyncio.to_thread(
            # one scene: whatever is missing, it is missing in the first
            demonstrate,
            range(1),
            config.demonstrator,
            config.action,
            config.route_points,
            0,
        )
        print("everything that the command would read was found")
        return 0
    demonstrations = await asyncio.to_thread(
        demonstrate,
        range(config.scenes),
        config.demonstrator,
        config.action,
        config.route_points,
        config.seed,
    )
    print(f"{len(demonstrations)} demonstrations; {config.updates} updates of {config.batch}")
    return await imitate_drawn(
        policy,
        demonstrations,
        config.imitation,
        Path(config.out),
        updates=config.updates,
        batch=config.batch,
        seed=config.seed,
        print_every=200,
        torch_threads=config.torch_threads,
        save_every=config.save_every,
    )


cli = partial(run_recipe, Launch, SftDrivingConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
