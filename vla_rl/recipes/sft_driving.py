"""Train a small driving policy from a planner: `python -m vla_rl.recipes.sft_driving --out base`.

The demonstrations are made on the way: the best of 15 IDM proposals in drawn training scenes, or
another driver's (`--demonstrator`). The policy is a small OpenVLA-OFT with the front camera, the
command as text, and the car's state; it answers with 8 x 3 tokens in one pass.
`grpo_driving --policy base` continues from it.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import gymnasium
import numpy as np
from msgspec.structs import replace

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl import engines, learning
from vla_rl.commands.command_line import Command, Launch, run_recipe
from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.envs.driving.planner import FULL_SPEED, IMPATIENT, NUM_PROPOSALS
from vla_rl.learning import ImitationConfig, OptimizerConfig
from vla_rl.models import openvla_oft
from vla_rl.models.loading import require_new
from vla_rl.models.openvla_oft.config import tiny
from vla_rl.models.prismatic.config import ProprioConfig
from vla_rl.recipes.driving_training import CROP, IMAGE_SIZE, TAUGHT
from vla_rl.training.supervised import intermediate_folder, teach
from vla_rl.types import Config, derive_seed

if TYPE_CHECKING:
    from vla_rl.learning import Demonstration

DRIVING_STATE: Final = ProprioConfig(
    low=(0.0, -1.0, -4.0, -4.0, -0.6, -0.4, 0.0, 0.0, 0.0, 0.0),
    high=(15.0, 1.0, 3.0, 4.0, 0.6, 0.4, 1.0, 1.0, 1.0, 1.0),
)
"""Velocity [m/s], acceleration [m/s^2], yaw rate [rad/s], steering angle [rad], and the command."""

Demonstrator = Literal["best_proposal", "any_proposal", "impatient"]


class SftDrivingConfig(Config, frozen=True, kw_only=True):
    """Supervised learning of a small driving policy."""

    scenes: int = 4000
    """Training scenes, from number 0 on, with one demonstration each."""

    demonstrator: Demonstrator = "best_proposal"
    """Driver that is imitated. best_proposal: the best of the planner's 15 proposals. any_proposal: one
    of them, drawn. impatient: in the middle of the lane, up to 1.5 times the speed limit, 0.3 s behind
    the one in front."""

    action: PlanAction = "moves"
    """Meaning of the 8 rows of 3 numbers: moves from waypoint to waypoint, or profiles."""

    out: str = "driving_base"
    """Folder that the checkpoint is written to. It must not exist yet."""

    updates: int = 1500
    """Optimizer steps. Fewer leave more to learn for reinforcement learning."""

    batch: int = 16
    """Demonstrations in one optimizer step."""

    save_every: int | None = None
    """Updates between saves on the way, into <out>-000500 and so on. None: only at the end."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50, decay_steps=3000), micro_batch=16
    )

    torch_threads: int = 1
    """Threads for the computation on a CPU."""

    seed: int = 0
    """Seed of the initial weights and the order of the demonstrations."""

    def __post_init__(self) -> None:
        for field in ("scenes", "updates", "batch", "torch_threads"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.save_every is None or self.save_every >= 1, "save_every", "at least 1")


def new_policy(seed: int, action: PlanAction) -> "openvla_oft.OpenVlaOft":
    """Create the small policy with random weights; its folder says what its rows mean."""
    small = tiny(
        image_size=IMAGE_SIZE,
        cameras=("image",),
        proprio=DRIVING_STATE,
        chunk_size=NUM_WAYPOINTS,
        action_dim=3,
    )
    names = [name for name, taught in TAUGHT.items() if taught == action]
    return openvla_oft.OpenVlaOft.create(replace(small, norm_key=names[0]), seed)


def demonstrate(
    scenes: range, demonstrator: Demonstrator, action: PlanAction, seed: int
) -> "list[Demonstration]":
    """Ask the planner for a trajectory in each training scene; `seed` draws among its proposals."""
    env: Any = gymnasium.make(
        "vla_rl/driving-v0", image_size=IMAGE_SIZE, crop=CROP, split="train", action=action
    ).unwrapped
    made = []
    for number in scenes:
        observation, _ = env.reset(options={"init_state_id": number})
        actions: np.ndarray
        if demonstrator == "best_proposal":
            actions = env.expert_actions()
        elif demonstrator == "any_proposal":
            drawn = random.Random(derive_seed(seed, "proposal", number)).randrange(NUM_PROPOSALS)
            actions = env.proposed_actions(drawn)
        else:
            actions = env.proposed_actions(FULL_SPEED, IMPATIENT)
        made.append(
            learning.Demonstration(observation=observation, actions=actions, num_valid=len(actions))
        )
    return made


async def main(command: Command[Launch, SftDrivingConfig]) -> int:
    """Make demonstrations, train the policy and save it; return the exit status."""
    config = command.config
    require_new(Path(config.out), intermediate_folder(Path(config.out), config.updates))
    policy = await asyncio.to_thread(new_policy, derive_seed(config.seed, "policy"), config.action)
    if command.launch.dry_run:
        await asyncio.to_thread(demonstrate, range(1), config.demonstrator, config.action, 0)
        print("everything that the command would read was found")
        return 0
    demonstrations = await asyncio.to_thread(
        demonstrate, range(config.scenes), config.demonstrator, config.action, config.seed
    )
    print(f"{len(demonstrations)} demonstrations; {config.updates} updates of {config.batch}")
    order = random.Random(derive_seed(config.seed, "samples"))
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.training.imitators import opened_imitator

    async with (
        engines.DeviceLane(config.torch_threads) as lane,
        opened_imitator(
            policy, lane, config.imitation, seed=derive_seed(config.seed, "ranks")
        ) as imitator,
    ):
        losses: list[float] = []

        async def batch(_: int) -> "list[Demonstration]":
            return order.choices(demonstrations, k=config.batch)

        async def learn(number: int, chosen: "list[Demonstration]") -> None:
            losses.append((await imitator.update(chosen)).metrics["imitation/loss"])
            if number % 200 == 0:
                print(f"update {number}: loss {np.mean(losses[-200:]):.3f}", flush=True)

        async def save(folder: Path) -> None:
            await imitator.fetch()
            await lane.run(policy.save, folder, work="checkpoint")

        return await teach(
            config.updates, batch, learn, save, Path(config.out), save_every=config.save_every
        )


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(Launch, SftDrivingConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
