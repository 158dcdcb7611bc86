"""A run small enough for a test: the toy task, two simulators, groups of two."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.recipes import train_toy
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig
from vla_rl.rollout import SchedulerConfig

Toy = TypeVar("Toy", bound=EmbodiedConfig)

COMMAND = [sys.executable, "-m", "vla_rl.recipes.train_toy"]
"""The recipe that is there soonest: its policy needs no transformers."""

SMALL = [
    *("--group-size", "2", "--scheduler.groups-per-update", "2", "--simulators.num-envs", "2"),
    *("--num-starts", "8", "--step-limit", "40"),
]


def small_run(root: Path) -> SrpoToyConfig:
    """Synchronous, two updates of two groups of two episodes."""
    return SrpoToyConfig(
        run=RunConfig(name="small", root=str(root), updates=2, videos_every=1),
        group_size=2,
        init_states=(1, 8),
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
    )


def small_mlp_run(root: Path, pipeline: str = "grpo", **run: Any) -> TrainToyConfig:
    """A run of as many episodes and updates; its policy acts and learns in a third of the time."""
    return TrainToyConfig(
        run=RunConfig(name="small", root=str(root), **{"updates": 2, **run}),
        pipeline=pipeline,
        env_id=REACH,
        group_size=2,
        step_limit=32,
        num_starts=8,
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0), micro_batch=512),
    )


def deterministic(config: Toy, num_envs: int) -> Toy:
    """The same run, bit for bit, on any number of environments."""
    return msgspec.structs.replace(
        config,
        simulators=SimulatorConfig(num_envs=num_envs),
        scheduler=msgspec.structs.replace(config.scheduler, deterministic=True),
        engine=EngineConfig(is_deterministic=True),
    )


def of_updates(root: Path, updates: int, **run: Any) -> TrainToyConfig:
    """A small run; its checkpoints are those that a test asks for."""
    # a pole, whose returns differ: each update learns
    config = msgspec.structs.replace(small_mlp_run(root), env_id="CartPole-v1")
    config = deterministic(config, num_envs=2)
    settings = {"updates": updates, "checkpoint_every": 100, **run}
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, **settings))


def start_recipe(root: Path, *arguments: str) -> "subprocess.Popen[str]":
    """The toy recipe in a process of its own, small, writing below `root`."""
    return subprocess.Popen(
        [*COMMAND, *SMALL, "--run.root", str(root), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def run_here(root: Path, *arguments: str) -> int:
    """Run the toy recipe in this process, for what does not depend on a process of its own: a new one
    imports torch for two seconds.
    """
    command = parse_command(
        TrainingLaunch,
        TrainToyConfig,
        "",
        [*SMALL, "--run.root", str(root), *arguments],
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(train_toy.main(command))
