"""Evaluate a checkpoint in a process of its own, while this machine does anything else.

    evaluate_checkpoint ──► CheckpointEvaluator (a fresh process per checkpoint)
                   records ◄──┘  loads the policy ─► run_each ─► its own simulators

A process never sees more than one checkpoint, so no record can come from other weights. Decisions are
computed in batches of one: which episodes happen to wait together changes no result, and an
evaluation of the same checkpoint at any other time gives the same records, bit for bit.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import msgspec

from vla_rl.actors import Actor, ChildProcess, Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.evaluation.records import EpisodeRecord, Measure, make_record
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.imports import import_path

logger = logging.getLogger(__name__)

MOST_EXITS: Final = 3
"""Evaluator processes in a row that may die without finishing an episode."""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an evaluation but the checkpoint and its episodes, as plain values.

    Example:
        EvaluatorSettings(policy_class="vla_rl.models.openvla_oft:OpenVlaOft", measure="success_rate",
            contact_sheet=None, simulators=SimulatorConfig(num_envs=2), device="cpu", torch_threads=1,
            niceness=10)
    """

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    measure: Measure
    """The measure that the records hold."""

    contact_sheet: str | None
    """`module:function` that writes a contact sheet of a trajectory."""

    simulators: SimulatorConfig
    device: str
    torch_threads: int
    niceness: int


class CheckpointEvaluator(Actor):
    """Runs the episodes of one checkpoint; its process ends with it.

    Args:
        settings: the policy's class, simulators, device and measure.
    """

    def __init__(self, settings: EvaluatorSettings) -> None:
        self._settings = settings
        self._sheet_failures = FailureReporter(
            "contact sheets of held-out episodes", "that episode has none"
        )

    async def on_start(self) -> None:
        """Lower the priority, before torch is imported and simulators are forked: they inherit it."""
        os.nice(self._settings.niceness)

    async def evaluate(
        self, run: str, version: int, policy: str, episodes: list[EpisodeSpec]
    ) -> AsyncIterator[EpisodeRecord]:
        """Run each episode once and yield its record, in the order in which episodes end.

        Args:
            run: the run's folder, for contact sheets.
            version: the weight version of the checkpoint.
            policy: folder of the policy.
            episodes: the episodes.
        """
        # room for all records, so that no episode waits for the reader
        records: asyncio.Queue[EpisodeRecord | None] = asyncio.Queue(len(episodes) + 1)
        directory = RunDirectory(Path(run))

        async def done(trajectory: Trajectory) -> None:
            await self._write_contact_sheet(directory, version, trajectory)
            records.put_nowait(make_record(trajectory, self._settings.measure, weights=version))

        async def run_episodes() -> None:
            try:
                await self._run_episodes(Path(policy), version, episodes, done)
            finally:
                records.put_nowait(None)

        # a task of its own: groups of tasks must not be open across a yield, because a failure in
        # one of them would cancel the reader
        task = asyncio.create_task(run_episodes(), name=f"held-out episodes of weights {version}")
        try:
            while (record := await records.get()) is not None:
                yield record
            await task
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _run_episodes(
        self,
        policy: Path,
        version: int,
        episodes: Sequence[EpisodeSpec],
        done: Callable[[Trajectory], Awaitable[None]],
    ) -> None:
        # imported here, at low priority: torch takes 2 s of a core
        from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine

        settings = self._settings
        # a simulator without an episode would cost its start and its memory all the same
        num_envs = min(settings.simulators.num_envs, len(episodes))
        simulators = msgspec.structs.replace(settings.simulators, num_envs=num_envs)
        # in a thread, because seconds of reading a checkpoint would count as a frozen process
        model = await asyncio.to_thread(load_policy, settings.policy_class, policy, settings.device)
        async with (
            Runtime("held-out") as runtime,
            DeviceLane(settings.torch_threads) as lane,
            SimulatorPool(runtime, simulators, specs=[each.env for each in episodes]) as pool,
            TorchActionEngine(model, lane, EngineConfig(is_deterministic=True), version) as engine,
        ):
            await run_each(pool, engine, embodied_agent_within_range, episodes, done)

    async def _write_contact_sheet(
        self, run: RunDirectory, version: int, trajectory: Trajectory
    ) -> None:
        if self._settings.contact_sheet is None:
            return
        try:
            await resolve_name(self._settings.contact_sheet)(run, version, trajectory)
        except (OSError, ValueError) as error:
            self._sheet_failures.failed(trajectory.episode.task, error)
        else:
            self._sheet_failures.worked()


