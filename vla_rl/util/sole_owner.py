"""One owner at a time for what a process writes: a run's folder, a new checkpoint, a data set.

    with sole_owner(folder / "owner.json", f"the run {folder}"):
        ...  # another process that tries is refused, with the pid and the host of this one

The kernel holds the lock (flock) and releases it however the process ends, so that one that was
killed leaves nothing to clean up. Children do not inherit it. The file names its owner, also to
other hosts of a shared file system.
"""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from vla_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_NAMED_WITHIN_S: Final = 1.0
"""An owner writes its name within microseconds after it has the lock."""

_HELD: Final[set[int]] = set()
"""Descriptors of the locks of this process."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that owns something."""

    pid: int
    host: str
    since: str
    """Local time at which it took the lock."""


@contextlib.contextmanager
def sole_owner(file: Path, what: str) -> Iterator[None]:
    """Own `what` inside the block.

    Args:
        file: the file that is locked; its folder has to exist. It is removed at the end.
        what: the thing that is owned, as the subject of an error, such as "the run runs/a".

    Raises: ConfigError naming the owner if there is one; OSError if the file cannot be written.
    """
    descriptor = _locked(file, what)
    _HELD.add(descriptor)
    try:
        _write_owner(descriptor, file)
        yield
    finally:
        _HELD.discard(descriptor)
        with contextlib.suppress(OSError):  # it is gone with its folder, or the disk is
            if _is_at(descriptor, file):
                file.unlink()
        os.close(descriptor)


def beside(target: Path) -> Path:
    """Return the file to lock for a file or folder that does not exist yet."""
    target = target.absolute()
    return target.with_name(f".{target.name}.owner.json")


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed; None if another process or part of this one
    holds it.

    -1 if its file system locks no folders, as NFS does. Raises: OSError if it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return None if isinstance(error, BlockingIOError) else -1
    _HELD.add(descriptor)
    return descriptor


def unlock_folder(descriptor: int) -> None:
    """Release a lock of `lock_folder`."""
    if descriptor >= 0:
        _HELD.discard(descriptor)
        os.close(descriptor)


def _locked(file: Path, what: str) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                return descriptor
        except BlockingIOError:
            owner = _named_owner(descriptor)
            os.close(descriptor)
            raise ConfigError(_refusal(what, owner)) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s), so nothing keeps a second process out of %s; start "
                "none.",
                file,
                error.strerror,
                what,
            )
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it meanwhile


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _named_owner(descriptor: int) -> Owner | None:
    """Return the owner that a file names; waits until it has written its name."""
    until = time.monotonic() + _NAMED_WITHIN_S
    while True:
        try:
            return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
        except (OSError, msgspec.DecodeError):
            if time.monotonic() > until:
                return None
        time.sleep(0.01)


def _write_owner(descriptor: int, file: Path) -> None:
    here = socket.gethostname()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        earlier = msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
        if earlier.host != here:
            logger.warning(
                "%s names process %d on host %r, since %s, which did not end in order; its lock is "
                "free. If these hosts share no locks, make sure that it has ended.",
                file,
                earlier.pid,
                earlier.host,
                earlier.since,
            )
    owner = Owner(
        pid=os.getpid(), host=here, since=datetime.now().astimezone().isoformat(" ", "seconds")
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(owner) + b"\n", 0)


def _refusal(what: str, owner: Owner | None) -> str:
    if owner is None:
        return f"{what} is in use by another process, expected none; wait until it has ended."
    here = owner.host == socket.gethostname()
    by = "this process" if here and owner.pid == os.getpid() else f"process {owner.pid}"
    return (
        f"{what} is in use by {by} on host {owner.host!r} since {owner.since}, expected no owner; "
        "wait until it has ended, or stop it first."
    )


def _let_go() -> None:
    """Close the locks in a forked child: they end with the process that took them."""
    for descriptor in _HELD:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)
