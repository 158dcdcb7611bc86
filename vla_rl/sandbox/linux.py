"""Linux system calls that Python has no functions for. Each raises OSError if it fails."""

import ctypes
import os
import signal
import struct
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_KEEPCAPS: Final = 8
PR_SET_SECCOMP: Final = 22
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAP_AMBIENT: Final = 47
PR_CAP_AMBIENT_RAISE: Final = 2

CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000

LANDLOCK_CREATE_RULESET: Final = 444
LANDLOCK_ADD_RULE: Final = 445
LANDLOCK_RESTRICT_SELF: Final = 446
_CLONE3: Final = 435
_MOUNT_SETATTR: Final = 442  # these numbers are the same on every architecture

_CLONE_NEWNS: Final = 0x00020000
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 0x1
_CAPABILITY_VERSION_3: Final = 0x20080522

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc_with_lock: Final = ctypes.PyDLL(None, use_errno=True)
"""Holds the interpreter's lock during a call, as a fork requires."""

for _function in ("PyOS_BeforeFork", "PyOS_AfterFork_Child", "PyOS_AfterFork_Parent"):
    getattr(ctypes.pythonapi, _function).restype = None


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def prctl(option: int, *arguments: object) -> None:
    """Change an attribute of this process. Raises: OSError."""
    _check("prctl", _libc.prctl(option, *_as_words(*arguments, 0, 0, 0, 0)[:4]))


def fork_in_namespaces(flags: int) -> int:
    """Fork with new namespaces for the child.

    One is the PID namespace, which a process cannot enter itself.

    Returns: the same as `os.fork`. Raises: OSError.

    Args:
        flags: the CLONE_NEW... flags.
    """
    arguments = struct.pack("=8Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)  # struct clone_args
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc_with_lock.syscall(*_as_words(_CLONE3, arguments, len(arguments))))
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone3: {os.strerror(number)}")
    return pid


class OwnMounts:
    """A new mount namespace of this process. Raises: OSError.

    All mounts are made through it: a mount that root makes outside of one is a mount of the whole
    machine.
    """

    def __init__(self) -> None:
        _check("unshare", _libc.unshare(_CLONE_NEWNS))
        self._are_read_only = False

    def make_read_only(self) -> None:
        """Make every mount read-only, and keep later ones from spreading to the original namespace.

        Raises: OSError, also on kernels before 5.12.
        """
        self._mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY)
        size = ctypes.sizeof(attributes)
        syscall(
            "mount_setattr",
            _MOUNT_SETATTR,
            _AT_FDCWD,
            b"/",
            _AT_RECURSIVE,
            ctypes.byref(attributes),
            size,
        )
        self._are_read_only = True

    def add(
        self, source: str, target: str, kind: str | None, flags: int, options: str | None = None
    ) -> None:
        """Mount a file system, or a folder at a second place. Raises: OSError."""
        if not self._are_read_only:
            raise RuntimeError(
                "mounts that are not private yet may spread to the whole machine; call "
                "make_read_only first."
            )
        self._mount(source, target, kind, flags, options)

    def _mount(
        self, source: str, target: str, kind: str | None, flags: int, options: str | None = None
    ) -> None:
        kind_, options_ = (None if text is None else text.encode() for text in (kind, options))
        status = _libc.mount(
            source.encode(), target.encode(), kind_, ctypes.c_ulong(flags), options_
        )
        _check(f"mount of {target}", status)


def set_capabilities(mask: int) -> None:
    """Set the permitted, effective and inheritable capabilities of this process.

    Raises: OSError.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)(low, low, low, high, high, high)))


def syscall(name: str, number: int, *arguments: object) -> int:
    """Make a system call by its number. Raises: OSError."""
    status = int(_libc.syscall(*_as_words(number, *arguments)))
    _check(name, status)
    return status


def _as_words(*arguments: object) -> list[object]:
    """Convert integers to 64 bits each.

    A variadic C function reads that many, but ctypes alone passes 32.
    """
    return [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]


def _check(name: str, status: int) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