async def evaluate_checkpoint(
    runtime: Runtime,
    settings: EvaluatorSettings,
    run: RunDirectory,
    version: int,
    policy: Path,
    missing: Callable[[], Sequence[EpisodeSpec]],
    done: Callable[[EpisodeRecord], Awaitable[None]],
) -> None:
    """Run the missing episodes of a checkpoint, and pass each record to `done` as its episode ends.

    A process that dies is replaced, and the next one runs what is missing then.

    Args:
        runtime: owns the process.
        settings: the policy's class, simulators, device and measure.
        run: the run's directory, for contact sheets.
        version: the weight version of the checkpoint.
        policy: folder of the policy.
        missing: returns the episodes that have no record yet.
        done: stores a record.

    Raises: ActorDied if process after process dies without finishing an episode; what an
        environment or the loading of the policy raises.
    """
    num_in_a_row = 0
    while episodes := list(missing()):
        try:
            await _evaluate_once(runtime, settings, run, version, policy, episodes, done)
        except ActorDied as error:
            # an evaluator that finished an episode made progress, so it was not the checkpoint that
            # killed it
            num_in_a_row = 1 if len(missing()) < len(episodes) else num_in_a_row + 1
            if num_in_a_row >= MOST_EXITS:
                error.add_note(
                    f"that was the evaluator of weights {version}, the last of {num_in_a_row} that "
                    "finished no episode; with less memory to spare, lower --held-out.simulators"
                )
                raise
            logger.warning("the evaluator of weights %d is replaced: %s", version, error)


async def _evaluate_once(
    runtime: Runtime,
    settings: EvaluatorSettings,
    run: RunDirectory,
    version: int,
    policy: Path,
    episodes: list[EpisodeSpec],
    done: Callable[[EpisodeRecord], Awaitable[None]],
) -> None:
    evaluator = await runtime.spawn(
        CheckpointEvaluator,
        settings,
        name=f"evaluator of weights {version}",
        # set before the process starts: torch reads the variable when it is imported, and never
        # again
        placement=ChildProcess(env={"OMP_NUM_THREADS": str(settings.torch_threads)}),
        start_timeout_s=settings.simulators.start_timeout_s,
    )
    try:
        records = evaluator.evaluate(str(run.path), version, str(policy), episodes)
        # a stream that is left early has to end its episodes before the process is killed
        async with aclosing(records):  # type: ignore[type-var]  # a stream has `aclose`
            async for record in records:
                await done(record)
    finally:
        # not stopped: with a killed process its simulators end too, and nothing of it is to be kept
        await runtime.kill(evaluator)


def evaluator_settings(
    model: Any,
    measure: Measure,
    contact_sheet: Callable[..., Any] | None,
    simulators: SimulatorConfig,
    *,
    torch_threads: int,
    niceness: int,
) -> EvaluatorSettings:
    """Return the settings for evaluating checkpoints of `model`.

    Raises: ConfigError if another process could not load its checkpoints, or import the function.
    """
    kind = type(model)
    if not callable(getattr(kind, "load", None)):
        raise ConfigError(
            f"{kind.__name__} has no classmethod load(folder), which the process that runs "
            "held-out episodes during training needs to read its checkpoints; add it, or leave "
            "held_out.every unset"
        )
    try:
        return EvaluatorSettings(
            policy_class=import_path(kind),
            measure=measure,
            contact_sheet=None if contact_sheet is None else import_path(contact_sheet),
            simulators=simulators,
            # the type alone: the number of the GPU belongs to the learner, which may have several
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
    model = resolve_name(policy_class).load(folder)
    model.network.to(device)
    return model
