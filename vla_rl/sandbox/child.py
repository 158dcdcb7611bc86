"""What happens in a forked child: limits, isolation, and then the function, or another program in its place."""

import contextlib
import ctypes
import fcntl
import importlib
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn, get_type_hints

import msgspec

from vla_rl.sandbox.descendants import become_subreaper, num_processes_of
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import FunctionCall, ProgramCall, Returned

RESULT_FD: Final = 3
PROGRAM_FILE: Final = "program.py"
NOT_ISOLATED: Final = b"\xc1not isolated"
"""In place of a result, which never begins with this byte: msgpack does not use it."""

_OWN_PROCESSES: Final = 0x10000000 | 0x20000000 | 0x08000000  # namespaces of users, processes and IPC
_OWN_NETWORK: Final = 0x40000000
_FIRST_UNUSED_UID: Final = 1_000_000_000
_SPARE_PROCESSES: Final = 64
_CLEAN_ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_MIB: Final = 1 << 20


def run_call(
    call: FunctionCall | ProgramCall, folder: Path, fds: tuple[int, int, int], *, can_isolate: bool, keeper_pid: int
) -> NoReturn:
    """Do what was asked, and end; where `can_isolate` turns out to be wrong, end without having done it.

    `fds`: where stdout, stderr and the result go. `keeper_pid`: of the process that forked this one.
    """
    try:
        os.setsid()
        become_subreaper()
        _take_over(folder, fds)
        if can_isolate and not try_isolation(network=call.limits.network):
            _write_all(RESULT_FD, NOT_ISOLATED)
            os._exit(1)
        _die_with_parent()  # a change of namespaces would undo it
        if os.getppid() != keeper_pid:  # it died before that
            os._exit(1)
        if can_isolate:
            _fork_as_first_process()
        _set_limits(call.limits, is_program=isinstance(call, ProgramCall), is_alone=can_isolate)
        if isinstance(call, ProgramCall):
            os.execve(sys.executable, [sys.executable, "-I", PROGRAM_FILE], {**_CLEAN_ENVIRONMENT, "HOME": str(folder)})
        pid = os.getpid()
        answer = _answer_of(call)
        if os.getpid() != pid:  # a copy that the function made of itself does not answer
            os._exit(0)
        _write_all(RESULT_FD, answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException as error:  # nothing may get back into the keeper's own code
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def try_isolation(*, network: bool) -> bool:
    """Move this process into namespaces of its own, from where no other process can be killed (`/proc` still lists them),
    and unless `network`, nothing be reached; False where the kernel does not let us.

    Its next child is the first process there: when it ends, the kernel kills all others at once.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:  # root's processes are never counted; under another real user they are, and files stay root's
        with contextlib.suppress(OSError):
            os.setresuid(_FIRST_UNUSED_UID + os.getpid(), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_OWN_PROCESSES | (0 if network else _OWN_NETWORK)) != 0:
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def _take_over(folder: Path, fds: tuple[int, int, int]) -> None:
    """Standard streams, nothing else open, and the call's own folder."""
    stdin = os.open(folder / "stdin", os.O_RDONLY)
    # first to numbers that nobody has, as some of them may stand where the others go
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (stdin, *fds)]):
        os.dup2(fd, number, inheritable=number < 3)
    for open_fd in map(int, os.listdir("/proc/self/fd")):
        if open_fd > 3:
            with contextlib.suppress(OSError):  # the listing's own is gone
                os.close(open_fd)
    os.chdir(folder)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _fork_as_first_process() -> None:
    """Go on in a child, the first of the new namespace; this process waits, and ends as it does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        _die_with_parent()
        if select.select([reading], [], [], 0)[0]:  # it died before that; its number reads 0 from here, dead or not
            os._exit(1)
        os.close(reading)
        return
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _set_limits(limits: ProcessLimits, *, is_program: bool, is_alone: bool) -> None:
    """`is_alone`: in namespaces of its own, where this user's other processes are not counted."""
    held = 0 if is_program else int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # alone there is one more, which waits outside for the first process of the namespace
    others = 1 if is_alone else num_processes_of(os.getuid()) + _SPARE_PROCESSES
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, others + limits.max_processes),
        (resource.RLIMIT_CPU, limits.most_cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_mb * _MIB),
        (resource.RLIMIT_AS, held + limits.memory_mb * _MIB),
    ):
        _, ceiling = resource.getrlimit(what)
        wanted = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(what, (wanted, wanted))


def _answer_of(call: FunctionCall) -> bytes:
    """What the function gives or raises, encoded; an answer that cannot be encoded is an error like any other."""
    try:
        module, _, name = call.path.partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        arguments = call.arguments
        if call.is_converted:
            hints = get_type_hints(function, include_extras=True)
            arguments = {name: msgspec.convert(value, hints[name]) for name, value in arguments.items()}
        return msgspec.msgpack.encode(Returned(value=function(**arguments)))  # type: ignore[operator]
    except (Exception, SystemExit) as error:
        return msgspec.msgpack.encode(Returned(error=f"{type(error).__name__}: {error}"[:4096]))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
