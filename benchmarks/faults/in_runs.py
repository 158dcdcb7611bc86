"""Faults in a training run: its simulators, its fork server, its own process and its clock."""

import contextlib
import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.faults.leftovers import descendants, nothing_left
from benchmarks.faults.one_try import Try
from benchmarks.faults.toy_run import ToyRun, check_books, tail

_MOST_HITS = 8
"""Largest number of signals that one try sends to simulators."""

_STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def killed_simulators(case: Try) -> None:
    """Kill and freeze simulators at random moments; the run has to continue."""
    # All signals may hit the same episode, the more likely the slower its attempts are: with the
    # default of 3 attempts a run on a busy machine was lost, as it should be.
    attempts = ("--scheduler.max-attempts", str(_MOST_HITS + 1))
    with nothing_left(case), ToyRun(case, 24, *attempts) as run:
        run.until_update(1)
        for _ in range(case.dice.randint(3, _MOST_HITS)):
            time.sleep(case.dice.expovariate(1 / 0.3))
            _signal_one_of(case.dice, run.simulators(), (signal.SIGKILL, signal.SIGSTOP))
        _expect_success(case, run)


def lost_fork_servers(case: Try) -> None:
    """Kill or freeze the fork server, and simulators after it, so that another server has
    to start.
    """
    with nothing_left(case), ToyRun(case, updates=24) as run:
        run.until_update(1)
        for _ in range(2):
            simulators = run.simulators()
            _signal_one_of(case.dice, run.fork_servers(), (signal.SIGKILL, signal.SIGSTOP))
            time.sleep(case.dice.uniform(0.0, 0.5))
            _signal_one_of(case.dice, simulators, (signal.SIGKILL,))
            time.sleep(case.dice.uniform(0.5, 2.0))
        _expect_success(case, run)


def killed_runs(case: Try) -> None:
    """Kill the run with SIGKILL once or twice, at any point, and resume it each time."""
    updates = 16
    with nothing_left(case):
        arguments: Sequence[str] = ()
        root = case.folder / "runs"
        for _ in range(case.dice.randint(1, 2)):
            with ToyRun(case, updates, *arguments, root=root) as run:
                _wait_for_a_moment(case.dice, run, updates)
                run.send(signal.SIGKILL)
                run.process.wait()
                arguments = _resuming(run)
        with ToyRun(case, updates, *arguments, root=root) as run:
            _expect_success(case, run)


def stopped_runs(case: Try) -> None:
    """Stop the run by a signal, at any point.

    Its exit status has to report that, and it has to be resumable.
    """
    updates = 16
    number = case.dice.choice(sorted(_STOPS))
    root = case.folder / "runs"
    with nothing_left(case):
        with ToyRun(case, updates, root=root) as run:
            _wait_for_a_moment(case.dice, run, updates)
            run.send(number)
            status = run.until_ended()
            was_before_it_listened = status == -number and "update 1/" not in run.output()
            expected = status in (0, _STOPS[number]) or was_before_it_listened
            case.expect(
                expected,
                f"exit status {status} after {number.name}, expected "
                f"{_STOPS[number]}:\n{tail(run)}",
            )
            resuming = _resuming(run)
        with ToyRun(case, updates, *resuming, root=root) as run:
            _expect_success(case, run)


def paused_runs(case: Try) -> None:
    """Stop the whole tree of processes for seconds and continue it (Ctrl-Z, a suspended laptop).

    It must raise no alarm.
    """
    with nothing_left(case), ToyRun(case, updates=16) as run:
        run.until_update(1)
        for _ in range(2):
            _pause(case.dice, [psutil.Process(run.process.pid), *descendants(run.process.pid)])
            time.sleep(case.dice.uniform(0.1, 0.5))
        _expect_success(case, run)
        replaced = _replaced(run.folder)
        case.expect(not replaced, f"a pause of all processes was taken for a fault: {replaced}")


def _pause(dice: random.Random, processes: list[psutil.Process]) -> None:
    # The run's own process first and last: a terminal stops all at once, so no process may see that
    # others still run.
    for process in processes:
        _send(process, signal.SIGSTOP)
    time.sleep(dice.uniform(1.0, 6.0))
    dice.shuffle(processes)
    for process in processes:
        _send(process, signal.SIGCONT)


def _wait_for_a_moment(dice: random.Random, run: ToyRun, updates: int) -> None:
    """Wait for a random moment: during import and start, or shortly after an update, when
    checkpoints are written.
    """
    if dice.random() < 0.3:
        time.sleep(dice.uniform(0.0, 10.0))
    else:
        run.until_update(dice.randint(1, updates - 2))
        time.sleep(dice.expovariate(1 / 0.1))


def _resuming(run: ToyRun) -> Sequence[str]:
    """Return the arguments that resume a run; none if it ended before it had a directory."""
    return () if run.folder is None else ("--resume", str(run.folder))


def _expect_success(case: Try, run: ToyRun) -> None:
    status = run.until_ended()
    case.expect(status == 0, f"exit status {status}, expected 0:\n{tail(run, 30)}")
    case.expect("Traceback" not in run.output(), f"a traceback in the output:\n{tail(run, 30)}")
    check_books(case, run.folder, run.updates)


def _replaced(folder: Path | None) -> dict[str, float]:
    """Return the number of replaced simulators by cause, from the last metrics line."""
    if folder is None:
        return {}
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    causes = ("died", "frozen")
    return {cause: n for cause in causes if (n := last.get(f"simulation/replaced/{cause}", 0.0))}


def _signal_one_of(
    dice: random.Random, processes: list[psutil.Process], numbers: Sequence[signal.Signals]
) -> None:
    if processes:
        _send(dice.choice(processes), dice.choice(numbers))


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
        process.send_signal(number)
