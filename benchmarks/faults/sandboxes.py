"""Dying sandboxes: the call runner or its owner is killed or frozen while calls and programs run."""

import contextlib
import signal
import time

import psutil

from benchmarks.faults.leftovers import nothing_left
from benchmarks.faults.one_try import Try
from benchmarks.faults.targets import ANSWERS_WITHIN_S, Target

_OWNER = "benchmarks.faults.sandbox_owner"


def dying_sandboxes(case: Try) -> None:
    """Kill or freeze call runners, after which calls continue, and then the owner, after which nothing
    may be left.
    """
    with nothing_left(case):
        with Target(case, _OWNER, ("--seed", str(case.dice.randrange(1 << 30)))) as owner:
            _expect_answers(case, owner, "at the start")
            for _ in range(case.dice.randint(1, 3)):
                time.sleep(case.dice.uniform(0.0, 1.0))
                _fault_to_runner(case, owner)
                owner.forget_lines()
                _expect_answers(case, owner, "after the call runner's end")
            if case.dice.random() < 0.5:
                _fault_to_runner(case, owner)
            owner.process.kill()
        # The next owner removes the folder of an owner that was killed.
        with Target(case, _OWNER, ("--calls", "8")) as owner:
            status = owner.process.wait(ANSWERS_WITHIN_S)
            case.expect(
                status == 0, f"the sandbox after a killed one ended with exit status {status}"
            )


def _expect_answers(case: Try, owner: Target, when: str) -> None:
    # More than one for each of the four callers, so that some calls start after the fault.
    for _ in range(8):
        if owner.until_line("answered") is None:
            case.expect(False, f"no call was answered {when} within {ANSWERS_WITHIN_S:.0f} s")
            return


def _fault_to_runner(case: Try, owner: Target) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for runner in psutil.Process(owner.process.pid).children():
            runner.send_signal(case.dice.choice((signal.SIGKILL, signal.SIGSTOP)))
