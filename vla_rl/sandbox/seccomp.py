"""A filter on system calls, for actions that namespaces and Landlock do not block.

Needs no privileges.

Without a network a process gets no sockets: no network sockets, and no unix sockets, because one
with a path is reachable from every network namespace. Memory that belongs to no process and no file
system, and objects that outlive their processes, are always blocked. So is io_uring, which could
create both without the calls that are filtered here, and so are changes of extended attributes:
Landlock does not know them, and any user may set them on files that every user may write to.
"""

import ctypes
import errno
import os
import struct
from typing import Final, NamedTuple

from vla_rl.sandbox.linux import PR_SET_SECCOMP, prctl

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


class _Program(ctypes.Structure):
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
    code = _filter(machine, network=network)
    program = _Program(len(code) // 8, code)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))


def _filter(machine: _Machine, *, network: bool) -> bytes:
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
