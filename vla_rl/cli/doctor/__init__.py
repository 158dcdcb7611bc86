"""Checks that do once what a run does often, and name what would go wrong: `vla-rl doctor`.

    Patient ─► checks, side by side, all in at most 20 s ─► findings: what, why, remedy

A check is a function from a `Patient` to findings; none means that nothing is wrong. What can hang
or crash (OpenGL, a compiled library) is tried in a process of its own. `AT_START` are the checks
that cost milliseconds; every training run makes them.
"""

from vla_rl.cli.doctor.checks import AT_START, CHECKS, THREADS, examine, findings_at_start
from vla_rl.cli.doctor.finding import Finding, Patient

__all__ = ["AT_START", "CHECKS", "THREADS", "Finding", "Patient", "examine", "findings_at_start"]
