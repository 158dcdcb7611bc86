"""What every training recipe does with its command line: print the plan, draw the graph, or train."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from vla_rl.observe import RunDirectory
from vla_rl.recipes.command_line import Command, TrainingLaunch
from vla_rl.recipes.evaluation.held_out import Judge
from vla_rl.recipes.plan import EpisodeFootprint, print_plan
from vla_rl.recipes.report import write_report
from vla_rl.recipes.team import RunModel, Team, bytes_of
from vla_rl.recipes.training import TrainingRun, train
from vla_rl.recipes.training_config import LearningConfig
from vla_rl.rollout import TaskStart
from vla_rl.types import Agent

ConfigT = TypeVar("ConfigT", bound=LearningConfig)


async def launch(
    command: Command[TrainingLaunch, ConfigT],
    starts: Sequence[TaskStart],
    model: RunModel | Team,
    footprint: EpisodeFootprint,
    about: Mapping[str, str] | None = None,
    judge: Judge | None = None,
    agent: Agent | None = None,
) -> int:
    """Do what the command line says with a recipe's starts and policy; returns the exit status.

    `about` is what the run's `about.json` says of its environments besides the configuration; `judge` as in `train`; without
    an `agent` that of `agent_of` plays.
    """
    config, wanted = command.config, command.launch
    if wanted.dry_run:
        print_plan(config, footprint, *bytes_of(model))
        return 0
    if wanted.draw is not None:
        print(f"drawn into {TrainingRun(config, starts, model).graph.draw(wanted.draw)}")
        return 0
    resume = RunDirectory.resume(wanted.resume) if wanted.resume is not None else None
    outcome = await train(config, starts, model, agent=agent, resume=resume, about=about, judge=judge)
    print(f"the report is {await asyncio.to_thread(write_report, outcome.run)}")
    print(f"everything of this run is in {outcome.run.path}")
    if outcome.was_stopped:
        print(f"go on with --resume {outcome.run.path}")
    return 0
