"""The replay buffer of a run: opened with it, and kept as long as its checkpoints need the rows."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerTeam
from vla_rl.learner.off_policy.run_replay import RunReplay, list_needed_segments
from vla_rl.pipelines.config import EmbodiedConfig, LearningConfig
from vla_rl.pipelines.registry import learns_from_buffer
from vla_rl.reporting import RunDirectory
from vla_rl.team.members import Team

_log = logging.getLogger(__name__)


def find_replay(learners: LearnerTeam, config: LearningConfig) -> RunReplay:
    """Return the replay buffer of a run. Raises: ConfigError if its pipeline has none."""
    # imported here, because other runs do without heads
    from vla_rl.team.heads import get_run_replay

    return get_run_replay(learners, config)


def require_folders(config: LearningConfig) -> None:
    """Raise ConfigError unless the folders that a new run imports episodes from exist."""
    if not (learns_from_buffer(config.pipeline) and isinstance(config, EmbodiedConfig)):
        return
    named = {"from": config.replay.source, "demonstrations": config.replay.demonstrations}
    for option, folder in named.items():
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(
                f"replay.{option} is {folder!r}, which is not a folder; name one with stored episodes"
            )


def require_same_sources(config: LearningConfig, run: RunDirectory) -> None:
    """Raise ConfigError if a resume names other episodes than those that its run began with and has stored."""
    if not (learns_from_buffer(config.pipeline) and isinstance(config, EmbodiedConfig)):
        return
    before = msgspec.json.decode(run.config.read_bytes()).get("replay", {})
    given = {"from": "source", "demonstrations": "demonstrations"}
    for option, field in given.items():
        now, then = getattr(config.replay, field), before.get(field)
        if now != then:
            raise ConfigError(
                f"replay.{option} is {now!r}, but {run.path} began with {then!r}, and its episodes are stored; leave "
                "it out to resume, or begin a new run"
            )


def check_sources(config: LearningConfig, team: Team) -> None:
    """Look at the folders that a new run imports episodes from, and print if one has more rows than the buffer.
    Blocks.

    Raises: ConfigError, DataError if one is missing, cannot be read, or has rows of another policy.
    """
    require_folders(config)
    if not learns_from_buffer(config.pipeline):
        return
    # imported here, because other runs do without heads
    from vla_rl.run.imported_rows import check_source
    from vla_rl.team.heads import require_head

    _, policy, settings = require_head(config, team)
    replay = settings.replay
    for folder in (replay.source, replay.demonstrations):
        if folder is None:
            continue
        found = check_source(Path(folder), RunReplay(policy.layout, replay).layout, replay.data)
        # demonstrations stay whatever the capacity is
        if folder == replay.source and found > replay.capacity:
            print(
                f"{folder} has {found} rows, those of other tasks included, and replay.capacity is "
                f"{replay.capacity}: the oldest ones beyond it would be dropped",
                flush=True,
            )


@contextmanager
def opened_replay(
    learners: LearnerTeam,
    config: LearningConfig,
    run: RunDirectory,
    *,
    is_resumed: bool,
    has_checkpoint: bool,
    tasks: Collection[str] | None,
) -> Iterator[None]:
    """Open the replay buffer of a run, if its pipeline has one. Rows of other tasks in it are a warning.

    Args:
        learners: learners of the run.
        config: settings of the run.
        run: the run, in whose folder the buffer is if the configuration names no other.
        is_resumed: whether the folder is an earlier run's.
        has_checkpoint: whether one of its checkpoints is restored next.
        tasks: tasks of the run; None: any.

    Raises: ConfigError if another process has the buffer; DataError for rows that do not fit.
    """
    if not learns_from_buffer(config.pipeline):
        yield
        return
    opened = find_replay(learners, config).opened(
        run.path,
        is_resumed=is_resumed,
        has_checkpoint=has_checkpoint,
        find_needed=partial(list_needed_segments, run.checkpoints),
    )
    with opened as buffer:
        # loaded by `existing`: imported rows may have an instruction for the name of their task
        others = sorted(set(buffer.tasks) - set(buffer.tasks if tasks is None else tasks))
        if others:
            _log.warning(
                "%s has rows of %s, which this run has no episodes of, and learns from them too.",
                buffer.folder,
                ", ".join(others),
            )
        yield


async def import_demonstrations(
    learners: LearnerTeam,
    config: LearningConfig,
    team: Team,
    lane: DeviceLane,
    tasks: Collection[str],
) -> None:
    """Store the demonstrations that a new run begins with, if it has some.

    Args:
        learners: learners of the run.
        config: settings of the run.
        team: its policy.
        lane: computes with it.
        tasks: tasks of the run; demonstrations of others are left out.

    Raises: ConfigError, DataError for episodes that do not fit the policy.
    """
    if not learns_from_buffer(config.pipeline):
        return
    # imported here, because other runs do without heads
    from vla_rl.run.imported_rows import RowImporter
    from vla_rl.team.heads import get_head_learner, require_head

    _, policy, settings = require_head(config, team)
    source = settings.replay.demonstrations
    if source is not None:
        importer = RowImporter(policy, get_head_learner(learners), lane, tasks)
        number = await importer.import_rows(Path(source), is_demonstration=True)
        print(f"{number} demonstrations of {source} are in the replay buffer", flush=True)
