"""All checks, and how they are made: side by side, within one time limit."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Final

from vla_rl.cli.doctor.finding import Check, Finding, Patient, not_finished
from vla_rl.cli.doctor.gpu import gpus, gpus_in_use
from vla_rl.cli.doctor.graphics import opengl_that_draws
from vla_rl.cli.doctor.limits import descriptors, disk, shared_memory
from vla_rl.cli.doctor.physics import assets_with_digests, bowl_that_settles
from vla_rl.cli.doctor.policy import checkpoint_that_acts
from vla_rl.cli.doctor.torch_build import torch_that_computes, vllm_that_fits
from vla_rl.cli.doctor.trial import end_trials

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

SIDE_BY_SIDE: Final = 4
"""Trials at a time: most import torch or MuJoCo, which keeps a core busy for a second or two."""


def examine(patient: Patient) -> dict[str, Sequence[Finding]]:
    """Make every check; one that does not end in time is a finding itself."""
    until = time.monotonic() + patient.seconds
    pool = ThreadPoolExecutor(SIDE_BY_SIDE, THREADS)
    try:
        asked = {name: pool.submit(_made, check, patient) for name, check in CHECKS.items()}
        wait(asked.values(), timeout=max(until - time.monotonic(), 0.0))
        return {name: _found(future, patient) for name, future in asked.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        end_trials()


def findings_at_start(patient: Patient) -> list[Finding]:
    """Make the checks that take milliseconds."""
    return [finding for check in AT_START for finding in _made(check, patient)]


def _made(check: Check, patient: Patient) -> list[Finding]:
    try:
        return list(check(patient))
    except Exception as error:  # a check that fails is a fault of this machine or of the check
        return [
            Finding(
                f"{check.__name__} failed ({type(error).__name__}: {error})",
                "Whether it would go wrong is not known",
                "Report it with the output of `pip list`, if it cannot be explained",
                "warning",
            )
        ]


def _found(future: Future[list[Finding]], patient: Patient) -> list[Finding]:
    if future.done() and not future.cancelled():
        return future.result()
    return [not_finished("the check", patient.seconds)]
