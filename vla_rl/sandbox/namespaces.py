"""Namespaces of one call: own processes, memory objects, network, and read-only files.

    keeper ──fork──► first process of the namespace ──fork──► the call
                       mounts, waits, reaps                     runs

The kernel kills every process of the namespace with its first one, which asked to die with the
keeper. So all of them die with the keeper, even if a program cancelled its own request.
"""

import contextlib
import os
import signal
import struct
from pathlib import Path
from typing import Final

from vla_rl.actors.readiness import is_ready
from vla_rl.sandbox.linux import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    OwnMounts,
    fork_in_namespaces,
    prctl,
)
from vla_rl.sandbox.privileges import can_administer, give_up_privileges

SHARED_MEMORY: Final = Path("/dev/shm")
MOST_FILES: Final = 10_000
"""Most files and folders that a call may have at a time."""

_STATUS: Final = struct.Struct("=i")


def fork_first_process(*, network: bool) -> int:
    """Fork the first process of new namespaces. Returns: the same as `os.fork`. Raises: OSError.

    Args:
        network: False gives it a network namespace in which no interface is up.
    """
    flags = CLONE_NEWPID | CLONE_NEWIPC | (0 if network else CLONE_NEWNET)
    return fork_in_namespaces(flags if can_administer() else flags | CLONE_NEWUSER)


def map_user(uid: int, gid: int) -> None:
    """Map this process to the same user inside its user namespace, if that is new.

    Raises: OSError.
    """
    if not Path("/proc/self/uid_map").read_text(encoding="utf-8"):
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")


def make_files_read_only(folder: Path, *, disk_mb: int) -> None:
    """Make all files read-only except those in `folder` and /dev/shm.

    The two become parts of one empty file system in memory.

    Raises: OSError.

    Args:
        folder: an empty folder.
        disk_mb: size of the file system, in MiB.
    """
    mounts = OwnMounts()
    mounts.make_read_only()
    options = f"size={disk_mb}m,nr_inodes={MOST_FILES},mode=700"
    if SHARED_MEMORY.is_dir():
        mounts.add("sandbox", str(SHARED_MEMORY), "tmpfs", MS_NOSUID | MS_NODEV, options)
        is_hidden = SHARED_MEMORY in folder.parents  # the mount hides it: TMPDIR is in /dev/shm
        inside = folder if is_hidden else SHARED_MEMORY / folder.name
        inside.mkdir(mode=0o700, parents=True)
        if not is_hidden:
            mounts.add(str(inside), str(folder), None, MS_BIND)
    else:
        mounts.add("sandbox", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, options)
    # the kernel rejects it for an ordinary user if parts of /proc are covered
    with contextlib.suppress(OSError):
        mounts.add("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def die_with_parent(pidfd: int) -> None:
    """Ask to be killed when the parent dies; exit if it has died already.

    Args:
        pidfd: the parent's pidfd, because the parent's pid reads 0 inside a namespace, dead or not;
            closed here.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if is_ready(pidfd):
        os._exit(1)
    os.close(pidfd)


def fork_from_first_process(status_fd: int) -> None:
    """Return in a child of the first process.

    The first process reports the child's end, and then ends the namespace.

    Args:
        status_fd: a pipe to the keeper, which `wait_status_of` reads.
    """
    if (pid := os.fork()) == 0:
        os.close(status_fd)
        return
    give_up_privileges()
    prctl(PR_SET_DUMPABLE, 0)  # the call may not trace this process, which has no filter
    while (ended := os.wait())[0] != pid:
        pass
    os.write(status_fd, _STATUS.pack(ended[1]))
    os._exit(0)


def wait_status_of(status_fd: int) -> int | None:
    """Return the wait status of a call when its first process has ended.

    None if that was killed before the call ended.
    """
    told = os.read(status_fd, _STATUS.size)
    return int(_STATUS.unpack(told)[0]) if told else None
