"""Full disks: the run directory is on a small file system that is filled and freed during
the run.
"""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.faults.leftovers import nothing_left
from benchmarks.faults.one_try import Skipped, Try
from benchmarks.faults.toy_run import ToyRun, check_books, tail

_CLONE_NEWNS: Final = 0x00020000
_SIZE_MB: Final = 24


def full_disks(case: Try) -> None:
    """Fill the disk of a run for a while, several times; no update, line or episode may be lost."""
    with (
        nothing_left(case),
        small_disk(case.folder / "disk") as disk,
        ToyRun(case, updates=24, root=disk) as run,
    ):
        run.until_update(1)
        for _ in range(case.dice.randint(1, 3)):
            ballast = _fill(disk)
            time.sleep(case.dice.uniform(0.5, 3.0))
            ballast.unlink()
            time.sleep(case.dice.uniform(0.2, 1.0))
        status = run.until_ended()
        case.expect(status == 0, f"exit status {status}, expected 0:\n{tail(run, 30)}")
        case.expect("Traceback" not in run.output(), f"a traceback in the output:\n{tail(run, 30)}")
        check_books(case, run.folder, run.updates)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a separate file system at `folder`, only in the mount namespace of this process.

    Raises: Skipped unless this process may mount.
    """
    _own_mounts()
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MB}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Skipped(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _own_mounts() -> None:
    """Leave the host's mounts: only this process and its children see later mounts, which end with
    them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise Skipped(f"no mounts of our own: {os.strerror(ctypes.get_errno())} (root has them)")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _fill(disk: Path) -> Path:
    """Write until the disk is full."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue
    return ballast
