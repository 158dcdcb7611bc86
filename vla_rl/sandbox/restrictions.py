"""Restrictions that a process puts on itself: Landlock, a filter on system calls, another user.

Landlock needs no privileges and does not restrict reading.

    ABI 1 (Linux 5.13)   writing, making and removing files
    ABI 2, 3, 5          moving between folders, truncating, device ioctls
    ABI 6 (Linux 6.12)   signals to processes outside, abstract unix sockets of processes outside

It does not cover modes, owners, extended attributes and times of files, nor unix sockets that have
a path.

The filter (seccomp) needs no privileges either. Without a network a process gets no sockets: no network
sockets, and no unix sockets, because one with a path is reachable from every network namespace. Memory
that belongs to no process and no file system, and objects that outlive their processes, are always
blocked. So is io_uring, which could create both without the calls that are filtered here, and so are
changes of extended attributes: Landlock does not know them, and any user may set them on files that
every user may write to.

Root's process changes to a user that no other process has. It can write only what every user may
write and signal only its own processes, and its processes are counted separately. It can still read
every file, so that it finds its interpreter and modules anywhere.
"""

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from vla_rl.sandbox.linux import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_RAISE,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECCOMP,
    prctl,
    set_capabilities,
    syscall,
)

_GET_VERSION: Final = 1
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
        return syscall("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, None, 0, _GET_VERSION)
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
            _allow_writing(ruleset, folder, on_folders)
        for name in _HARMLESS_DEVICES:
            _allow_writing(ruleset, Path("/dev", name), on_files)
        syscall("landlock_restrict_self", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_writing(ruleset: int, path: Path, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
            syscall("landlock_add_rule", LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        finally:
            os.close(descriptor)


_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF operations
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_MODE_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000
_X32_CALLS: Final = 0x40000000


class _Machine(NamedTuple):
    """System call numbers of one architecture."""

    audit_number: int
    socket: int
    refused: tuple[int, ...]
    """memfd_create, memfd_secret; shmget, semget, msgget, mq_open; add_key, request_key, keyctl;
    io_uring_setup."""

    unsupported: tuple[int, ...]
    """setxattr, removexattr, each also with l and f before, and with at behind."""


_MACHINES: Final = {
    "x86_64": _Machine(
        0xC000003E,
        41,
        (319, 447, 29, 64, 68, 240, 248, 249, 250, 425),
        (188, 189, 190, 463, 197, 198, 199, 466),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        198,
        (279, 447, 194, 190, 186, 180, 217, 218, 219, 425),
        (5, 6, 7, 463, 14, 15, 16, 466),
    ),
}


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_calls(*, network: bool) -> None:
    """Filter the system calls of this process and of all that it starts.

    It must have set no_new_privs before.

    Args:
        network: False blocks all sockets except pairs, which are connected from the start.

    Raises: OSError if the kernel has no filters, or this machine is of an unknown architecture.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    code = _build_filter(machine, network=network)
    program = _FilterProgram(len(code) // 8, code)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))


def _build_filter(machine: _Machine, *, network: bool) -> bytes:
    """Return instructions that block the given calls, one after the other, and allow the rest."""
    refusals = [(number, errno.ENOSYS) for number in machine.refused]
    # as on a file system without them, which programs that copy files expect
    refusals += [(number, errno.EOPNOTSUPP) for number in machine.unsupported]
    if not network:
        refusals.append((machine.socket, errno.ENETUNREACH))
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, machine.audit_number, if_true=1),
        # 32-bit programs, which have other system call numbers
        _instruction(_RETURN, _REFUSE | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32_CALLS, if_false=1),
        _instruction(_RETURN, _REFUSE | errno.ENOSYS),
    ]
    for number, error in refusals:
        code += [_instruction(_EQUAL, number, if_false=1), _instruction(_RETURN, _REFUSE | error)]
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _instruction(operation: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, operand)


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


def become_user(uid: int, with_files: Iterable[Path | int]) -> None:
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
