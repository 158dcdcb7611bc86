"""Train a small flow policy on the reaching task from its scripted expert: `python -m vla_rl.recipes.sft_toy`.

The policy sees the image, the hand's place and the instruction, and decides chunks of 4 x 2 numbers by a
flow; which square is red is in the image alone. It needs neither a simulator nor data, and is written to a
folder in a minute. The expert hesitates: its speed is drawn anew in each episode, so that the policy often
runs out of steps, and reinforcement learning has something to improve:

    vla-rl sft_toy --out reach_base
    vla-rl train_toy --pipeline ppo --policy reach_base --config reach_ppo
"""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl import learner
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.toy import IMAGE_SIZE
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models.loading import require_new_folder
from vla_rl.recipes.train_toy import REACH, reach_arguments
from vla_rl.run.supervised import imitate_drawn, intermediate_folder
from vla_rl.types import Config, NonNegativeFloat, PositiveFloat, PositiveInt, Share, derive_seed

if TYPE_CHECKING:
    from vla_rl.learner import Demonstration
    from vla_rl.models.flow.policy import FlowPolicy

CHUNK_SIZE: Final = 4


class SftToyConfig(Config, frozen=True, kw_only=True):
    """Supervised learning of a small flow policy."""

    out: str = "reach_base"
    """Folder that the policy is written to. It must not exist yet."""

    episodes: PositiveInt = 400
    """Demonstrated episodes, each from a start of its own."""

    step_size: PositiveFloat = 0.25
    """Largest move of the hand along each axis in one control step, in arena units from -1 to 1."""

    slowest: Share = 0.15
    """Slowest speed of the expert, as a share of the fastest; 1 for an expert that never hesitates."""

    updates: PositiveInt = 250
    """Optimizer steps. Fewer leave more to learn for reinforcement learning."""

    batch: PositiveInt = 64
    """Demonstrated chunks in one optimizer step."""

    draws: PositiveInt = 2
    """Draws of noise and time for each chunk, on one reading of its observation."""

    width: PositiveInt = 96
    """Width of both halves of the network, a multiple of 4; 96 gives 1.0 million parameters."""

    num_steps: PositiveInt = 4
    """Steps from noise to actions, kept in the folder."""

    noise_level: NonNegativeFloat = 0.5
    """Noise level of the stochastic step, kept in the folder. 0 for losses without a ratio alone."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=20), micro_batch=64
    )

    seed: int = 0
    """Seed of the initial weights, the order of the demonstrations and the draws."""


def new_policy(config: SftToyConfig) -> "FlowPolicy":
    """Create the policy with random weights."""
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.models.flow.config import FlowSampling
    from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
    from vla_rl.models.flow.small_folder import create_small_flow
    from vla_rl.models.prismatic.action_tokens import unit_bounds

    shape = SmallFlowConfig(
        actions=unit_bounds(2),
        state=StateConfig(mean=(0.0, 0.0), std=(0.5, 0.5)),
        image_size=IMAGE_SIZE,
        horizon=CHUNK_SIZE,
        width=config.width,
        expert_width=config.width,
    )
    sampling = FlowSampling(
        num_steps=config.num_steps,
        noise_level=config.noise_level,
        imitation_draws=config.draws,
    )
    return create_small_flow(shape, derive_seed(config.seed, "policy"), sampling)


def demonstrate(config: SftToyConfig) -> "list[Demonstration]":
    """Run the scripted expert; return one chunk from each of its steps."""
    env: Any = gymnasium.make(REACH, **reach_arguments(config.step_size, step_limit=40)).unwrapped
    made: list[Demonstration] = []
    speeds = np.random.default_rng(derive_seed(config.seed, "speeds"))
    for number in range(config.episodes):
        observation, _ = env.reset(seed=derive_seed(config.seed, "episode", number) % 2**31)
        seen, actions, is_over = [], [], False
        speed = np.float32(speeds.uniform(config.slowest, 1.0))
        while not is_over:
            seen.append(observation)
            actions.append(speed * env.optimal_action())
            observation, _, terminated, truncated, _ = env.step(actions[-1])
            is_over = terminated or truncated
        for step, each in enumerate(seen):
            rows = np.stack(actions[step : step + CHUNK_SIZE])
            chunk = np.zeros((CHUNK_SIZE, 2), np.float32)
            chunk[: len(rows)] = rows
            made.append(learner.Demonstration(observation=each, actions=chunk, num_valid=len(rows)))
    return made


async def main(command: Command[Launch, SftToyConfig]) -> int:
    """Make demonstrations, train the policy and save it; return the exit status."""
    config = command.config
    require_new_folder(Path(config.out), intermediate_folder(Path(config.out), config.updates))
    policy = await asyncio.to_thread(new_policy, config)
    demonstrations = await asyncio.to_thread(demonstrate, config)
    print(f"{policy.describe()}; {len(demonstrations)} chunks of {config.episodes} episodes")
    if command.launch.dry_run:
        return 0
    return await imitate_drawn(
        policy,
        demonstrations,
        config.imitation,
        Path(config.out),
        updates=config.updates,
        batch=config.batch,
        seed=config.seed,
        print_every=30,
    )


cli = partial(run_recipe, Launch, SftToyConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
