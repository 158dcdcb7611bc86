"""A recipe whose agents do not end as they should: `python stubborn_agents.py <how> <options>`."""

import asyncio
import os
import signal
import sys
from typing import NoReturn

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import train
from vla_rl.types import Env, Policy, Trajectory

FIRST = 9
"""Episodes that run before an agent does not end."""

num_started = 0


async def _goes_on() -> NoReturn:
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            continue


async def _exits() -> NoReturn:
    sys.exit(3)


async def agent(env: Env, policy: Policy) -> Trajectory:
    global num_started
    num_started += 1
    if num_started == FIRST and HOW != "exits":
        os.kill(os.getpid(), signal.SIGINT)
    if num_started < FIRST:
        return await embodied_agent(env, policy)
    if HOW == "goes on":
        await _goes_on()
    if HOW == "its task goes on":
        await asyncio.create_task(_goes_on(), name="mine")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_exits())
    raise AssertionError


async def main(command: Command[TrainingLaunch, TrainToyConfig]) -> int:
    config = command.config
    outcome = await train(config, training_starts(config), new_policy(config), agent=agent)
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


if __name__ == "__main__":
    HOW = sys.argv.pop(1)
    sys.exit(run_recipe(TrainingLaunch, TrainToyConfig, main, ""))
