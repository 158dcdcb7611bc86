"""Landlock: a process restricts its own writing to chosen folders.

Needs no privileges and does not restrict reading.

    ABI 1 (Linux 5.13)   writing, making and removing files
    ABI 2, 3, 5          moving between folders, truncating, device ioctls
    ABI 6 (Linux 6.12)   signals to processes outside, abstract unix sockets of processes outside

It does not cover modes, owners, extended attributes and times of files, nor unix sockets that have
a path.
"""

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vla_rl.sandbox.linux import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    syscall,
)

_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
# REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, _DIR, _REG, _SOCK, _FIFO, _BLOCK, _SYM
_CHANGE_FOLDER: Final = 0b1_1111_1111 << 4
_REFER: Final = 1 << 13
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_SINCE_ABI: Final = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_SCOPES_SINCE_ABI: Final = 6
_HARMLESS_DEVICES: Final = ("null", "zero", "full", "random", "urandom")


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    try:
        return syscall("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def keeps_signals_inside() -> bool:
    """Return whether the kernel's Landlock blocks signals to processes outside."""
    return landlock_abi() >= _SCOPES_SINCE_ABI


def confine_writing(folders: Sequence[Path], *, network: bool) -> None:
    """Let this process, and all that it starts, write only below some folders.

    It must have set no_new_privs before.

    Args:
        folders: the folders in which it may write; those that do not exist are left out.
        network: False also blocks abstract unix sockets of others (ABI 6).

    Raises: OSError if the kernel has no Landlock.
    """
    abi = landlock_abi()
    if abi == 0:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    on_files = _WRITE_FILE | sum(
        right for since, right in _SINCE_ABI.items() if abi >= since and right != _REFER
    )
    on_folders = on_files | _CHANGE_FOLDER | (_REFER if abi >= 2 else 0)
    scopes = (
        (_SCOPE_SIGNALS | (0 if network else _SCOPE_ABSTRACT_SOCKETS))
        if abi >= _SCOPES_SINCE_ABI
        else 0
    )
    attributes = struct.pack("=QQQ", on_folders, 0, scopes)  # file system, network, scopes
    ruleset = syscall(
        "landlock_create_ruleset", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0
    )
    try:
        for folder in folders:
            _allow(ruleset, folder, on_folders)
        for name in _HARMLESS_DEVICES:
            _allow(ruleset, Path("/dev", name), on_files)
        syscall("landlock_restrict_self", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
            syscall("landlock_add_rule", LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        finally:
            os.close(descriptor)
