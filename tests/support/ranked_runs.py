"""A run of an MLP that learns the same on any number of ranks and hosts, and what is compared of it."""

import asyncio
from pathlib import Path
from typing import Any, Final

from vla_rl.actors import LastingForkServers
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.graph import Node, NodeOutput, Pipeline
from vla_rl.learner import LearnerConfig, OptimizerConfig, load_checkpoint
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import SchedulerConfig, SchedulerState
from vla_rl.run.train import train

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


def numbers_of(run: RunDirectory) -> list[float]:
    """Losses, norms and tokens of all updates, in their order."""
    kept = ("update", "update/loss", "update/grad_norm", "update/tokens")
    return [line[name] for line in read_metrics(run.metrics) for name in kept]


async def books_of(run: RunDirectory, updates: int) -> Any:
    """Counts of episodes and the data cursor after the last update."""
    checkpoint = await load_checkpoint(run.checkpoints / f"update-{updates:06d}")
    state = checkpoint.part("scheduler", SchedulerState)
    return state.ledger, state.source


async def trained(
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
