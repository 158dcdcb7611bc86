"""The launch of a recipe: on an event loop, with errors in one line, to plan, to draw or to train."""

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from vla_rl.cli.command_line import (
    Command,
    ConfigT,
    LaunchT,
    TrainingLaunch,
    parse_command,
)
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.cli.offline_plan import plan_offline
from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.pipelines.config import EmbodiedConfig, LearningConfig
from vla_rl.pipelines.registry import learns_from_buffer, learns_offline
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.rollout import TaskStart
from vla_rl.rollout.episode_tasks import END_WITHIN_S, keep_for_ever
from vla_rl.run.terminal import explain, lasting_output
from vla_rl.types import Agent, EnvSpec

if TYPE_CHECKING:
    from vla_rl.learner.estimates.rank_memory import PolicySize
    from vla_rl.team.members import Team, Trainable


def run_recipe(
    launch_type: type[LaunchT],
    config_type: type[ConfigT],
    main: Callable[[Command[LaunchT, ConfigT]], Coroutine[Any, Any, int]],
    description: str,
) -> int:
    """Run a recipe from the command line on uvloop; return the exit status.

    Errors are printed as `explain` describes.
    """
    with lasting_output():
        return _run_recipe(launch_type, config_type, main, description)


def _run_recipe(
    launch_type: type[LaunchT],
    config_type: type[ConfigT],
    main: Callable[[Command[LaunchT, ConfigT]], Coroutine[Any, Any, int]],
    description: str,
) -> int:
    try:
        command = parse_command(launch_type, config_type, description)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return _run_through(runner, main(command))
            finally:
                _leave_tasks(runner.get_loop())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (GeneratorExit, SystemExit):  # of the parser: help, or a mistake that it has reported
        raise
    except BaseException as error:  # reported here, because no caller can handle it
        print(explain(error), file=sys.stderr)
        return 1


def _run_through(runner: asyncio.Runner, main: Coroutine[Any, Any, int]) -> int:
    """Run `main` to its end, also if a task of the user's code raises SystemExit.

    asyncio raises that out of the loop at once. The code that awaits the task gets it too, so that
    the run ends in order.
    """
    task = runner.get_loop().create_task(main)

    async def end() -> None:
        try:
            await asyncio.wait((task,))
        finally:  # an interrupt cancels this
            task.cancel()
            await asyncio.wait((task,))

    while True:
        try:
            runner.run(end())
            return task.result()
        except SystemExit as error:
            if task.done():
                raise RuntimeError(
                    f"a task raised SystemExit: {error}, expected an Exception, such as "
                    "RuntimeError"
                ) from error


def _leave_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that are left, and leave those that do not end: the loop would wait for them."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=END_WITHIN_S))
    for task in pending:
        # asyncio.Runner waits for every task that it knows, without a limit
        asyncio.tasks._unregister_task(task)
        keep_for_ever(task)
    if pending:
        names = ", ".join(sorted(task.get_name() for task in pending))
        print(
            f"{len(pending)} tasks did not end within {END_WITHIN_S:g} s after they were cancelled, "
            f"and are left: {names}",
            file=sys.stderr,
        )


LearningConfigT = TypeVar("LearningConfigT", bound=LearningConfig)


async def launch(
    command: Command[TrainingLaunch, LearningConfigT],
    starts: Sequence[TaskStart],
    model: "Trainable",
    footprint: EpisodeFootprint,
    about: Mapping[str, str] | None = None,
    evaluator: HeldOutEvaluator | None = None,
    agent: Agent | None = None,
    rehearsed_envs: Sequence[EnvSpec] | None = None,
) -> int:
    """Plan, draw or train with a recipe's starts and policy, as the command line says; return the
    exit status.

    The status is 0, or 128 plus the number of the signal that stopped the run in order. `about`
    goes into the run's `about.json`: facts about its environments that the configuration lacks.
    `evaluator` as in `train`; `agent` defaults to that of `default_agent`. `rehearsed_envs` are the
    environments that a dry run opens, if those of the starts share simulators; None: each of the starts'.
    """
    # torch takes 2 s to import and matplotlib half a second: `--help` and errors must not wait
    from vla_rl.run.train import TrainingRun, train
    from vla_rl.team.members import Team

    config, wanted = command.config, command.launch
    if wanted.draw is not None and learns_offline(config):
        raise ConfigError(
            f"draw is {wanted.draw}, but replay.from learns from stored episodes alone, which takes no graph of "
            "nodes; leave one of the two out"
        )
    if footprint.observation_images:
        model = Team.of(model).showing(footprint.observation_images)
    # an earlier run has shown that its episodes are short enough
    _require_room(config, footprint.num_chunks if wanted.resume is None else 1)
    if wanted.draw is not None:
        print(f"drawn into {TrainingRun(config, starts, model).graph.draw(wanted.draw)}")
    if wanted.dry_run:
        await _plan_and_rehearse(
            config, wanted, starts, model, footprint, agent, evaluator, rehearsed_envs
        )
        return 0
    if wanted.draw is not None:
        return 0
    await _check_machine(config, model)
    resume = RunDirectory.resume(wanted.resume) if wanted.resume is not None else None
    if learns_offline(config):
        return await _learn_offline(config, starts, model, resume, wanted.resume_from, about)
    outcome = await train(
        config,
        starts,
        model,
        agent=agent,
        resume=resume,
        resume_from=wanted.resume_from,
        about=about,
        evaluator=evaluator,
    )
    await _write_report(outcome.run)
    print(f"everything of this run is in {outcome.run.path}")
    if outcome.was_stopped:
        print(f"continue with --resume {shlex.quote(str(outcome.run.path))}")
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _require_room(config: LearningConfig, num_chunks: int) -> None:
    """Raise ConfigError if an update of episodes of `num_chunks` decisions may not fit into the replay buffer."""
    if isinstance(config, EmbodiedConfig) and learns_from_buffer(config.pipeline):
        from vla_rl.team.heads import require_room

        require_room(config, num_chunks)


