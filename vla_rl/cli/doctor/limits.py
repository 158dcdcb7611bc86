"""Limits of this machine that a run would exceed: descriptors, shared memory, disk."""

import mmap
import os
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vla_rl.cli.doctor.finding import Finding, Patient
from vla_rl.util.processes import make_memory_file
from vla_rl.util.rlimits import DESCRIPTORS_OF_A_PROCESS, OTHER_DESCRIPTORS

GIB: Final = 2**30
MIB: Final = 2**20
TRIAL_BYTES: Final = 16 << 20

OTHER_RUN_BYTES: Final = 1 << 30
"""Videos, traces and metrics of a long run."""

STATE_SHARE: Final = 7
"""A checkpoint holds both moments and masters in float32 beside bfloat16 weights: (2 + 12) / 2."""


def descriptors(patient: Patient) -> Iterable[Finding]:
    """Check that as many processes as wanted may be started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = OTHER_DESCRIPTORS + DESCRIPTORS_OF_A_PROCESS * patient.num_envs
    need += len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and hard < need:
        yield Finding(
            f"this process may open {hard} files, and {patient.num_envs} simulators need {need}",
            "The run is refused at its start",
            f"Run `ulimit -n {need}` in the shell before, which may need an administrator, or take "
            "fewer simulators (--simulators.num-envs)",
        )


def shared_memory(patient: Patient) -> Iterable[Finding]:
    """Check that memory can be shared between processes, and that its folder has room."""
    try:
        fd = make_memory_file("vla_rl-doctor", TRIAL_BYTES)
        try:
            with mmap.mmap(fd, TRIAL_BYTES) as memory:
                memory[-1] = 1
        finally:
            os.close(fd)
    except OSError as error:
        yield Finding(
            f"no memory can be shared between processes ({error})",
            "Pictures travel through shared memory; no simulator can start",
            "Raise the limits on memory and files (`ulimit -v`, `ulimit -f`, the container's)",
        )
    folder = Path(patient.shared_memory)
    if patient.shared_mib == 0:
        return
    try:
        room = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(
            f"{folder} cannot be used ({error.strerror})",
            "NCCL and vLLM share data there",
            "Mount it: `mount -t tmpfs tmpfs /dev/shm`",
        )
        return
    if room < patient.shared_mib * MIB:
        yield Finding(
            f"{folder} has room for {room / MIB:.0f} MiB, expected {patient.shared_mib}",
            "Several learner ranks (NCCL) and vLLM die there with a bus error, without a word",
            "Start the container with `--shm-size=8g` or `--ipc=host`",
        )


def disk(patient: Patient) -> Iterable[Finding]:
    """Check that the run's folder has room for its checkpoints."""
    folder = Path(patient.root).absolute()
    while not folder.exists():
        folder = folder.parent
    each = patient.checkpoint_bytes or STATE_SHARE * _weight_bytes(patient.checkpoint)
    # the newest is complete before the oldest is removed
    need = (patient.keep_checkpoints + 1) * each + OTHER_RUN_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        yield Finding(
            f"{folder} has {free / GIB:.1f} GiB free, and {patient.keep_checkpoints} checkpoints, "
            f"the one being written, videos and metrics take {need / GIB:.1f} GiB",
            "Checkpoints would be put off with a warning, and the last one would be an error",
            "Choose another --run.root, or fewer --run.keep-checkpoints",
        )


def _weight_bytes(checkpoint: str | None) -> int:
    folder = Path(checkpoint).expanduser() if checkpoint is not None else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".pt", ".bin")
    )
