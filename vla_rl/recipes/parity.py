"""Compare two ways of running one LIBERO episode, until their first difference: `vla-rl parity A B`.

A and B are each a trace (a file that another program wrote), or settings of ours:

    vla-rl parity exact fast                          our two kinds of physics and images
    vla-rl parity theirs.jsonl exact                  somebody's loop against ours
    vla-rl parity exact python=/venvs/other/bin/python,physics=exact,quality=exact
    vla-rl parity exact none --save here              only record: here/a.jsonl, for another machine

The first value that differs is named, with both values and its usual reasons. The exit status is 0
if all values are equal, and 1 if one differs.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from vla_rl import engines
from vla_rl.actors import Runtime
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ConfigError
from vla_rl.evaluation import embodied_agent_within_range, run_each
from vla_rl.evaluation.parity import BOUNDARIES, Comparison, Trace, compare, read_trace, write_trace
from vla_rl.evaluation.scenes import (
    ImageSize,
    LiberoAssets,
    LiberoQuality,
    LiberoScene,
    Physics,
    Quality,
    Scenes,
    StepLimit,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import check_starts, libero_episode, require_for_libero
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.shipped import SHIPPED
from vla_rl.types import Config, PositiveInt, Sampling, Trajectory
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


_WAYS: Final = {"exact": "physics=exact,quality=exact", "fast": "physics=fast,quality=fast"}


class Way(Config, frozen=True, kw_only=True):
    """One of our ways to run an episode, read from text such as `physics=fast,quality=exact`."""

    physics: Physics = "exact"
    quality: LiberoQuality = "exact"
    scenes: Scenes = "same"
    python: str | None = None
    """Interpreter of the simulator; None: this one."""


class _WayOptions(NamedTuple):
    """Options of both sides, with those of one way."""

    image_size: int | None
    quality: Quality | None
    assets: str | None
    physics: Physics


class ParityConfig(CheckpointConfig, frozen=True, kw_only=True):
    """The two ways, the start, and the policy that acts in ours."""

    first: tyro.conf.Positional[str] = "exact"
    """A trace (.jsonl), or settings of ours: exact, fast, or physics, quality, scenes and python as
    `name=value,name=value`."""

    second: tyro.conf.Positional[str] = "fast"
    """The other one, in the same form; `none` only records the first (with --save)."""

    checkpoint: str = SHIPPED
    """Folder or hub id of the policy that acts. shipped: the base policy of this package that was
    trained on the assets in use."""

    suite: str = "libero_object"
    """Suite of the task."""

    task_id: int = 1
    """Number of the task in its suite."""

    init_state_id: int = 0
    """Initial state that the episode starts from."""

    scene_seed: int = 0
    """Seed of what initial states leave open, the positions of fixtures."""

    decisions: PositiveInt | None = None
    """Compare this many decisions. None: the whole episode."""

    step_limit: StepLimit | None = None
    """None: the suite's published limit."""

    image_size: ImageSize | None = None
    """None: 84 for the shipped policy, else 256, as published policies were trained."""

    assets: LiberoAssets = None

    save: Path | None = None
    """Also write the recorded traces into this folder, as a.jsonl and b.jsonl."""

    def __post_init__(self) -> None:
        self.require(
            self.second != "none" or self.save is not None,
            "second",
            "another trace or way to compare with, or --save to record only the first",
        )


async def main(command: Command[Launch, ParityConfig]) -> int:
    """Read or record both traces, compare them, and print the result."""
    config, console = command.config, plain_console()
    sides = [side for side in (config.first, config.second) if side != "none"]
    ways = [None if _is_trace(side) else parse_way(side) for side in sides]
    check_starts(config.suite, [config.task_id], [config.init_state_id])
    if command.launch.dry_run:
        for side, way in zip(sides, ways, strict=True):
            print(f"{side}: {'a trace' if way is None else 'would be recorded'}")
        return 0
    policy = None
    traces = []
    for side, way in zip(sides, ways, strict=True):
        if way is None:
            traces.append(await asyncio.to_thread(read_trace, Path(side)))
            continue
        # loaded once: both sides act with the same weights
        if policy is None:
            policy = await asyncio.to_thread(_load_checkpoint, config)
            print(policy.describe(), flush=True)
        traces.append(await _record_trace(config, policy, way, side))
    if config.save is not None:
        await asyncio.to_thread(config.save.mkdir, parents=True, exist_ok=True)
        for letter, trace in zip("ab", traces, strict=False):
            path = config.save / f"{letter}.jsonl"
            await asyncio.to_thread(write_trace, path, trace)
            print(f"{path}: {len(trace.entries)} values")
    if len(traces) == 1:
        return 0
    traces = [_first_decisions(trace, config.decisions) for trace in traces]
    comparison = compare(*traces)
    print_comparison(comparison, (traces[0].source, traces[1].source), console)
    return int(comparison.difference is not None)


