"""Requests to Linux that Python's `os` does not make: system calls, process trees, memory in use.

A process and its parent are marked as subreapers: orphans below them become a child of one of them,
even after a new session or a double fork. So all processes stay reachable through
`/proc/<pid>/task/*/children`, to be killed and to be measured; the kernel's own limits apply to one
process or one file only.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path
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
    # clone3 by number: glibc has no function for it, and `os.fork` no flags
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

    def mount(
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


_MOST_KILLING_S: Final = 10.0
_ROUNDS_WITHOUT_PAUSE: Final = 5
_PAUSE_S: Final = 0.001


def become_subreaper() -> None:
    """Make this process the parent of orphans below it. Raises: OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def get_children(pid: int) -> list[int]:
    """Return the children of a process, with zombies; empty if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        # Of every thread: the kernel lists a child below the thread that forked it.
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(
                    int,
                    Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="utf-8").split(),
                )
    return found


def get_descendants(pid: int, most: int = 1 << 20) -> list[int]:
    """Return the descendants of a process, the nearest first; at most `most`."""
    found: list[int] = []
    ahead = [pid]
    while ahead and len(found) < most:
        below = get_children(ahead.pop(0))
        found += below
        ahead += below
    return found[:most]


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a live process, and wait at most 10 s for their end.

    Dying takes their own CPU time.

    Each round stops the processes before it kills them, so that forking processes cannot outrun it.
    """
    dead: set[int] = set()
    until = time.monotonic() + _MOST_KILLING_S
    for num_rounds in itertools.count():
        found = get_descendants(pid)
        if dead.issuperset(found) or time.monotonic() > until:
            return  # no process died meanwhile, so no orphan is moving to another parent
        living = [child for child in found if _is_alive(child)]
        dead = set(found).difference(living)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for child in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, number)
        # at first without a pause, which a fork bomb would use; then the dying need the core
        if num_rounds >= _ROUNDS_WITHOUT_PAUSE:
            time.sleep(_PAUSE_S)


def kill_tree(pid: int) -> None:
    """Kill a stuck child and all its descendants.

    It is stopped first, so that it starts no more processes.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)


def count_user_processes(uid: int) -> int:
    """Return the number of processes and threads of a user on this machine."""
    num = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                num += len(os.listdir(entry / "task"))
    return num


def get_process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as R, S, T or Z.

    Empty if it is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rsplit(")", 1)[1].split()[0]


def _is_alive(pid: int) -> bool:
    return get_process_state(pid) not in ("", "Z", "X")


_DISK_BLOCK: Final = 512  # unit of st_blocks, whatever the file system's own block size is
_HELD: Final = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_SHARED_OUT: Final = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")


def memory_held(pid: int) -> int:
    """Return the bytes of memory of a process that belong to no file; 0 if it is gone."""
    try:
        return _sum_lines(Path(f"/proc/{pid}/status"), _HELD)
    except OSError:
        return 0


def holds_more_memory(pids: Iterable[int], most: int) -> bool:
    """Return whether processes hold more than `most` bytes together.

    Memory mapped from files does not count.

    A plain sum is cheap, but counts a page once for each process that shares it after a fork. Only
    if that sum is too large, each page is divided among the processes, at ten times the cost.
    """
    pids = list(pids)
    return sum(map(memory_held, pids)) > most and sum(map(_proportional, pids)) > most


def disk_used(folder: Path, pids: Iterable[int], most_files: int) -> float:
    """Return the bytes of all files in a folder, and of removed files that a process still has
    open.

    Returns infinity for more than `most_files` files, and for a folder that cannot be read: one
    without permissions, or nested too deeply for a path.
    """
    sizes = dict[tuple[int, int], int]()
    ahead = [os.fspath(folder)]
    try:
        while ahead:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    stat = entry.stat(follow_symlinks=False)
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * _DISK_BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    if len(sizes) > most_files:
                        return float("inf")
    except FileNotFoundError:
        pass  # removed meanwhile
    except OSError:
        return float("inf")
    for pid in pids:
        sizes.update(_removed_but_open(pid))
    return sum(sizes.values())


def _removed_but_open(pid: int) -> dict[tuple[int, int], int]:
    found = dict[tuple[int, int], int]()
    with contextlib.suppress(OSError):  # it ended, or we may not read it
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                stat = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.st_nlink == 0:
                    found[stat.st_dev, stat.st_ino] = stat.st_blocks * _DISK_BLOCK
    return found


def _proportional(pid: int) -> int:
    """Return the same, with only its part of each shared page.

    `memory_held` if that cannot be read.
    """
    try:
        return _sum_lines(Path(f"/proc/{pid}/smaps_rollup"), _SHARED_OUT)
    except OSError:
        return memory_held(pid)


def _sum_lines(file: Path, names: tuple[bytes, ...]) -> int:
    """Sum the lines that begin with these names, given in KiB, and return bytes."""
    return 1024 * sum(
        int(line.split()[1]) for line in file.read_bytes().splitlines() if line.startswith(names)
    )
