"""The machine that is checked: what is meant to run on it, its limits, its GPUs.

A check is a function from a `Machine` to results; none means that nothing is wrong.
"""

import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from vla_rl.reporting.machine import GpuMemory, gpu_memory
from vla_rl.types import Config, PositiveFloat, PositiveInt
from vla_rl.util.processes import make_memory_file
from vla_rl.util.rlimits import DESCRIPTORS_OF_A_PROCESS, OTHER_DESCRIPTORS

SHARED_MEMORY: Final = Path("/dev/shm")

Severity: TypeAlias = Literal["error", "warning"]
"""error: something will fail or compute wrong results. warning: something is slower or missing."""


@dataclass(frozen=True)
class CheckResult:
    """Something that would go wrong."""

    what: str
    why: str
    """The consequence, if nothing is done."""

    remedy: str
    severity: Severity = "error"

    def __str__(self) -> str:
        """Format as one line."""
        return f"{self.severity}: {self.what}. {self.why}. {self.remedy}."


class Machine(Config, frozen=True, kw_only=True):
    """The machine, and what is meant to run on it."""

    checkpoint: str | None = None
    """Folder or hub id of a policy to look at too. None: no policy."""

    norm_key: str | None = None
    """Name of the policy's action statistics. None: the policy's only set."""

    policy_family: Literal["auto", "openvla", "openvla_oft", "continuous"] = "auto"
    """Family to read the policy as. auto: the one that its files name."""

    load_gib: float = 1.0
    """Size in GiB up to which the policy is loaded and asked for actions. Larger ones are looked at
    by their files alone; raise it to load them, which takes longer than 20 s."""

    num_envs: PositiveInt = 16
    """Simulators that will run at the same time."""

    root: str = "runs"
    """Parent folder of run directories."""

    keep_checkpoints: PositiveInt = 2
    """Checkpoints that a run keeps."""

    checkpoint_bytes: int | None = None
    """Size of a checkpoint. None: computed from the policy's weight files, 7 times their size: AdamW's
    two moments and masters in float32 beside bfloat16 weights."""

    shared_memory: str = str(SHARED_MEMORY)
    """Folder in memory that NCCL, vLLM and PyTorch's data loaders share data in."""

    shared_mib: int = 1024
    """Room that is needed there: NCCL takes up to tens of MiB for each pair of GPUs, vLLM's workers
    hundreds. Containers have 64 MiB unless told otherwise. 0 for one learner process without
    vLLM."""

    seconds: PositiveFloat = 20.0
    """Time limit of all checks together."""


def not_finished(what: str, seconds: float) -> CheckResult:
    """Return the result of a check that was not finished: nothing is known then."""
    return CheckResult(
        f"{what} was not finished within {seconds:.0f} s",
        "Whether it would go wrong is not known",
        "Close other programs, or allow more time with --seconds",
        "warning",
    )


Check: TypeAlias = Callable[[Machine], Iterable[CheckResult]]


GIB: Final = 2**30
MIB: Final = 2**20
PROBE_BYTES: Final = 16 << 20

OTHER_RUN_BYTES: Final = 1 << 30
"""Videos, traces and metrics of a long run."""

STATE_SHARE: Final = 7
"""A checkpoint holds both moments and masters in float32 beside bfloat16 weights: (2 + 12) / 2."""


