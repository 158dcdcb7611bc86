"""Print what would go wrong on this machine: `vla-rl doctor [--checkpoint FOLDER]`.

Each result says what it is, why it matters and what to do. The exit status is 1 if one of them is
an error, else 0. All checks are made side by side, within one time limit.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Final

import tyro

from vla_rl.cli.doctor.libraries import (
    assets_with_digests,
    bowl_that_settles,
    kill_probes,
    opengl_that_draws,
    torch_that_computes,
    vllm_that_fits,
)
from vla_rl.cli.doctor.machine import (
    Check,
    CheckResult,
    Machine,
    descriptors,
    disk,
    gpus,
    gpus_in_use,
    not_finished,
    shared_memory,
)
from vla_rl.cli.doctor.policy import checkpoint_that_acts
from vla_rl.cli.help import option_registry
from vla_rl.errors import ConfigError
from vla_rl.run.terminal import lasting_output

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "descriptors": descriptors,
        "shared memory": shared_memory,
        "disk": disk,
        "GPUs": gpus,
        "assets and their digests": assets_with_digests,
        "vLLM": vllm_that_fits,
        "OpenGL, here and in a fork": opengl_that_draws,
        # seconds of a core each; on a busy machine these are the ones that are not finished
        "the policy": checkpoint_that_acts,
        "torch, torchvision, attention": torch_that_computes,
        "LIBERO's bowl settles": bowl_that_settles,
    }
)
"""Checks by the words that they are shown under; those that answer soonest come first."""

AT_START: Final[Sequence[Check]] = (shared_memory, disk, gpus_in_use)
"""Checks that take milliseconds. Descriptors are missing: a pool of simulators checks its own."""

THREADS: Final = "doctor"
"""First word of the names of the threads in which checks run."""

NUM_THREADS: Final = 4
"""Probes at a time: most import torch or MuJoCo, which keeps a core busy for a second or two."""


def run_checks(machine: Machine) -> dict[str, Sequence[CheckResult]]:
    """Make every check; one that does not end in time is a result itself."""
    until = time.monotonic() + machine.seconds
    pool = ThreadPoolExecutor(NUM_THREADS, THREADS)
    try:
        asked = {name: pool.submit(_run_check, check, machine) for name, check in CHECKS.items()}
        wait(asked.values(), timeout=max(until - time.monotonic(), 0.0))
        return {name: _check_results(future, machine) for name, future in asked.items()}
    finally:
        # a thread that hangs in a library cannot be ended; the process is left with it
        pool.shutdown(wait=False, cancel_futures=True)
        kill_probes()


def check_at_start(machine: Machine) -> list[CheckResult]:
    """Make the checks that take milliseconds."""
    return [result for check in AT_START for result in _run_check(check, machine)]


def _run_check(check: Check, machine: Machine) -> list[CheckResult]:
    try:
        return list(check(machine))
    except Exception as error:  # a check that fails is a fault of this machine or of the check
        return [
            CheckResult(
                f"{check.__name__} failed ({type(error).__name__}: {error})",
                "Whether it would go wrong is not known",
                "Report it with the output of `pip list`, if it cannot be explained",
                "warning",
            )
        ]


def _check_results(future: Future[list[CheckResult]], machine: Machine) -> list[CheckResult]:
    if future.done() and not future.cancelled():
        return future.result()
    return [not_finished("the check", machine.seconds)]


@lasting_output()
def main() -> int:
    """Make every check and print the results; return the exit status."""
    try:
        machine = tyro.cli(Machine, description=__doc__, registry=option_registry())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    num_errors = 0
    for name, results in run_checks(machine).items():
        print(f"{name}: in order" if not results else f"{name}:")
        for each in results:
            num_errors += each.severity == "error"
            print(f"  {each.severity}: {each.what}.\n    {each.why}.\n    {each.remedy}.")
    print(f"{num_errors} errors, {time.perf_counter() - began:.1f} s", flush=True)
    status = 1 if num_errors else 0
    if any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        os._exit(status)  # a check that loads a policy or hangs in a library cannot be ended
    return status
