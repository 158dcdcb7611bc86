"""The GPUs of this machine, without torch, whose import takes seconds."""

import os
import shutil
import subprocess
from typing import Final

from vla_rl.cluster.hosts import Gpu

_MIB: Final = 2**20
_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total",
    "--format=csv,noheader,nounits",
)


def gpus_of_this_host() -> tuple[Gpu, ...]:
    """Return the GPUs that programs of this process's environment may use; empty without NVIDIA's.

    Waits for `nvidia-smi`.
    """
    if shutil.which(_QUERY[0]) is None:
        return ()
    try:
        done = subprocess.run(
            _QUERY,
            capture_output=True,
            text=True,
            timeout=20.0,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return visible_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(listed: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of `nvidia-smi`'s lines that CUDA shows, in CUDA's order.

    Args:
        listed: lines of index, UUID, name and MiB.
        visible: CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; None for all.
    """
    found: list[tuple[str, str, Gpu]] = []
    for line in listed.splitlines():
        index, uuid, name, mib = (word.strip() for word in line.split(",", 3))
        if mib.isdecimal():
            gpu = Gpu(name=name, memory_bytes=int(mib) * _MIB, device=index)
            found.append((index, uuid, gpu))
    if visible is None:
        return tuple(gpu for _, _, gpu in found)
    chosen: list[Gpu] = []
    for word in filter(None, map(str.strip, visible.split(","))):
        match = [gpu for index, uuid, gpu in found if word == index or uuid.startswith(word)]
        if not match:  # as CUDA does: an entry that is not there hides those after it
            break
        chosen.append(match[0])
    return tuple(chosen)
