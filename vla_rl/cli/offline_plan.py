"""The plan of a run that learns from stored episodes alone, and a look at all that it would read."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.syntax import Syntax

from vla_rl.cli.memory_plan import RANK_BYTES
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.reporting import MemoryItem, available_bytes, memory_table
from vla_rl.reporting.run_directory import RunDirectory, require_writable
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    from vla_rl.team.members import Team


async def plan_offline(
    config: EmbodiedConfig, team: "Team", *, resume: Path | None, resume_from: str | None
) -> None:
    """Print what a run without simulators would do, and look at everything that it would read.

    Args:
        config: settings of the run; `replay.from` is set.
        team: its policy.
        resume: an earlier run to go on with; None: a new one.
        resume_from: name of its checkpoint; None: the newest one.

    Raises: ConfigError, CheckpointError, DataError: what `learn_offline` would raise before its first update.
    """
    # torch takes 2 s to import: `--help` must not wait
    from vla_rl.learner import verify_checkpoint
    from vla_rl.run.resuming import checkpoint_to_resume
    from vla_rl.run.stored_rows import check_sources
    from vla_rl.team.heads import list_memory

    console = plain_console()
    console.print(
        Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json")
    )
    items = [
        MemoryItem("Python, torch and the rest of this process", RANK_BYTES),
        *(MemoryItem(name, size) for name, size in list_memory(config, team).items()),
    ]
    console.print(memory_table("Memory estimate", items, available_bytes()))
    print(
        f"{config.run.updates} updates of {config.off_policy.offline_steps} gradient steps, without an "
        f"environment, from {config.replay.source}",
        flush=True,
    )
    if resume is None:
        require_writable(Path(config.run.root))
        await asyncio.to_thread(check_sources, config, team)
    else:
        require_writable(resume)
        await checkpoint_to_resume(RunDirectory.existing(resume), resume_from, verify_checkpoint)
