"""Isolation of a call from the rest of the machine, as far as this kernel and this user allow it.

The means are independent of each other. The call runner tests at its start which of them are available.
A call for which one of these fails later is not run.

    call runner ──fork──► first process of the namespace ──fork──► the call
                            mounts, waits, reaps                     runs

The kernel kills every process of the namespace with its first one, which asked to die with the
call runner. So all of them die with it, even if a program cancelled its own request.
"""

import contextlib
import errno
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn, get_args

import msgspec

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
from vla_rl.sandbox.protocol import Means, ProcessLimits
from vla_rl.sandbox.restrictions import (
    become_user,
    can_administer,
    confine_writing,
    give_up_privileges,
    refuse_calls,
    unused_uid,
)
from vla_rl.util.processes import is_ready

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
        mounts.mount("sandbox", str(SHARED_MEMORY), "tmpfs", MS_NOSUID | MS_NODEV, options)
        is_hidden = SHARED_MEMORY in folder.parents  # the mount hides it: TMPDIR is in /dev/shm
        inside = folder if is_hidden else SHARED_MEMORY / folder.name
        inside.mkdir(mode=0o700, parents=True)
        if not is_hidden:
            mounts.mount(str(inside), str(folder), None, MS_BIND)
    else:
        mounts.mount("sandbox", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, options)
    # the kernel rejects it for an ordinary user if parts of /proc are covered
    with contextlib.suppress(OSError):
        mounts.mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


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
        status_fd: a pipe to the call runner, which `read_wait_status` reads.
    """
    if (pid := os.fork()) == 0:
        os.close(status_fd)
        return
    give_up_privileges()
    prctl(PR_SET_DUMPABLE, 0)  # the call may not trace this process, which has no filter
    # The first process of a namespace gets every orphan in it as its child.
    while (ended := os.wait())[0] != pid:
        pass
    os.write(status_fd, _STATUS.pack(ended[1]))
    os._exit(0)


def read_wait_status(status_fd: int) -> int | None:
    """Return the wait status of a call when its first process has ended.

    None if that was killed before the call ended.
    """
    told = os.read(status_fd, _STATUS.size)
    return int(_STATUS.unpack(told)[0]) if told else None


_TRIED_AFTER_S: Final = (0.0, 0.05, 0.1, 0.15)
_MOMENTARY: Final = (errno.ENOSPC, errno.EUSERS, errno.EAGAIN, errno.ENOMEM)
"""Errors of a kernel that is out of namespaces or memory for a moment, so that a retry may
succeed."""

_ENTERED: Final = b"entered"


class NotIsolated(Exception):
    """One of the means of isolation failed.

    Attributes:
        means: the one that failed.
        reason: the reason, in words.
        errno: number of the kernel's error.
    """

    def __init__(self, means: Means, error: OSError) -> None:
        self.means, self.reason, self.errno = means, error.strerror or str(error), error.errno
        super().__init__(f"{means}: {self.reason}")


class Isolation:
    """Isolation of one call: the call runner creates it and forks with it, the child enters it.

    Args:
        means: the means to use.
        folder: an empty folder in which the call may write.
        limits: `network` and `disk_mb` are applied here.
    """

    def __init__(self, means: frozenset[Means], folder: Path, limits: ProcessLimits) -> None:
        self.means = means
        self._folder, self._limits = folder, limits
        self._uid, self._gid = os.geteuid(), os.getegid()

    def fork(self) -> int:
        """Fork a process that can enter. Returns: as `os.fork` does. Raises: NotIsolated."""
        if "namespaces" not in self.means:
            return os.fork()
        with _require_means("namespaces"):
            return fork_first_process(network=self._limits.network)

    def enter(self, streams: Sequence[int], status_fd: int, runner_fd: int) -> None:
        """Isolate this process, or a child that continues for it, from the rest of the machine.

        Raises: NotIsolated, in the process or in that child.

        Args:
            streams: pipes that it writes to.
            status_fd: a pipe to the call runner, for `read_wait_status`; closed here.
            runner_fd: the call runner's pidfd; closed here.
        """
        own_uid, writable = unused_uid(), [self._folder]
        if "namespaces" in self.means:
            with _require_means("namespaces"):
                map_user(self._uid, self._gid)
        if "mounts" in self.means:
            with _require_means("mounts"):
                make_files_read_only(self._folder, disk_mb=self._limits.disk_mb)
            writable += [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
        if "namespaces" in self.means:
            with _require_means("namespaces"):
                die_with_parent(runner_fd)
                fork_from_first_process(status_fd)
        if "own_user" in self.means:
            with _require_means("own_user"):
                become_user(own_uid, with_files=[*writable, *streams])
                os.stat(self._folder)  # its parent may be a folder that only root may search
        else:
            give_up_privileges()
        if "landlock" in self.means:
            with _require_means("landlock"):
                confine_writing(writable, network=self._limits.network)
        if "namespaces" not in self.means:
            os.close(status_fd)
            die_with_parent(runner_fd)  # only now: the kernel resets it when the user changes
        if "seccomp" in self.means:
            with _require_means("seccomp"):
                refuse_calls(network=self._limits.network)


def find_means(wanted: frozenset[Means], folder: Path) -> tuple[frozenset[Means], dict[Means, str]]:
    """Test in child processes which means are available to this user on this kernel.

    Args:
        wanted: the means to test.
        folder: an empty folder.

    Returns: the means that work together, and the reason for each of the others.
    """
    # together and not one by one: a mount needs a namespace, and some kernels allow one but not the other
    means, refused = wanted, dict[Means, str]()
    while means and (failure := _find_failure(means, folder)) is not None:
        refused[failure.means] = failure.reason
        means -= {failure.means, "mounts"} if failure.means == "namespaces" else {failure.means}
    return means, refused


class _Failure(msgspec.Struct, frozen=True):
    means: Means
    reason: str
    errno: int | None = None


def _find_failure(means: frozenset[Means], folder: Path) -> _Failure | None:
    """Return one of the means that fails, with the reason; None if all work."""
    for wait_s in _TRIED_AFTER_S:
        time.sleep(wait_s)
        failure = _try_means(means, folder)
        if failure is None or failure.errno not in _MOMENTARY:
            break
    return failure


def _try_means(means: frozenset[Means], folder: Path) -> _Failure | None:
    """Isolate a child, which reports an error through a pipe."""
    needed = [
        path for path in (sys.executable, *sys.path) if "own_user" in means and os.path.exists(path)
    ]
    isolation = Isolation(means, folder, ProcessLimits(network=False, disk_mb=1))
    reader, writer = os.pipe()
    runner = os.pidfd_open(os.getpid())
    try:
        if (pid := isolation.fork()) == 0:
            _enter_and_end(isolation, writer, runner, needed)
    except NotIsolated as failure:
        os.close(reader)
        return _Failure(failure.means, failure.reason, failure.errno)
    finally:
        os.close(writer)
        os.close(runner)
    with open(reader, "rb") as told:
        words = told.read()
    os.waitpid(pid, 0)
    if words == _ENTERED:
        return None
    if words:
        return msgspec.json.decode(words, type=_Failure)
    last = [name for name in get_args(Means) if name in means][-1]
    return _Failure(last, "a process isolated so died")


def _enter_and_end(
    isolation: Isolation, writer: int, runner: int, needed: Sequence[str]
) -> NoReturn:
    try:
        isolation.enter((writer,), os.open(os.devnull, os.O_WRONLY), runner)
        with _require_means("own_user"):
            _require_readable(needed)
        os.write(writer, _ENTERED)
    except NotIsolated as failure:
        os.write(
            writer, msgspec.json.encode(_Failure(failure.means, failure.reason, failure.errno))
        )
    finally:  # no exception may return into the call runner's own code
        os._exit(0)


def _require_readable(paths: Sequence[str]) -> None:
    """Check that the call's own user can read the interpreter and all modules.

    Raises: OSError if not.
    """
    # A call as a user of its own could not even start where the interpreter lies in a home folder
    # that is closed to others.
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            raise OSError(error.errno, f"another user cannot read {path}") from error


@contextlib.contextmanager
def _require_means(means: Means) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotIsolated(means, error) from error