def descriptors(machine: Machine) -> Iterable[CheckResult]:
    """Check that as many processes as wanted may be started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = OTHER_DESCRIPTORS + DESCRIPTORS_OF_A_PROCESS * machine.num_envs
    need += len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and hard < need:
        yield CheckResult(
            f"this process may open {hard} files, and {machine.num_envs} simulators need {need}",
            "The run is refused at its start",
            f"Run `ulimit -n {need}` in the shell before, which may need an administrator, or take "
            "fewer simulators (--simulators.num-envs)",
        )


def shared_memory(machine: Machine) -> Iterable[CheckResult]:
    """Check that memory can be shared between processes, and that its folder has room."""
    try:
        fd = make_memory_file("vla_rl-doctor", PROBE_BYTES)
        try:
            with mmap.mmap(fd, PROBE_BYTES) as memory:
                # memory is only taken when it is written to, and only then is a limit met
                memory[-1] = 1
        finally:
            os.close(fd)
    except OSError as error:
        yield CheckResult(
            f"no memory can be shared between processes ({error})",
            "Images travel through shared memory; no simulator can start",
            "Raise the limits on memory and files (`ulimit -v`, `ulimit -f`, the container's)",
        )
    folder = Path(machine.shared_memory)
    if machine.shared_mib == 0:
        return
    try:
        room = shutil.disk_usage(folder).free
    except OSError as error:
        yield CheckResult(
            f"{folder} cannot be used ({error.strerror})",
            "NCCL and vLLM share data there",
            "Mount it: `mount -t tmpfs tmpfs /dev/shm`",
        )
        return
    if room < machine.shared_mib * MIB:
        yield CheckResult(
            f"{folder} has room for {room / MIB:.0f} MiB, expected {machine.shared_mib}",
            "Several learner ranks (NCCL) and vLLM die there with a bus error, without a word",
            "Start the container with `--shm-size=8g` or `--ipc=host`",
        )


def disk(machine: Machine) -> Iterable[CheckResult]:
    """Check that the run's folder has room for its checkpoints."""
    folder = Path(machine.root).absolute()
    # a run makes its folder: until then the disk is that of the nearest parent
    while not folder.exists():
        folder = folder.parent
    each = machine.checkpoint_bytes or STATE_SHARE * _weight_bytes(machine.checkpoint)
    # the newest is complete before the oldest is removed
    need = (machine.keep_checkpoints + 1) * each + OTHER_RUN_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        yield CheckResult(
            f"{folder} has {free / GIB:.1f} GiB free, and {machine.keep_checkpoints} checkpoints, "
            f"the one being written, videos and metrics take {need / GIB:.1f} GiB",
            "Checkpoints would be put off with a warning, and the last one would be an error",
            "Choose another --run.root, or fewer --run.keep-checkpoints",
        )


def _weight_bytes(checkpoint: str | None) -> int:
    folder = Path(os.path.expanduser(checkpoint)) if checkpoint is not None else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".pt", ".bin")
    )


IN_USE_SHARE: Final = 0.05
"""Share of a GPU's memory in use from which another program counts as its user; a desktop or a
monitor takes less."""


def gpus(machine: Machine) -> Iterable[CheckResult]:
    """Check that torch sees the GPUs that the driver lists, and that others leave them free."""
    listed = gpu_memory()
    if not listed:
        yield from _without_gpu()
        return
    yield from _count_in_torch(len(listed))
    yield from _gpus_in_use(listed)


def gpus_in_use(machine: Machine) -> Iterable[CheckResult]:
    """Check that others leave the GPUs free; imports no torch."""
    return _gpus_in_use(gpu_memory())


def _gpus_in_use(listed: Sequence[GpuMemory]) -> Iterable[CheckResult]:
    for number, gpu in enumerate(listed):
        used = gpu.total_bytes - gpu.free_bytes
        if used > IN_USE_SHARE * gpu.total_bytes:
            yield CheckResult(
                f"GPU {number} ({gpu.name}) has {used / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} "
                "GiB in use by other programs",
                "The run may end in an out-of-memory error when they, or it, need more",
                "End them (`nvidia-smi` lists them), or choose another GPU with "
                "CUDA_VISIBLE_DEVICES",
            )


def _without_gpu() -> Iterable[CheckResult]:
    if shutil.which("nvidia-smi") is None:
        yield CheckResult(
            "there is no NVIDIA GPU, or no driver",
            "Policies compute on the CPU: enough for the small ones that ship, not for a 7B",
            "In a container, start it with `--gpus all`; else install the driver",
            "warning",
        )
        return
    yield CheckResult(
        f"nvidia-smi lists no GPU ({_smi_output()})",
        "Policies would compute on the CPU",
        "Load the driver (`modprobe nvidia`), or install the one of the running kernel and restart",
    )


def _smi_output() -> str:
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


def _count_in_torch(num_listed: int) -> Iterable[CheckResult]:
    import torch

    if torch.version.cuda is None:
        yield CheckResult(
            f"torch {torch.__version__} is a build without CUDA, and this machine has {num_listed} "
            "GPUs",
            "Policies would compute on the CPU",
            "Install the build of the package index: `pip install --force-reinstall torch==2.13.* "
            "torchvision==0.28.*`, without an index of CPU builds",
        )
        return
    try:
        # counting devices alone returns 0 without the reason
        torch.cuda.init()  # type: ignore[no-untyped-call]
        num_seen = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        yield CheckResult(
            f"torch cannot use the GPU: {str(error).partition(chr(10))[0].rstrip('.')}",
            "Policies would compute on the CPU, or fail",
            f"If the driver is too old for CUDA {torch.version.cuda}, update it, or install a torch "
            "that was built for an older CUDA",
        )
        return
    if num_seen < num_listed:
        yield CheckResult(
            f"torch sees {num_seen} of {num_listed} GPUs",
            "The others stand idle",
            "Unset CUDA_VISIBLE_DEVICES, if that was not on purpose",
            "warning",
        )
