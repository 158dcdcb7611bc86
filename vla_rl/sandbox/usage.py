"""The total memory and files of a call.

The kernel's own limits apply to one process or one file only.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_BLOCK: Final = 512  # unit of st_blocks, whatever the file system's own block size is
_HELD: Final = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_SHARED_OUT: Final = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")


def memory_held(pid: int) -> int:
    """Return the bytes of memory of a process that belong to no file; 0 if it is gone."""
    try:
        return _sum_of(Path(f"/proc/{pid}/status"), _HELD)
    except OSError:
        return 0


def holds_more_memory(pids: Iterable[int], most: int) -> bool:
    """Return whether processes hold more than `most` bytes together.

    Memory mapped from files does not count.

    A plain sum is cheap, but counts a page once for each process that shares it after a fork. Only
    if that sum is too large, each page is divided among the processes, at ten times the cost.
    """
    pids = list(pids)
    return sum(map(memory_held, pids)) > most and sum(map(_proportional, pids)) > most


def disk_used(folder: Path, pids: Iterable[int], most_files: int) -> float:
    """Return the bytes of all files in a folder, and of removed files that a process still has
    open.

    Returns infinity for more than `most_files` files, and for a folder that cannot be read: one
    without permissions, or nested too deeply for a path.
    """
    sizes = dict[tuple[int, int], int]()
    ahead = [os.fspath(folder)]
    try:
        while ahead:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    stat = entry.stat(follow_symlinks=False)
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    if len(sizes) > most_files:
                        return float("inf")
    except FileNotFoundError:
        pass  # removed meanwhile
    except OSError:
        return float("inf")
    for pid in pids:
        sizes.update(_removed_but_open(pid))
    return sum(sizes.values())


def _removed_but_open(pid: int) -> dict[tuple[int, int], int]:
    found = dict[tuple[int, int], int]()
    with contextlib.suppress(OSError):  # it ended, or we may not read it
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                stat = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.st_nlink == 0:
                    found[stat.st_dev, stat.st_ino] = stat.st_blocks * _BLOCK
    return found


def _proportional(pid: int) -> int:
    """Return the same, with only its part of each shared page.

    `memory_held` if that cannot be read.
    """
    try:
        return _sum_of(Path(f"/proc/{pid}/smaps_rollup"), _SHARED_OUT)
    except OSError:
        return memory_held(pid)


def _sum_of(file: Path, names: tuple[bytes, ...]) -> int:
    """Sum the lines that begin with these names, given in KiB, and return bytes."""
    return 1024 * sum(
        int(line.split()[1]) for line in file.read_bytes().splitlines() if line.startswith(names)
    )
