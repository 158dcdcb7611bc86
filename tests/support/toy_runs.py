"""Toy runs, or their episodes alone: a small run in this process or its own, records of evaluated episodes.

One run learns the same on any number of ranks and hosts; episodes are run in this process, apart from any
training run.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pytest
import uvloop

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.evaluation.checkpoint_evaluator import load_policy
from vla_rl.evaluation.records import EpisodeRecord, make_record
from vla_rl.evaluation.run_episodes import run_each, within_range
from vla_rl.graph import Node, NodeOutput, Pipeline
from vla_rl.learner import LearnerConfig, OptimizerConfig, load_checkpoint
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.recipes import train_toy
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.recipes.watch_libero import RandomActions
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import SchedulerConfig, SchedulerState, embodied_agent
from vla_rl.run.train import train
from vla_rl.types import (
    ActionChunk,
    Agent,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Sampling,
    Trajectory,
)

SHARES_SERVERS: Final = [
    pytest.mark.usefixtures("servers"),
    pytest.mark.asyncio(loop_scope="module"),
    # the mark is for all tests of the file, and some are no coroutines
    pytest.mark.filterwarnings("ignore:The test .* is marked with:pytest.PytestWarning"),
]

_opened: list[LastingForkServers] = []

TOY = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"action_dim": 7, "step_limit": 6})


def share_servers(servers: LastingForkServers) -> None:
    """Let the file's own functions find the servers of its fixture."""
    _opened[:] = [servers]


def get_servers() -> LastingForkServers:
    """Return the servers of the file that runs."""
    return _opened[0]


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


def run_locally(root: Path, *arguments: str) -> int:
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


ONE_HOST: Final = ClusterConfig()


def ranked_run(
    root: Path,
    num_ranks: int,
    *,
    updates: int,
    loss: str = "ppo",
    cluster: ClusterConfig = ONE_HOST,
) -> TrainToyConfig:
    return TrainToyConfig(
        run=RunConfig(root=str(root), updates=updates, checkpoint_every=1, device="cpu"),
        group_size=2,
        step_limit=16,
        num_starts=4,
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0, deterministic=True),
        engine=EngineConfig(is_deterministic=True),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0),
            micro_batch=512,
            ranks=num_ranks,
            loss=PolicyLossConfig(name=loss),
        ),
        cluster=cluster,
    )


def update_numbers(run: RunDirectory) -> list[float]:
    """Losses, norms and tokens of all updates, in their order."""
    kept = ("update", "update/loss", "update/grad_norm", "update/tokens")
    return [line[name] for line in read_metrics(run.metrics) for name in kept]


async def episode_counts(run: RunDirectory, updates: int) -> Any:
    """Counts of episodes and the data cursor after the last update."""
    checkpoint = await load_checkpoint(run.checkpoints / f"update-{updates:06d}")
    state = checkpoint.part("scheduler", SchedulerState)
    return state.ledger, state.source


async def train_ranked(
    config: TrainToyConfig, strike: Any = None, fork_servers: LastingForkServers | None = None
) -> RunDirectory:
    """Run it; `strike` is called before the learning of each update with its number."""
    num_updates = 0

    async def hold(rewards: Any) -> NodeOutput:
        nonlocal num_updates
        num_updates += 1
        if strike is not None:
            await asyncio.to_thread(strike, num_updates)
        return NodeOutput(values={})

    def customise(pipeline: Pipeline) -> Pipeline:
        node = Node.declare("hold", hold, reads="rewards")
        return pipeline.insert_after("reward", node)

    async with asyncio.timeout(250):
        outcome = await train(
            config,
            training_starts(config),
            new_policy(config),
            customise=customise,
            fork_servers=fork_servers,
        )
    return outcome.run


def toy_episodes(num: int, env: EnvSpec = TOY) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=k,
            group_id=k,
            member=0,
            env=env,
            task="toy/0",
            seed=0,
            policy_seed=k,
            options={"init_state_id": k},
        )
        for k in range(num)
    ]


async def run_toys(
    agent: Agent,
    episodes: Sequence[EpisodeSpec],
    num_envs: int = 2,
    engine: Any = None,
    servers: LastingForkServers | None = None,
    **changed: Any,
) -> list[Trajectory]:
    trajectories: list[Trajectory] = []

    async def done(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)

    async with (
        Runtime("test", fork_servers=servers) as runtime,
        SimulatorPool(runtime, SimulatorConfig(num_envs=num_envs)) as pool,
    ):
        await run_each(pool, engine or RandomActions(), agent, episodes, done, **changed)
    return sorted(trajectories, key=lambda trajectory: trajectory.episode.episode_id)


class FixedAnswer:
    """An engine that always gives the same answer."""

    weight_version = 4

    def __init__(self, action: list[float], log_prob: float = -1.0, rows: int = 1) -> None:
        self._chunk = ActionChunk(
            actions=np.array([action] * rows, np.float32),
            tokens=np.array(action, np.float32),
            log_probs=np.full(len(action), log_prob, np.float32),
            weight_version=4,
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return self._chunk


STILL = [0.0] * 7


async def evaluate_offline(
    policy: Path,
    episodes: Sequence[EpisodeSpec],
    version: int,
    fork_servers: LastingForkServers | None = None,
) -> list[EpisodeRecord]:
    """The records of an MLP policy's folder, with one simulator, and so decisions one at a time."""
    records = list[EpisodeRecord]()

    async def done(trajectory: Trajectory) -> None:
        records.append(make_record(trajectory, weights=version))

    model = load_policy("vla_rl.models.mlp:MlpPolicy", policy, "cpu")
    async with (
        Runtime("offline", fork_servers=fork_servers) as runtime,
        DeviceLane(1) as lane,
        SimulatorPool(runtime, SimulatorConfig(num_envs=1)) as pool,
        TorchActionEngine(model, lane, EngineConfig(), version) as engine,
    ):
        await run_each(pool, engine, within_range(embodied_agent), episodes, done)
    return records


def evaluated(
    task: str = "libero_goal/7", start: int = 0, is_success: bool = True, **changed: Any
) -> EpisodeRecord:
    """A success or a failure from a start."""
    fields = {
        "seed": 0,
        "weights": 0,
        "member": 0,
        "value": float(is_success),
        "parts": {"steps": 100.0, "attempts": 1.0},
        "instruction": "turn on the stove",
    }
    return EpisodeRecord(task=task, start=start, **{**fields, **changed})


def scored(weights: int, start: int, value: float, **parts: float) -> EpisodeRecord:
    """A score of a drive."""
    return EpisodeRecord(
        task="driving", start=start, seed=0, weights=weights, member=0, value=value, parts=parts
    )


def as_lines(records: Iterable[EpisodeRecord]) -> bytes:
    """What the file of these records holds."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def write_records(path: Path, records: Iterable[EpisodeRecord]) -> None:
    path.write_bytes(as_lines(records))
