"""Ownership of files or folders by one process at a time, held by the kernel's locks.

    with sole_owner(folder / "owner.json", f"the run {folder}"):
        ...  # another process that tries is refused, with the pid of this one, its host too

The kernel holds the lock (flock). It releases it however the process ends, so that one that was killed
leaves nothing to clean up. Children do not inherit it. The file names its owner, also to other hosts of
a shared file system.

A temporary folder (`OwnedFolder`) is removed with its owner. If the owner was killed, the next process
that makes one with the same prefix removes it: a folder without a lock belonged to a process that is gone.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import subprocess
import tempfile
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

_HELD_LOCKS: Final[set[int]] = set()
"""Descriptors of the locks of this process."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that owns something.

    Example:
        Owner(pid=48213, host="gpu2", since="2026-05-04 10:15:30+02:00")
    """

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
    descriptor = _open_locked(file, what)
    _HELD_LOCKS.add(descriptor)
    try:
        _write_owner(descriptor, file)
        yield
    finally:
        _HELD_LOCKS.discard(descriptor)
        with contextlib.suppress(OSError):  # it is gone with its folder, or the disk is
            if is_open_at(descriptor, file):
                # Only our own: a file that somebody removed may have been made again by the next
                # owner.
                file.unlink()
        os.close(descriptor)


def name_lock_file(target: Path) -> Path:
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
    _HELD_LOCKS.add(descriptor)
    return descriptor


def unlock_folder(descriptor: int) -> None:
    """Release a lock of `lock_folder`."""
    if descriptor >= 0:
        _HELD_LOCKS.discard(descriptor)
        os.close(descriptor)


def _open_locked(file: Path, what: str) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_open_at(descriptor, file):
                return descriptor
        except BlockingIOError:
            owner = _read_owner(descriptor)
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


def is_open_at(descriptor: int, file: Path) -> bool:
    """Return whether an open file still has this path: it may have been removed, or made again."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> Owner | None:
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
    host_name = socket.gethostname()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        earlier = msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
        if earlier.host != host_name:
            logger.warning(
                "%s names process %d on host %r, since %s, which did not end in order; its lock is "
                "free. If these hosts share no locks, make sure that it has ended.",
                file,
                earlier.pid,
                earlier.host,
                earlier.since,
            )
    owner = Owner(
        pid=os.getpid(), host=host_name, since=datetime.now().astimezone().isoformat(" ", "seconds")
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(owner) + b"\n", 0)


def _refusal(what: str, owner: Owner | None) -> str:
    if owner is None:
        return f"{what} is in use by another process, expected none; wait until it has ended."
    host_name = owner.host == socket.gethostname()
    by = "this process" if host_name and owner.pid == os.getpid() else f"process {owner.pid}"
    return (
        f"{what} is in use by {by} on host {owner.host!r} since {owner.since}, expected no owner; "
        "wait until it has ended, or stop it first."
    )


def _close_locks_in_child() -> None:
    """Close the locks in a forked child: they end with the process that took them."""
    for descriptor in _HELD_LOCKS:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD_LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


PREFIXES: Final = (
    "vla_rl-hosts-",
    "vla_rl-policy-",
    "vla_rl-rank-files-",
    "vla_rl-ranks-",
    "vla_rl-ray-host-",
    "vla_rl-smollm2-",
    "vla_rl-adapted-",
    "vla_rl-tuned-",
    "vla_rl-weights-",
    "vla_rl_sandbox.",
    "vla_rl_vllm_",
)
"""Prefixes of all such folders; a run sweeps them when it starts."""


class OwnedFolder:
    """A new folder that only this user may enter.

    Args:
        prefix: beginning of its name; `sweep` removes all unlocked temporary folders with this prefix.
        parent: folder that it is made in; None for the folder of temporary ones.

    Attributes:
        path: the folder.
        descriptor: holds the lock. A child that inherits it is an owner too: the folder is swept
            after the last one ends.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # another process swept it before it was locked
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = _open_folder(self.path)
                try:
                    _lock_open_folder(self.descriptor, self.path, fcntl.LOCK_EX)
                    return
                except FileNotFoundError:
                    os.close(self.descriptor)
                    raise
                except OSError as error:
                    logger.warning(
                        "%s cannot be locked (%s), so it stays if this process is killed.",
                        self.path,
                        error,
                    )
                    return

    def remove_folder(self) -> None:
        """Remove the folder and its content, then release the lock."""
        remove_tree(self.path)
        os.close(self.descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content, as far as this user's permissions allow."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # it has folders without permissions, or folders nested thousands deep
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def remove_all_abandoned_folders() -> None:
    """Remove all folders that killed processes of vla_rl have left."""
    for prefix in PREFIXES:
        remove_abandoned_folders(prefix)


def remove_abandoned_folders(prefix: str) -> None:
    """Remove the temporary folders of a prefix whose owners have ended.

    Only those: on a file system of several hosts, locks of the others may not be seen.
    """
    # Killed processes leave policies and weights of gigabytes there.
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, another user's, or already removed
            descriptor = _open_folder(folder)
            try:
                _lock_open_folder(descriptor, folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
            finally:
                os.close(descriptor)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock_open_folder(descriptor: int, folder: Path, lock: int) -> None:
    """Lock an open folder.

    Raises: OSError; FileNotFoundError if another process removed it meanwhile.
    """
    fcntl.flock(descriptor, lock)
    if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
        raise FileNotFoundError(f"{folder} was removed and made again")
