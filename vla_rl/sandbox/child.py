"""The code of a forked child: isolation, limits, and then the function or the program."""

import contextlib
import fcntl
import os
import pkgutil
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, get_type_hints

import msgspec

from vla_rl.sandbox.isolation import Isolation, NotIsolated
from vla_rl.sandbox.linux import become_subreaper, count_user_processes
from vla_rl.sandbox.protocol import FunctionCall, Means, ProcessLimits, ProgramCall, Returned
from vla_rl.util.foreign_data import repair_unicode

RESULT_FD: Final = 3
_STATUS_FD: Final = 4
_RUNNER_FD: Final = 5
PROGRAM_FILE: Final = "program.py"
NOT_ISOLATED: Final = b"\xc1not isolated: "
"""Prefix of a reason that is sent instead of a result; msgpack does not use its first byte, so no
result begins with it."""

_SPARE_PROCESSES: Final = 64
_CLEAN_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
}
_NAME: Final = {"LOGNAME": "sandbox"}
"""Environment that `getpass.getuser` reads; without it, it raises for a user without an entry in
the user database."""

_MIB: Final = 1 << 20


def run_call(
    call: FunctionCall | ProgramCall, folder: Path, fds: Sequence[int], isolation: Isolation
) -> NoReturn:
    """Run the call and exit; exit without running it if the isolation fails this time.

    Args:
        call: the call to run.
        folder: an empty folder for this call only.
        fds: pipes for stdout, stderr, the result and the status, and the call runner's pidfd.
        isolation: the isolation that forked this process.
    """
    try:
        os.setsid()
        become_subreaper()
        _take_over_streams(fds)
        isolation.enter((1, 2, RESULT_FD), _STATUS_FD, _RUNNER_FD)
        _enter_folder(folder, call)
        _set_limits(call.limits, is_program=isinstance(call, ProgramCall), means=isolation.means)
        if isinstance(call, ProgramCall):
            environment = {
                **_CLEAN_ENVIRONMENT,
                **_NAME,
                "HOME": str(folder),
                "TMPDIR": str(folder),
            }
            os.execve(sys.executable, [sys.executable, "-I", PROGRAM_FILE], environment)
        pid = os.getpid()
        answer = _call_function(call)
        # a process that the function forked returns here too, and must not answer
        if os.getpid() != pid:
            os._exit(0)
        _write_all(RESULT_FD, answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except NotIsolated as failure:
        report_not_isolated(failure, RESULT_FD)
    except BaseException as error:  # no exception may return into the call runner's own code
        try:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(1)


def report_not_isolated(failure: NotIsolated, result_fd: int) -> NoReturn:
    """Write the reason instead of a result, and exit."""
    _write_all(result_fd, NOT_ISOLATED + str(failure).encode())
    os._exit(1)


def _take_over_streams(fds: Sequence[int]) -> None:
    """Move the streams to their descriptors and close all others.

    Make the kernel kill this process if memory runs out.
    """
    # first to unused numbers, because one may have the number that another needs
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds], start=1):
        os.dup2(fd, number, inheritable=number < RESULT_FD)
    for open_fd in map(int, os.listdir("/proc/self/fd")):
        if open_fd > _RUNNER_FD:
            # the descriptor of the listing itself is closed already
            with contextlib.suppress(OSError):
                os.close(open_fd)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    # of all processes of a run, the kernel should end the one that can be repeated
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def _enter_folder(folder: Path, call: FunctionCall | ProgramCall) -> None:
    """Enter the call's own folder, which holds its input, its program and its temporary files."""
    os.chdir(folder)
    Path("stdin").write_bytes(_encoded(call.stdin) if isinstance(call, ProgramCall) else b"")
    with open("stdin", "rb") as stdin:
        os.dup2(stdin.fileno(), 0)
    if isinstance(call, ProgramCall):
        Path(PROGRAM_FILE).write_bytes(_encoded(call.source))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ.update(_NAME)


def _set_limits(limits: ProcessLimits, *, is_program: bool, means: frozenset[Means]) -> None:
    held = (
        0
        if is_program
        else int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    if "own_user" in means:
        others = 0
    elif "namespaces" in means:  # this user's other processes are not counted there
        others = 1  # the first one
    else:
        others = count_user_processes(os.getuid()) + _SPARE_PROCESSES
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


def _call_function(call: FunctionCall) -> bytes:
    """Call the function and encode its value or its error.

    A value that cannot be encoded is an error too.
    """
    try:
        function = pkgutil.resolve_name(call.path)
        arguments = call.arguments
        if call.is_converted:
            hints = get_type_hints(function, include_extras=True)
            arguments = {
                name: msgspec.convert(value, hints[name]) for name, value in arguments.items()
            }
        return msgspec.msgpack.encode(Returned(value=function(**arguments)))
    except (Exception, SystemExit) as error:
        words = repair_unicode(f"{type(error).__name__}: {error}"[:4096])
        return msgspec.msgpack.encode(Returned(error=words))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