async def _check_machine(config: LearningConfig, model: "Trainable") -> None:
    """Print what of this machine would end the run after hours, such as a full disk or a small /dev/shm."""
    from vla_rl.cli.doctor import Machine, check_at_start
    from vla_rl.team.members import Team

    weights, others = Team.of(model).memory_bytes
    shares = config.learner.ranks > 1 or config.engine.kind == "vllm"
    machine = Machine(
        root=config.run.root,
        keep_checkpoints=config.run.keep_checkpoints,
        checkpoint_bytes=weights + others,  # gradients too, which are not saved: an upper bound
        shared_mib=Machine().shared_mib if shares else 0,
    )
    for result in await asyncio.to_thread(check_at_start, machine):
        print(result, file=sys.stderr, flush=True)


async def _learn_offline(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    model: "Trainable",
    resume: RunDirectory | None,
    resume_from: str | None,
    about: Mapping[str, str] | None,
) -> int:
    from vla_rl.run.offline import learn_offline

    assert isinstance(config, EmbodiedConfig)
    run = await learn_offline(
        config,
        model,
        resume=resume,
        resume_from=resume_from,
        about=about,
        tasks={start.task for start in starts},
    )
    await _write_report(run)
    print(f"everything of this run is in {run.path}")
    return 0


async def _plan_and_rehearse(
    config: LearningConfig,
    wanted: TrainingLaunch,
    starts: Sequence[TaskStart],
    model: "Trainable",
    footprint: EpisodeFootprint,
    agent: Agent | None,
    evaluator: HeldOutEvaluator | None,
    opened: Sequence[EnvSpec] | None,
) -> None:
    """Print what a run would do, and find everything that it would read."""
    from vla_rl.cli.dry_run import plan_layout, print_plan, rehearse_training
    from vla_rl.run.estimates import concerns_gpus, estimate_run
    from vla_rl.run.stored_rows import check_sources
    from vla_rl.team.members import Team

    team = Team.of(model)
    if learns_offline(config):
        assert isinstance(config, EmbodiedConfig)
        await plan_offline(config, team, resume=wanted.resume, resume_from=wanted.resume_from)
        print("everything that the run would read was found")
        return
    shown = concerns_gpus(config, team)
    estimate = None
    if shown:
        estimate = await asyncio.to_thread(estimate_run, config, team, footprint.observation_tokens)
    layout = None
    if config.cluster.has_hosts:
        layout, table = await plan_layout(config, footprint, team)
    others: dict[str, int] = {}
    if learns_from_buffer(config.pipeline):
        from vla_rl.team.heads import list_memory

        others = list_memory(config, team)
    print_plan(
        config,
        footprint,
        *team.memory_bytes,
        others=others,
        size=_measure_for_ranks(config, team),
        evaluator=evaluator,
        estimate=estimate,
        num_local_ranks=None if layout is None else len(layout.ranks_on(layout.hosts[0])),
    )
    if layout is not None:
        print(table)
    await rehearse_training(
        config,
        starts,
        model,
        agent=agent,
        evaluator=evaluator,
        resume=wanted.resume,
        resume_from=wanted.resume_from,
        opened=opened,
    )
    if wanted.resume is None:
        await asyncio.to_thread(check_sources, config, team)
    print("everything that the run would read was found")


def _measure_for_ranks(config: LearningConfig, team: "Team") -> "PolicySize | None":
    """Return the numbers of a policy that several ranks train; None if one process does, or several policies learn.

    Raises: ConfigError if ranks cannot share its layers.
    """
    from vla_rl.learner.estimates.rank_memory import measure_policy
    from vla_rl.learner.plan import require_tensor_plan

    if config.learner.ranks == 1 or len(team.members) > 1:
        return None
    (member,) = team.members.values()
    require_tensor_plan(member.model, config.learner)
    return measure_policy(member.model, config.learner)


async def _write_report(run: RunDirectory) -> None:
    """Write the report.

    A failure is printed as one line and not raised, because the run itself succeeded.
    """
    from vla_rl.cli.report import write_report

    try:
        print(f"the report is {await asyncio.to_thread(write_report, run)}")
    except Exception as error:
        print(
            f"the report could not be written ({type(error).__name__}: {error}); to write it "
            "again: "
            f"python -m vla_rl.cli.report {run.path}",
            file=sys.stderr,
        )
