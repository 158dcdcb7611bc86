"""A toy training run as a process: GRPO on CartPole with an MLP, which takes seconds, and the check
of its records.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from benchmarks.faults.leftovers import descendants, named_memory, note_memory_left
from benchmarks.faults.one_try import Try
from benchmarks.faults.targets import get_environment
from vla_rl import learner  # which imports torch once a checkpoint is looked at
from vla_rl.rollout.episode_records import SchedulerState

GROUP_SIZE: Final = 4
GROUPS_PER_UPDATE: Final = 2
EPISODES_PER_UPDATE: Final = GROUP_SIZE * GROUPS_PER_UPDATE

_RECIPE: Final = (
    *("--group-size", str(GROUP_SIZE)),
    *("--scheduler.groups-per-update", str(GROUPS_PER_UPDATE)),
    *("--simulators.num-envs", "3"),
    *("--num-starts", "8"),
    *("--step-limit", "60"),
    *("--run.checkpoint-every", "2"),
)
ENDS_WITHIN_S: Final = 240.0
_UPDATE: Final = re.compile(r"update (\d+)/")


class ToyRun:
    """One process of `train_toy`; `with` always ends it.

    A resume is another `ToyRun` with the same root.
    """

    def __init__(self, case: Try, updates: int, *arguments: str, root: Path | None = None) -> None:
        self._case = case
        self.root = root if root is not None else case.folder / "runs"
        self.updates = updates
        self.log = case.folder / f"output-{len(list(case.folder.glob('output-*')))}.txt"
        self._arguments = (
            *_RECIPE,
            "--run.root",
            str(self.root),
            "--run.updates",
            str(updates),
            *arguments,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.memory = set[Path]()

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vla_rl.recipes.train_toy", *self._arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=get_environment(self._case),
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        note_memory_left(self._case, self.memory)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process; available inside the `with` block and after it."""
        assert self._process is not None
        return self._process

    @property
    def folder(self) -> Path | None:
        """The run directory; None before it was made."""
        folders = sorted(self.root.glob("train_toy-*/config.json")) if self.root.is_dir() else []
        return folders[0].parent if folders else None

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def until_update(self, number: int) -> bool:
        """Wait until this update is reported; False if the run ended before."""
        return self._until(lambda: any(int(n) >= number for n in _UPDATE.findall(self.output())))

    def until_ended(self) -> int:
        """Wait for the end and return the exit status.

        A run that hangs breaks a guarantee, and is killed.
        """
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._case.expect(
                False, f"the run did not end within {ENDS_WITHIN_S:.0f} s: {self.output()[-2000:]}"
            )
            self.process.kill()
            return self.process.wait()

    def simulators(self) -> list[psutil.Process]:
        """Return the processes that the run's fork server started, which are the simulators."""
        self.note_memory()
        return [
            process for child in _children(self.process.pid) for process in _children(child.pid)
        ]

    def fork_servers(self) -> list[psutil.Process]:
        """Return the children of the run that have children of their own or wait to start some."""
        return _children(self.process.pid)

    def note_memory(self) -> None:
        """Record the named shared memory that the run and its processes have mapped now."""
        pids = [self.process.pid, *(process.pid for process in descendants(self.process.pid))]
        self.memory |= named_memory(pids)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the run's own process, as a job scheduler does."""
        self.note_memory()
        self.process.send_signal(number)

    def _until(self, holds: Callable[[], bool]) -> bool:
        until = time.monotonic() + ENDS_WITHIN_S
        while not holds():
            if self.process.poll() is not None:
                return holds()
            if time.monotonic() > until:
                self._case.expect(
                    False, f"nothing happened for {ENDS_WITHIN_S:.0f} s: {self.output()[-2000:]}"
                )
                return False
            time.sleep(0.05)
        return True


def check_books(case: Try, folder: Path | None, updates: int) -> None:
    """Check a finished run's metrics lines, checkpoint and ledger.

    Every update has exactly one complete line; the newest checkpoint is the last update's; every
    dispatched episode was trained, filtered, dropped, or is held by the checkpoint.
    """
    if folder is None:
        case.expect(False, "the run left no directory")
        return
    lines = _updates_of(case, folder / "metrics.jsonl")
    case.lost_metric_lines += sum(lines.count(update) != 1 for update in range(1, updates + 1))
    case.expect(
        set(lines) <= set(range(1, updates + 1)),
        f"metrics of updates that were never made: {lines}",
    )
    case.expect(lines == sorted(lines), f"metrics out of order: {lines}")
    newest = learner.latest_checkpoint(folder / "checkpoints")
    if newest is None:
        case.expect(False, "a finished run left no checkpoint")
        return
    checkpoint = asyncio.run(learner.load_checkpoint(newest))
    state = checkpoint.part("scheduler", SchedulerState)
    case.expect(
        state.version == updates,
        f"the newest checkpoint is of update {state.version}, expected {updates}",
    )
    ledger = state.ledger
    held = sum(len(group.plan.episodes) for group in state.groups)
    accounted = ledger.trained + ledger.filtered + sum(ledger.dropped.values()) + held
    case.lost_episodes += abs(ledger.dispatched - accounted) + abs(
        ledger.trained - updates * EPISODES_PER_UPDATE
    )


def tail(run: ToyRun, lines: int = 12) -> str:
    """Return the last lines of a run's output, for error reports."""
    return "\n".join(run.output().splitlines()[-lines:])


def _updates_of(case: Try, metrics: Path) -> Sequence[int]:
    updates = []
    for number, line in enumerate(metrics.read_bytes().splitlines(), 1) if metrics.exists() else ():
        try:
            updates.append(int(json.loads(line)["update"]))
        except (ValueError, KeyError, TypeError):
            case.expect(
                False, f"line {number} of metrics.jsonl is not a whole record: {line[:80]!r}"
            )
    return updates


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []
