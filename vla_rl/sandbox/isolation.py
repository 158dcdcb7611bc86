"""Isolation of a call from the rest of the machine, as far as this kernel and this user allow it.

The means are independent of each other. The keeper tests at its start which of them are available.
A call for which one of these fails later is not run.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn, get_args

import msgspec

from vla_rl.sandbox.landlock import confine_writing
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.means import Means
from vla_rl.sandbox.namespaces import (
    SHARED_MEMORY,
    die_with_parent,
    fork_first_process,
    fork_from_first_process,
    make_files_read_only,
    map_user,
)
from vla_rl.sandbox.privileges import become, give_up_privileges, unused_uid
from vla_rl.sandbox.seccomp import refuse_calls

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
    """Isolation of one call: the keeper creates it and forks with it, the child enters it.

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
        with _needed("namespaces"):
            return fork_first_process(network=self._limits.network)

    def enter(self, streams: Sequence[int], status_fd: int, keeper_fd: int) -> None:
        """Isolate this process, or a child that continues for it, from the rest of the machine.

        Raises: NotIsolated, in the process or in that child.

        Args:
            streams: pipes that it writes to.
            status_fd: a pipe to the keeper, for `wait_status_of`; closed here.
            keeper_fd: the keeper's pidfd; closed here.
        """
        own_uid, writable = unused_uid(), [self._folder]
        if "namespaces" in self.means:
            with _needed("namespaces"):
                map_user(self._uid, self._gid)
        if "mounts" in self.means:
            with _needed("mounts"):
                make_files_read_only(self._folder, disk_mb=self._limits.disk_mb)
            writable += [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
        if "namespaces" in self.means:
            with _needed("namespaces"):
                die_with_parent(keeper_fd)
                fork_from_first_process(status_fd)
        if "own_user" in self.means:
            with _needed("own_user"):
                become(own_uid, with_files=[*writable, *streams])
                os.stat(self._folder)  # its parent may be a folder that only root may search
        else:
            give_up_privileges()
        if "landlock" in self.means:
            with _needed("landlock"):
                confine_writing(writable, network=self._limits.network)
        if "namespaces" not in self.means:
            os.close(status_fd)
            die_with_parent(keeper_fd)  # only now: the kernel resets it when the user changes
        if "seccomp" in self.means:
            with _needed("seccomp"):
                refuse_calls(network=self._limits.network)


def find_means(wanted: frozenset[Means], folder: Path) -> tuple[frozenset[Means], dict[Means, str]]:
    """Test in child processes which means are available to this user on this kernel.

    Args:
        wanted: the means to test.
        folder: an empty folder.

    Returns: the means that work together, and the reason for each of the others.
    """
    means, refused = wanted, dict[Means, str]()
    while means and (failure := _failure_of(means, folder)) is not None:
        refused[failure.means] = failure.reason
        means -= {failure.means, "mounts"} if failure.means == "namespaces" else {failure.means}
    return means, refused


class _Failure(msgspec.Struct, frozen=True):
    means: Means
    reason: str
    errno: int | None = None


def _failure_of(means: frozenset[Means], folder: Path) -> _Failure | None:
    """Return one of the means that fails, with the reason; None if all work."""
    for wait_s in _TRIED_AFTER_S:
        time.sleep(wait_s)
        failure = _try(means, folder)
        if failure is None or failure.errno not in _MOMENTARY:
            break
    return failure


def _try(means: frozenset[Means], folder: Path) -> _Failure | None:
    """Isolate a child, which reports an error through a pipe."""
    needed = [
        path for path in (sys.executable, *sys.path) if "own_user" in means and os.path.exists(path)
    ]
    isolation = Isolation(means, folder, ProcessLimits(network=False, disk_mb=1))
    reader, writer = os.pipe()
    keeper = os.pidfd_open(os.getpid())
    try:
        if (pid := isolation.fork()) == 0:
            _enter_and_end(isolation, writer, keeper, needed)
    except NotIsolated as failure:
        os.close(reader)
        return _Failure(failure.means, failure.reason, failure.errno)
    finally:
        os.close(writer)
        os.close(keeper)
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
    isolation: Isolation, writer: int, keeper: int, needed: Sequence[str]
) -> NoReturn:
    try:
        isolation.enter((writer,), os.open(os.devnull, os.O_WRONLY), keeper)
        with _needed("own_user"):
            _require_readable(needed)
        os.write(writer, _ENTERED)
    except NotIsolated as failure:
        os.write(
            writer, msgspec.json.encode(_Failure(failure.means, failure.reason, failure.errno))
        )
    finally:  # no exception may return into the keeper's own code
        os._exit(0)


def _require_readable(paths: Sequence[str]) -> None:
    """Check that the call's own user can read the interpreter and all modules.

    Raises: OSError if not.
    """
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            raise OSError(error.errno, f"another user cannot read {path}") from error


@contextlib.contextmanager
def _needed(means: Means) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotIsolated(means, error) from error