def parse_way(text: str) -> Way:
    """Read settings from text. Raises: ConfigError naming what is wrong."""
    parts = _WAYS.get(text, text).split(",")
    pairs = [part.partition("=") for part in parts]
    known = Way.__struct_fields__
    if not all(equals and name in known for name, equals, _ in pairs):
        raise ConfigError(
            f"{text!r} is neither a trace (a file that ends in .jsonl) nor settings; expected "
            f"exact, fast, or {', '.join(known)} as name=value,name=value"
        )
    settings: dict[str, Any] = {name: value for name, _, value in pairs}
    return Way(**settings)


def print_comparison(comparison: Comparison, sources: tuple[str, str], console: Console) -> None:
    """Print a row for each boundary, and the first difference with its usual reasons."""
    different = comparison.difference
    table = Table("boundary", "values", "result", title=f"A: {sources[0]}\nB: {sources[1]}")
    for boundary in BOUNDARIES:
        name, result = boundary.name, "equal"
        if name in comparison.only_in_one:
            result = f"recorded only in {'AB'[comparison.only_in_one[name]]}"
        elif different and name == different.boundary.name:
            result = f"differs at decision {different.decision}"
        elif name in comparison.largest:
            result = f"equal up to {comparison.largest[name]:.1e}"
        elif name not in comparison.compared:
            continue
        # the loops of others record some boundaries alone
        elif comparison.compared[name] == 0:
            result = "not reached"
        table.add_row(name, str(comparison.compared.get(name, "")), result)
    console.print(table)
    if different is None:
        print(f"all values of {comparison.num_decisions} decisions are equal")
        return
    camera = f" of {different.key}" if different.key else ""
    console.print(
        f"the first difference is in the {different.boundary.name}{camera} of decision "
        f"{different.decision}: {different.size}\n"
        f"  A: {different.values[0]}\n  B: {different.values[1]}",
        markup=False,
    )
    console.print(f"  meaning: {different.boundary.meaning}", markup=False)
    if different.hint is not None:
        console.print(f"  found: {different.hint}", markup=False)
    console.print(f"  usual reasons: {different.boundary.suspects}", markup=False)


def _is_trace(side: str) -> bool:
    path = Path(side)
    # a typing mistake in a file's name must not be read as settings
    if path.suffix == ".jsonl" and not path.is_file():
        raise ConfigError(f"the trace {side} does not exist")
    return path.is_file()


def _first_decisions(trace: Trace, number: int | None) -> Trace:
    if number is None:
        return trace
    entries = tuple(
        # the success comes after the last decision, which a shortened trace does not have
        entry
        for entry in trace.entries
        if entry.decision < number and entry.boundary != "success"
    )
    return msgspec.structs.replace(trace, entries=entries)


def _load_checkpoint(config: ParityConfig) -> "RobotPolicy":
    folder = resolve_checkpoint(config.checkpoint, config.assets)
    policy = load_policy(folder, config, config.device)
    require_for_libero(policy, folder)
    return policy


async def _record_trace(config: ParityConfig, policy: "RobotPolicy", way: Way, side: str) -> Trace:
    # imports torch, which `--help` must not wait for
    from vla_rl.evaluation.parity.recording import record_trace

    options = _WayOptions(config.image_size, way.quality, config.assets, way.physics)
    scene = LiberoScene.from_options(options, config.checkpoint, config.step_limit, way.scenes)
    env = scene.make_env_spec(config.suite, config.task_id, config.scene_seed)
    task = f"{config.suite}/{config.task_id}"
    greedy = Sampling(greedy=True)
    episode = libero_episode(env, 0, task, config.init_state_id, sampling=greedy, seed=0)
    trajectories: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)

    simulator = SimulatorConfig(num_envs=1, python=way.python)
    async with (
        Runtime("parity") as runtime,
        engines.DeviceLane(num_threads=1) as lane,
        SimulatorPool(runtime, simulator, specs=[env]) as pool,
        engines.TorchActionEngine(policy, lane, EngineConfig(max_batch=1)) as engine,
    ):
        await run_each(pool, engine, embodied_agent_within_range, [episode], keep)
    return await asyncio.to_thread(record_trace, trajectories[0], policy, f"vla_rl, {side}")


cli = partial(run_recipe, Launch, ParityConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
