"""Evaluate a checkpoint in a process of its own, beside whatever else this machine does.

    evaluate_checkpoint ──► Evaluator (a fresh process per checkpoint)
                     lines ◄──┘  loads the policy ─► run_each ─► its own simulators

A process never sees more than one checkpoint, so no line can come from other weights. Decisions are
computed in batches of one: which episodes happen to wait together changes no result, and an
evaluation of the same checkpoint at any other time gives the same lines, bit for bit.
"""

import asyncio
import logging
import os
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.actors import Actor, ChildProcess, Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.imports import import_path

logger = logging.getLogger(__name__)

MOST_DEATHS: Final = 3
"""Evaluator processes in a row that may die without finishing an episode."""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an evaluation but the checkpoint and its episodes, as plain values."""

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    line_of: str
    """`module:function` that turns a weight version and a trajectory into a line."""

    film: str | None
    """`module:function` that makes a video of a trajectory."""

    simulators: SimulatorConfig
    device: str
    torch_threads: int
    niceness: int


class CheckpointEvaluator(Actor):
    """Runs the episodes of one checkpoint; its process ends with it.

    Args:
        settings: the policy's class, simulators, device and format of the lines.
    """

    def __init__(self, settings: EvaluatorSettings) -> None:
        self._settings = settings
        self._film_failures = FailureReporter(
            "film strips of held-out episodes", "that episode has none"
        )

    async def on_start(self) -> None:
        """Lower the priority, before torch is imported and simulators are forked: they inherit it."""
        os.nice(self._settings.niceness)

    async def evaluate(
        self, run: str, version: int, policy: str, episodes: list[EpisodeSpec]
    ) -> AsyncIterator[bytes]:
        """Run each episode once and yield its line, in the order in which episodes end.

        Args:
            run: the run's folder, for videos.
            version: the weight version of the checkpoint.
            policy: folder of the policy.
            episodes: the episodes.
        """
        # room for all lines, so that no episode waits for the reader
        lines: asyncio.Queue[bytes | None] = asyncio.Queue(len(episodes) + 1)
        directory, line_of = RunDirectory(Path(run)), pkgutil.resolve_name(self._settings.line_of)

        async def done(trajectory: Trajectory) -> None:
            await self._make_film(directory, version, trajectory)
            lines.put_nowait(line_of(version, trajectory))

        async def run_held_out() -> None:
            try:
                await self._run_all(Path(policy), version, episodes, done)
            finally:
                lines.put_nowait(None)

        # a task of its own: groups of tasks must not be open across a yield, because a failure in
        # one of them would cancel the reader
        running = asyncio.create_task(
            run_held_out(), name=f"held-out episodes of weights {version}"
        )
        try:
            while (line := await lines.get()) is not None:
                yield line
            await running
        finally:
            running.cancel()
            await asyncio.wait((running,))

    async def _run_all(
        self,
        policy: Path,
        version: int,
        episodes: Sequence[EpisodeSpec],
        done: Callable[[Trajectory], Awaitable[None]],
    ) -> None:
        # imported here, at low priority: torch takes 2 s of a core
        from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine

        settings = self._settings
        num_envs = min(settings.simulators.num_envs, len(episodes))
        simulators = msgspec.structs.replace(settings.simulators, num_envs=num_envs)
        model = await asyncio.to_thread(load_policy, settings.policy_class, policy, settings.device)
        async with (
            Runtime("held-out") as runtime,
            DeviceLane(settings.torch_threads) as lane,
            SimulatorPool(runtime, simulators, specs=[each.env for each in episodes]) as pool,
            TorchActionEngine(model, lane, EngineConfig(is_deterministic=True), version) as engine,
        ):
            await run_each(pool, engine, embodied_agent_within_range, episodes, done)

    async def _make_film(self, run: RunDirectory, version: int, trajectory: Trajectory) -> None:
        if self._settings.film is None:
            return
        try:
            await pkgutil.resolve_name(self._settings.film)(run, version, trajectory)
        except (OSError, ValueError) as error:
            self._film_failures.failed(trajectory.episode.task, error)
        else:
            self._film_failures.worked()


async def evaluate_checkpoint(
    runtime: Runtime,
    settings: EvaluatorSettings,
    run: RunDirectory,
    version: int,
    policy: Path,
    missing: Callable[[], Sequence[EpisodeSpec]],
    done: Callable[[bytes], Awaitable[None]],
) -> None:
    """Run the missing episodes of a checkpoint, and pass each line to `done` as its episode ends.

    A process that dies is replaced, and the next one runs what is missing then.

    Args:
        runtime: owns the process.
        settings: the policy's class, simulators, device and format of the lines.
        run: the run's directory, for videos.
        version: the weight version of the checkpoint.
        policy: folder of the policy.
        missing: returns the episodes that have no line yet.
        done: stores a line.

    Raises: ActorDied if process after process dies without finishing an episode; what an
        environment or the loading of the policy raises.
    """
    deaths = 0
    while episodes := list(missing()):
        try:
            await _evaluate_once(runtime, settings, run, version, policy, episodes, done)
        except ActorDied as death:
            deaths = 1 if len(missing()) < len(episodes) else deaths + 1
            if deaths >= MOST_DEATHS:
                death.add_note(
                    f"that was the evaluator of weights {version}, the last of {deaths} that "
                    "finished no episode; with less memory to spare, lower --held-out.simulators"
                )
                raise
            logger.warning("the evaluator of weights %d is replaced: %s", version, death)


async def _evaluate_once(
    runtime: Runtime,
    settings: EvaluatorSettings,
    run: RunDirectory,
    version: int,
    policy: Path,
    episodes: list[EpisodeSpec],
    done: Callable[[bytes], Awaitable[None]],
) -> None:
    evaluator = await runtime.spawn(
        CheckpointEvaluator,
        settings,
        name=f"evaluator of weights {version}",
        placement=ChildProcess(env={"OMP_NUM_THREADS": str(settings.torch_threads)}),
        start_timeout_s=settings.simulators.start_timeout_s,
    )
    try:
        lines = evaluator.evaluate(str(run.path), version, str(policy), episodes)
        async with aclosing(lines):  # type: ignore[type-var]  # a stream has `aclose`
            async for line in lines:
                await done(line)
    finally:
        # not stopped: with a killed process its simulators end too, and nothing of it is to be kept
        await runtime.kill(evaluator)


def evaluator_settings(
    model: Any,
    line_of: Callable[..., Any],
    film: Callable[..., Any] | None,
    simulators: SimulatorConfig,
    *,
    torch_threads: int,
    niceness: int,
) -> EvaluatorSettings:
    """Return the settings for evaluating checkpoints of `model`.

    Raises: ConfigError if another process could not load its checkpoints, or import the functions.
    """
    kind = type(model)
    if not callable(getattr(kind, "load", None)):
        raise ConfigError(
            f"{kind.__name__} has no classmethod load(folder), which the process that runs "
            "held-out episodes beside training needs to read its checkpoints; add it, or leave "
            "held_out.every unset"
        )
    try:
        return EvaluatorSettings(
            policy_class=import_path(kind),
            line_of=import_path(line_of),
            film=None if film is None else import_path(film),
            simulators=simulators,
            device=next(model.network.parameters()).device.type,
            torch_threads=torch_threads,
            niceness=niceness,
        )
    except TypeError as error:
        raise ConfigError(
            f"held_out.every needs parts that another process can import: {error}"
        ) from error


def load_policy(policy_class: str, folder: Path, device: str) -> Any:
    """Load a policy of the class `module:Class` from its folder, onto a device."""
    model = pkgutil.resolve_name(policy_class).load(folder)
    model.network.to(device)
    return model
