"""The user of a sandboxed process: no capabilities, and no way to gain any.

For root it is a user of its own.

Root's process changes to a user that no other process has. It can write only what every user may
write and signal only its own processes, and its processes are counted separately. It can still read
every file, so that it finds its interpreter and modules anywhere.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vla_rl.sandbox.linux import (
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_RAISE,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    prctl,
    set_capabilities,
)

# numbers of capabilities
_CHOWN, _DAC_READ_SEARCH, _KILL, _SETGID, _SETUID, _SYS_ADMIN = 0, 2, 5, 6, 7, 21
_NEEDED: Final = sum(1 << number for number in (_CHOWN, _KILL, _SETGID, _SETUID))
_FIRST_UNUSED_UID: Final = 1_000_000_000


def give_up_privileges() -> None:
    """Drop all capabilities, for this process and for all programs that it starts.

    Raises: OSError.
    """
    set_capabilities(0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 1)


def can_administer() -> bool:
    """Return whether this process may create namespaces without a user namespace."""
    return bool(_capabilities() & 1 << _SYS_ADMIN)


def unused_uid() -> int:
    """Return a user that no other process has.

    Call it before the call has its own /proc, where process numbers differ.
    """
    return _FIRST_UNUSED_UID + int(os.readlink("/proc/self"))


def become(uid: int, with_files: Iterable[Path | int]) -> None:
    """Change to a user with only its own group.

    It may read and search all files if this process may.

    Raises: OSError, also if this process could not kill the processes of that user.

    Args:
        uid: the user.
        with_files: files and descriptors that are given to it.
    """
    if _capabilities() & _NEEDED != _NEEDED:
        raise OSError(errno.EPERM, "this root lacks CAP_CHOWN, CAP_KILL, CAP_SETGID or CAP_SETUID")
    if not _is_mapped(uid):
        raise OSError(errno.EINVAL, f"this namespace of users has no user {uid}")
    for file in with_files:
        os.chown(file, uid, uid)
    kept = _capabilities() & 1 << _DAC_READ_SEARCH
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    set_capabilities(kept)
    if kept:
        # so that it passes on to programs
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, _DAC_READ_SEARCH)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 1)  # else its own files in /proc would belong to root


def _is_mapped(uid: int) -> bool:
    ranges = (
        map(int, line.split())
        for line in Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    )
    return any(first <= uid < first + number for first, _, number in ranges)


def _capabilities() -> int:
    for line in (
        Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
