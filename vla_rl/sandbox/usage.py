"""How much a call holds in all, which no limit of the kernel bounds: those hold for one process, or for one file."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_BLOCK: Final = 512  # of stat, whatever the file system's own blocks are
_HELD: Final = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_SHARED_OUT: Final = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")


def memory_held(pid: int) -> int:
    """Bytes of memory of a process that belong to no file; 0 if it is gone."""
    try:
        return _sum_of(Path(f"/proc/{pid}/status"), _HELD)
    except OSError:
        return 0


def holds_more_memory(pids: Iterable[int], most: int) -> bool:
    """Whether processes hold more than `most` bytes together, beside what they have mapped from files.

    A sum is cheap, but counts a page once for each process that shares it after a fork. Only if the sum is too large is each
    page divided among them, at ten times the cost.
    """
    pids = list(pids)
    return sum(map(memory_held, pids)) > most and sum(map(_proportional, pids)) > most


def disk_used(folder: Path, pids: Iterable[int], most_files: int) -> float:
    """Bytes of all files in a folder, and of those that were removed while a process has them open.

    Infinite for more files than `most_files`, and for a folder that cannot be read: one without permissions, or so deep
    that no path leads there.
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
        pass  # removed as we looked
    except OSError:
        return float("inf")
    for pid in pids:
        sizes.update(_removed_but_open(pid))
    return sum(sizes.values())


def _removed_but_open(pid: int) -> dict[tuple[int, int], int]:
    found = dict[tuple[int, int], int]()
    with contextlib.suppress(OSError):  # it ended, or is not ours to look into
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                stat = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.st_nlink == 0:
                    found[stat.st_dev, stat.st_ino] = stat.st_blocks * _BLOCK
    return found


def _proportional(pid: int) -> int:
    """The same, with its part of each page that it shares; `memory_held` if we may not look."""
    try:
        return _sum_of(Path(f"/proc/{pid}/smaps_rollup"), _SHARED_OUT)
    except OSError:
        return memory_held(pid)


def _sum_of(file: Path, names: tuple[bytes, ...]) -> int:
    """Bytes in the lines that begin with these names and give KiB."""
    return 1024 * sum(int(line.split()[1]) for line in file.read_bytes().splitlines() if line.startswith(names))
