"""GPUs that torch can use: present, driven by a driver that fits, and free."""

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Final

from vla_rl.cli.doctor.finding import Finding, Patient
from vla_rl.reporting.memory import GpuMemory, gpu_memory

IN_USE_SHARE: Final = 0.05
"""Share of a GPU's memory in use from which another program counts as its user; a desktop or a
monitor takes less."""


def gpus(patient: Patient) -> Iterable[Finding]:
    """Check that torch sees the GPUs that the driver lists, and that others leave them free."""
    listed = gpu_memory()
    if not listed:
        yield from _without_gpu()
        return
    yield from _seen_by_torch(len(listed))
    yield from _in_use(listed)


def gpus_in_use(patient: Patient) -> Iterable[Finding]:
    """Check that others leave the GPUs free; imports no torch."""
    return _in_use(gpu_memory())


def _in_use(listed: Sequence[GpuMemory]) -> Iterable[Finding]:
    for number, gpu in enumerate(listed):
        used = gpu.total_bytes - gpu.free_bytes
        if used > IN_USE_SHARE * gpu.total_bytes:
            yield Finding(
                f"GPU {number} ({gpu.name}) has {used / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} "
                "GiB in use by other programs",
                "The run may end in an out-of-memory error when they, or it, need more",
                "End them (`nvidia-smi` lists them), or choose another GPU with "
                "CUDA_VISIBLE_DEVICES",
            )


def _without_gpu() -> Iterable[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding(
            "there is no NVIDIA GPU, or no driver",
            "Policies compute on the CPU: enough for the small ones that ship, not for a 7B",
            "In a container, start it with `--gpus all`; else install the driver",
            "warning",
        )
        return
    yield Finding(
        f"nvidia-smi lists no GPU ({_smi_words()})",
        "Policies would compute on the CPU",
        "Load the driver (`modprobe nvidia`), or install the one of the running kernel and restart",
    )


def _smi_words() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi"],
            capture_output=True,
            text=True,
            timeout=10.0,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip().partition("\n")[0] or "it prints nothing"


def _seen_by_torch(num_listed: int) -> Iterable[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding(
            f"torch {torch.__version__} is a build without CUDA, and this machine has {num_listed} "
            "GPUs",
            "Policies would compute on the CPU",
            "Install the build of the package index: `pip install --force-reinstall torch==2.13.* "
            "torchvision==0.28.*`, without an index of CPU builds",
        )
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        num_seen = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        yield Finding(
            f"torch cannot use the GPU: {str(error).partition(chr(10))[0].rstrip('.')}",
            "Policies would compute on the CPU, or fail",
            f"If the driver is too old for CUDA {torch.version.cuda}, update it, or install a torch "
            "that was built for an older CUDA",
        )
        return
    if num_seen < num_listed:
        yield Finding(
            f"torch sees {num_seen} of {num_listed} GPUs",
            "The others stand idle",
            "Unset CUDA_VISIBLE_DEVICES, if that was not on purpose",
            "warning",
        )
