"""Off-policy learning from stored episodes alone: no simulator, no engine, no scheduler.

    replay.from ─► rows ─► replay buffer of the run ─► gradient steps ─► metrics.jsonl, checkpoints
                 (once; a resume finds them there)

The run's folder is that of every run. An update is a number of gradient steps, `off_policy.offline_steps`.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Checkpoint, LearnerTeam, load_checkpoint
from vla_rl.learner.off_policy.run_replay import REPLAY, RunReplay
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.replay import ReplayState
from vla_rl.reporting import MetricLog, RunDirectory
from vla_rl.run.imported_rows import RowImporter
from vla_rl.run.resuming import checkpoint_to_resume, set_later_aside
from vla_rl.run.saving import CheckpointSaver, RunSnapshot
from vla_rl.run.stored_rows import opened_replay, require_folders, require_same_sources
from vla_rl.run.terminal import StopSignal, lasting_output
from vla_rl.team.devices import resolve_device
from vla_rl.team.heads import get_head_learner, make_head_learner, require_head
from vla_rl.team.members import Team, Trainable


async def learn_offline(
    config: EmbodiedConfig,
    model: Trainable,
    *,
    resume: RunDirectory | None = None,
    resume_from: str | None = None,
    about: Mapping[str, str] | None = None,
    tasks: Collection[str] | None = None,
) -> RunDirectory:
    """Train a head from stored episodes, and return the run's folder.

    It ends after `config.run.updates` updates, or in order at a signal.

    Args:
        config: settings of the run; `replay.source` names the episodes.
        model: the policy, a head over a frozen one.
        resume: directory of an earlier run, to go on from its newest checkpoint.
        resume_from: name of another checkpoint to go on from, such as `update-000012`.
        about: facts that results depend on besides the configuration, for `about.json`.
        tasks: tasks to learn; episodes that name another one are left out. None: any.

    Raises: ConfigError for episodes or settings that do not fit; DataError for rows of another base;
        CheckpointError.
    """
    team = Team.of(model)
    _, policy, _ = require_head(config, team)
    policy.network.to(resolve_device(config.run))
    if resume is None:
        require_folders(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(lasting_output())
        run = resume or RunDirectory.create(
            Path(config.run.root), config.run.name, config, about or {}
        )
        stack.enter_context(run.owned())
        checkpoint = None if resume is None else await _go_back(config, run, resume_from)
        lane = await stack.enter_async_context(DeviceLane(config.run.torch_threads))
        learners = make_head_learner(config, team, lane, None, 0, {})
        replay = get_head_learner(learners).replay
        buffer = opened_replay(
            learners,
            config,
            run,
            is_resumed=resume is not None,
            has_checkpoint=checkpoint is not None,
            tasks=tasks,
        )
        stack.enter_context(buffer)
        if checkpoint is not None:
            await learners.restore(checkpoint.state)
            replay.restore(checkpoint.part(REPLAY, ReplayState))
        else:
            importer = RowImporter(policy, get_head_learner(learners), lane, tasks)
            await _import_all(config, importer, replay)
            get_head_learner(learners).require_rows()
        if resume is not None:
            # not before: settings that do not fit the checkpoint must leave the run as it was
            run.record_resume(config)
        await _make_updates(config, learners, run, is_resumed=resume is not None)
    return run


async def _go_back(
    config: EmbodiedConfig, run: RunDirectory, name: str | None
) -> Checkpoint | None:
    """Set aside what an earlier run wrote after its checkpoint, and return that; None if it has none."""
    found = await checkpoint_to_resume(run, name, load_checkpoint)
    folder, checkpoint = (None, None) if found is None else found
    if checkpoint is not None:
        require_same_sources(config, run)
    version = 0 if checkpoint is None else checkpoint.state.weight_version
    await set_later_aside(run, folder, version, None)
    return checkpoint


async def _import_all(config: EmbodiedConfig, importer: RowImporter, replay: RunReplay) -> None:
    """Store the episodes that the run learns from. Raises: ConfigError if there are none."""
    source, shown = config.replay.source, config.replay.demonstrations
    assert source is not None
    number = await importer.import_rows(Path(source), is_demonstration=False)
    print(f"{number} episodes of {source}", flush=True)
    if shown is not None:
        number = await importer.import_rows(Path(shown), is_demonstration=True)
        print(f"{number} demonstrations of {shown}", flush=True)
    if replay.buffer.num_rows == 0:
        raise ConfigError(
            f"replay.from is {source!r}, which has no episode to learn from; name a folder with some"
        )


async def _make_updates(
    config: EmbodiedConfig, learners: LearnerTeam, run: RunDirectory, *, is_resumed: bool
) -> None:
    """Make the updates, with a line of metrics for each, and save checkpoints."""
    learner, first = get_head_learner(learners), learners.weight_version
    saver = CheckpointSaver(config.run.checkpoint_every, config.run.keep_checkpoints, first)

    async def snapshot() -> RunSnapshot:
        return RunSnapshot(await learners.snapshot(), {REPLAY: learner.replay.state()})

    log = await asyncio.to_thread(
        MetricLog.open_log, run, config.run.wandb_project, resumed_at=first if is_resumed else None
    )
    with log, StopSignal() as stop:
        saver.open_folder(run.checkpoints, log.secured)
        while learners.weight_version < config.run.updates and not stop.is_asked:
            report = await learner.learn_steps(config.off_policy.offline_steps)
            version = report.weight_version
            await asyncio.to_thread(log.write, version, report.metrics)
            print(
                f"update {version}/{config.run.updates}  gradient steps "
                f"{report.metrics['off_policy/steps']:.0f}  {report.metrics['update/seconds']:.1f} s",
                flush=True,
            )
            if saver.is_due(version):
                await saver.prepare(await snapshot())
                await saver.commit(version)
        if saver.saved_version != learners.weight_version:
            await saver.save_checkpoint(await snapshot())
