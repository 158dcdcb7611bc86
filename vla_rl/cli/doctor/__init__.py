"""Checks that do once what a run does often, and name what would go wrong: `vla-rl doctor`.

    Machine ─► checks, side by side, all in at most 20 s ─► results: what, why, remedy

A check is a function from a `Machine` to results; none means that nothing is wrong. What can hang
or crash (OpenGL, a compiled library) is probed in a process of its own. `AT_START` are the checks
that cost milliseconds; every training run makes them.
"""

from vla_rl.cli.doctor.checks import AT_START, CHECKS, THREADS, check_at_start, run_checks
from vla_rl.cli.doctor.machine import CheckResult, Machine

__all__ = [
    "AT_START",
    "CHECKS",
    "THREADS",
    "CheckResult",
    "Machine",
    "check_at_start",
    "run_checks",
]
