"""The dry run of a training run: read all that it would read, and raise what it would raise.

Each environment is opened once, in a simulator process that ends again. Nothing is trained, and
nothing is written.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from vla_rl.cli.opening import distinct, open_each
from vla_rl.env_workers import SimulatorConfig
from vla_rl.evaluation.held_out import Judge
from vla_rl.pipelines.config import LearningConfig, TrainingConfig
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.run_directory import require_writable
from vla_rl.reporting.sinks import import_wandb
from vla_rl.rollout import TaskStart
from vla_rl.run.recording import check_recording
from vla_rl.run.resuming import checkpoint_to_resume, verify_resumable
from vla_rl.run.train import TrainingRun, default_agent
from vla_rl.team.members import Trainable
from vla_rl.types import Agent


async def rehearse_training(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    model: Trainable,
    *,
    agent: Agent | None = None,
    judge: Judge | None = None,
    resume: Path | None = None,
    resume_from: str | None = None,
) -> None:
    """Read everything that `train` would read.

    Raises: what `train` would raise before its first update.
    """
    envs = distinct(start.env for start in starts)
    if config.run.wandb_project is not None:
        await asyncio.to_thread(import_wandb, config.run.wandb_project)
    await asyncio.to_thread(check_recording, config.run.record_to, envs)
    first_update = 0
    if resume is None:
        require_writable(Path(config.run.root))
    else:
        run = RunDirectory.existing(resume)
        require_writable(resume)
        found = await checkpoint_to_resume(run, resume_from, verify_resumable)
        first_update = 0 if found is None else found[1]
        if judge is not None:
            judge.check(run)
    acting = agent or default_agent(config)
    TrainingRun(config, starts, model, agent=acting, judge=judge, first_update=first_update)
    simulators = config.simulators if isinstance(config, TrainingConfig) else SimulatorConfig()
    await open_each(envs, simulators)
