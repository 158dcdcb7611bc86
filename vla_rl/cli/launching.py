"""Launch a training recipe: print the plan, draw the graph, or train."""

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.plan import EpisodeFootprint, print_plan
from vla_rl.evaluation.held_out import Judge
from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import TaskStart
from vla_rl.types import Agent

if TYPE_CHECKING:
    from vla_rl.team.members import Trainable

ConfigT = TypeVar("ConfigT", bound=LearningConfig)


async def launch(
    command: Command[TrainingLaunch, ConfigT],
    starts: Sequence[TaskStart],
    model: "Trainable",
    footprint: EpisodeFootprint,
    about: Mapping[str, str] | None = None,
    judge: Judge | None = None,
    agent: Agent | None = None,
) -> int:
    """Plan, draw or train with a recipe's starts and policy, as the command line says; return the
    exit status.

    The status is 0, or 128 plus the number of the signal that stopped the run in order. `about`
    goes into the run's `about.json`: facts about its environments that the configuration lacks.
    `judge` as in `train`; `agent` defaults to that of `default_agent`.
    """
    # torch takes 2 s to import and matplotlib half a second: `--help` and errors must not wait
    from vla_rl.cli.doctor import Patient, findings_at_start
    from vla_rl.run.train import TrainingRun, train
    from vla_rl.team.members import Team

    config, wanted = command.config, command.launch
    if footprint.heard_images:
        model = Team.of(model).showing(footprint.heard_images)
    if wanted.dry_run:
        await _plan_and_rehearse(config, wanted, starts, model, footprint, agent, judge)
        return 0
    if wanted.draw is not None:
        print(f"drawn into {TrainingRun(config, starts, model).graph.draw(wanted.draw)}")
        return 0
    weights, others = Team.of(model).num_bytes
    shares = config.learner.ranks > 1 or config.engine.kind == "vllm"
    patient = Patient(
        root=config.run.root,
        keep_checkpoints=config.run.keep_checkpoints,
        checkpoint_bytes=weights + others,  # gradients too, which are not saved: an upper bound
        shared_mib=Patient().shared_mib if shares else 0,
    )
    for finding in await asyncio.to_thread(findings_at_start, patient):
        print(finding, file=sys.stderr, flush=True)
    resume = RunDirectory.resume(wanted.resume) if wanted.resume is not None else None
    outcome = await train(
        config,
        starts,
        model,
        agent=agent,
        resume=resume,
        resume_from=wanted.resume_from,
        about=about,
        judge=judge,
    )
    await _report(outcome.run)
    print(f"everything of this run is in {outcome.run.path}")
    if outcome.was_stopped:
        print(f"continue with --resume {shlex.quote(str(outcome.run.path))}")
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


async def _plan_and_rehearse(
    config: LearningConfig,
    wanted: TrainingLaunch,
    starts: Sequence[TaskStart],
    model: "Trainable",
    footprint: EpisodeFootprint,
    agent: Agent | None,
    judge: Judge | None,
) -> None:
    """Print what a run would do, and find everything that it would read."""
    from vla_rl.cli.rehearsal import rehearse_training
    from vla_rl.learner.estimates.rank_memory import measure_policy
    from vla_rl.learner.plan import require_tensor_plan
    from vla_rl.run.estimates import concerns_gpus, estimate_run
    from vla_rl.team.members import Team

    team = Team.of(model)
    size = None
    if config.learner.ranks > 1 and len(team.members) == 1:
        (member,) = team.members.values()
        require_tensor_plan(member.model, config.learner)
        size = measure_policy(member.model, config.learner)
    shown = concerns_gpus(config, team)
    estimate = None
    if shown:
        estimate = await asyncio.to_thread(estimate_run, config, team, footprint.heard_tokens)
    layout = None
    if config.cluster.has_hosts:
        # a run on one host imports nothing of several
        from vla_rl.cli.layout_plan import layout_plan

        layout, table = await layout_plan(config, footprint, team)
    print_plan(
        config,
        footprint,
        *team.num_bytes,
        size=size,
        judge=judge,
        estimate=estimate,
        ranks_here=None if layout is None else len(layout.ranks_on(layout.hosts[0])),
    )
    if layout is not None:
        print(table)
    await rehearse_training(
        config,
        starts,
        model,
        agent=agent,
        judge=judge,
        resume=wanted.resume,
        resume_from=wanted.resume_from,
    )
    print("everything that the run would read was found")


async def _report(run: RunDirectory) -> None:
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
