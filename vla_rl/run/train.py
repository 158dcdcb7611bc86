"""Train a policy in environments with any pipeline, to the end of a run that may be restarted.

A run begins anew, or continues an earlier one. To train on something else, pass other starts, another
model, agent or pipeline; the README shows each.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.actors import LastingForkServers
from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.learner import Checkpoint
from vla_rl.pipelines.config import (
    LearningConfig,
    PlannerTrainingConfig,
    RunConfig,
    TextTrainingConfig,
)
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.metrics import import_wandb
from vla_rl.reporting.run_directory import require_plain
from vla_rl.rollout import TaskStart, chat_agent, embodied_agent, planner_agent
from vla_rl.run.recording import owned_recording, record_agent, run_digest
from vla_rl.run.resuming import Restarts, checkpoint_to_resume, load_resumable, set_later_aside
from vla_rl.run.stored_rows import require_folders, require_same_sources
from vla_rl.run.terminal import lasting_output, raises_one_error
from vla_rl.run.training_run import Customise, Outcome, TrainingRun
from vla_rl.team.members import Team, Trainable
from vla_rl.types import Agent
from vla_rl.util.rlimits import require_run_limits


def check_arguments(config: Any, starts: Any, agent: Any) -> None:
    """Raise ConfigError if the configuration, the starts or the agent have the wrong type, or the
    configuration holds what its file cannot.
    """
    if not isinstance(config, LearningConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}, expected a TrainingConfig or another "
            "LearningConfig; the arguments of `train` are config, starts and model, in this order"
        )
    require_plain(config, "config")
    if isinstance(starts, TaskStart) or not isinstance(starts, Sequence):
        raise ConfigError(
            f"starts is of type {type(starts).__name__}, expected a list of TaskStarts, such as "
            "[TaskStart(...)]"
        )
    if not starts:
        raise ConfigError("starts is empty, expected at least one TaskStart to begin episodes from")
    for number, start in enumerate(starts):
        if not isinstance(start, TaskStart):
            raise ConfigError(
                f"starts[{number}] is of type {type(start).__name__}, expected a TaskStart"
            )
    if agent is not None and not callable(agent):
        raise ConfigError(
            f"agent is of type {type(agent).__name__}, expected a function `async def agent(env, "
            "policy)`; pass the function itself and do not call it"
        )
    if agent is not None:
        _require_two_arguments(agent)


def _require_two_arguments(agent: Any) -> None:
    """Raise ConfigError for an agent that cannot be called with an environment and a policy."""
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # it cannot be inspected; its first call shows the error
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        hint = "; give an object of the class" if isinstance(agent, type) else ""
        raise ConfigError(
            f"the agent {getattr(agent, '__name__', agent)}{signature} cannot be called with an environment "
            f"and a policy ({error}), expected `async def agent(env, policy)`{hint}"
        ) from None


def default_agent(config: LearningConfig) -> Agent:
    """Return the default agent: `chat_agent` in text environments, `planner_agent` for a planner and
    a robot, else `embodied_agent`.
    """
    if isinstance(config, PlannerTrainingConfig):
        return partial(planner_agent, planner=config.planner)
    return (
        partial(chat_agent, limits=config.chat)
        if isinstance(config, TextTrainingConfig)
        else embodied_agent
    )


__all__ = ["Customise", "Outcome", "TrainingRun", "train"]


@raises_one_error
async def train(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    model: Trainable,
    *,
    agent: Agent | None = None,
    customise: Customise = lambda pipeline: pipeline,
    resume: RunDirectory | None = None,
    resume_from: str | None = None,
    about: Mapping[str, str] | None = None,
    evaluator: HeldOutEvaluator | None = None,
    fork_servers: LastingForkServers | None = None,
) -> Outcome:
    """Train `model` in place from `starts`.

    The run ends after `config.run.updates` updates, or in order at a signal. If a rank of a sharded
    learner dies or fails, the run restarts from its newest checkpoint; if that rank cannot be
    started again, with one rank less.

    Args:
        config: the pipeline and its settings, sizes, seeds and the run's files.
        starts: environments, tasks and initial states of the episodes.
        model: the policy, or a `Team` of policies.
        agent: runs one episode; None: that of `default_agent`. Its episodes are recorded if
            `config.run.record_to` is set.
        customise: changes the pipeline before it is built.
        resume: directory of an earlier run, to resume from its newest complete checkpoint, or from
            the beginning if it ended before its first.
        resume_from: name of another checkpoint to resume from, such as `update-000012`; newer ones
            are set aside.
        about: facts that results depend on besides the configuration, such as the assets that were
            found; for `about.json`.
        evaluator: evaluates the policy before the first update and after the last, and beside training
            if it is a `HeldOutEvaluator` with such a schedule.
        fork_servers: servers for the processes of several runs, one after the other; None: the run
            starts its own.

    Raises: ConfigError, GraphError before anything starts, also if another process owns the run's
        directory; CheckpointError if every checkpoint is
        damaged, or the last one cannot be written; RunDirectoryGone if the directory was removed
        meanwhile; what an environment, agent or node raised. Before that, everything is closed in
        order and the weights are saved, unless the learner itself failed. A task's failure is
        raised as the error itself, with the traceback of your own code only, unless the environment
        variable VLA_RL_TRACEBACK is `full`.
    """
    check_arguments(config, starts, agent)
    require_run_limits()
    if config.run.wandb_project is not None:
        await asyncio.to_thread(import_wandb, config.run.wandb_project)
    run_settings = [msgspec.structs.replace(config, run=RunConfig(seed=config.run.seed)), about]
    envs = [start.env for start in starts]
    restarts = Restarts.of(config, Team.of(model))
    acting: Agent = agent or default_agent(config)

    own = None if fork_servers is not None else LastingForkServers(config.run.name)

    def make(first_update: int = 0) -> TrainingRun:
        left, policies = restarts.remaining(config, model)
        return TrainingRun(
            left,
            starts,
            policies,
            agent=acting,
            customise=customise,
            evaluator=evaluator,
            first_update=first_update,
            restarts=restarts,
            fork_servers=fork_servers or own,
        )

    async with AsyncExitStack() as stack:
        stack.enter_context(lasting_output())
        stack.enter_context(owned_recording(config.run.record_to))
        acting = await record_agent(acting, config.run.record_to, envs, run_digest(run_settings))
        # a restart forks from the same servers: their imports take longer than all else in it
        await stack.enter_async_context(own or nullcontext())
        if resume is None:
            require_folders(config)
            training, checkpoint = make(), None
            run = RunDirectory.create(Path(config.run.root), config.run.name, config, about or {})
            stack.enter_context(run.owned())
        else:
            run = resume
            stack.enter_context(run.owned())
            training, checkpoint = await _make_resumed(make, run, resume_from, evaluator)
        while True:
            is_resumed = resume is not None or restarts.num_restarts > 0
            try:
                return await training.execute(run, checkpoint, is_resumed=is_resumed)
            except Exception as error:
                # a rank that never started is a mistake in the settings; one that did is worth a try
                has_started = training.has_started or restarts.num_restarts > 0
                if training.is_asked_to_stop or not has_started:
                    raise
                restarts.count(error, training.saved_version)
            try:
                training, checkpoint = await _make_resumed(make, run, None, evaluator)
            except ConfigError as refused:
                raise restarts.explained(refused) from refused.__cause__


async def _make_resumed(
    make: Callable[..., TrainingRun],
    run: RunDirectory,
    name: str | None,
    evaluator: HeldOutEvaluator | None,
) -> tuple[TrainingRun, Checkpoint | None]:
    """Return the rest of a run, not started, and the checkpoint that it starts from."""
    found = await checkpoint_to_resume(run, name, load_resumable)
    folder, checkpoint = (None, None) if found is None else found
    first_update = 0 if checkpoint is None else checkpoint.state.weight_version
    if evaluator is not None:
        evaluator.check_records(run)
    # built before anything is written: a configuration that is refused must leave the run as it was
    training = make(first_update=first_update)
    if checkpoint is not None:
        require_same_sources(training.config, run)
    await set_later_aside(run, folder, first_update, evaluator)
    return training, checkpoint
