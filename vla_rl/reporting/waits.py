"""Waits of a running run, asked from the same machine.

    run directory / process.json ─► machine, process, socket
    abstract socket  ◄── `ask_run`; a thread of the run answers its own user and root, not its loop

The answer has who waits, the tasks, dead processes, and whether the loop answers. An abstract socket
has a name and no path: a kill leaves nothing behind, and the folder of temporary files may have any
name. Messages are JSON, and the question is the connection itself.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import msgspec

from vla_rl.actors.processes.liveness import describe_process
from vla_rl.errors import VlaRlError
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.util.atomic_files import replace_file
from vla_rl.util.ownership import remove_all_abandoned_folders
from vla_rl.util.stalls import (
    count_progress,
    format_thread_stack,
    list_awaiting_frames,
    list_recent_exits,
    list_tasks,
    list_waits,
    seconds_since_progress,
)

LOOP_ANSWERS_WITHIN_S = 0.5
"""Time after which a loop counts as blocked. A step of it takes milliseconds."""


class ListedWait(msgspec.Struct, frozen=True, kw_only=True):
    """One task that waits.

    Example:
        ListedWait(who="episode 12", on="simulator 3: reset", seconds=41.5, process="pid 4711 is running")
    """

    who: str
    on: str
    seconds: float
    process: str = ""
    """State of the process that has to answer, if it is one of this host."""


class ListedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the loop, and the line that it stands at.

    Example:
        ListedTask(name="episode 12", at="Lease.step (vla_rl/env_workers/pool.py:240)")
    """

    name: str
    at: str


class ListedExit(msgspec.Struct, frozen=True, kw_only=True):
    """One process that ended unexpectedly, with the end of its stderr."""

    what: str
    seconds: float


class RunWaits(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run says about its waiting."""

    pid: int
    quiet_s: float
    """Seconds since the last progress."""

    progress: dict[str, int]
    blocked_at: str | None
    """Stack of the loop's thread if the loop does not answer; None if it does."""

    waits: tuple[ListedWait, ...]
    """The longest first."""

    tasks: tuple[ListedTask, ...]
    threads: tuple[ListedTask, ...]
    """Threads besides the loop's, and the line that each stands at."""

    exits: tuple[ListedExit, ...] = msgspec.field(name="deaths")
    """The newest last."""


def collect_waits(loop: asyncio.AbstractEventLoop, loop_thread_id: int, pid: int) -> RunWaits:
    """Return what a run waits for now; called on any thread but the loop's."""
    answers = _loop_answers(loop)
    now = time.monotonic()
    states: dict[int, str] = {}
    waits = list_waits()
    for wait in waits:
        # 512 waits may name one engine, and each look into /proc takes a while on a busy machine
        if wait.pid and wait.pid not in states:
            states[wait.pid] = f"pid {wait.pid} is {describe_process(wait.pid)}"
    return RunWaits(
        pid=pid,
        quiet_s=seconds_since_progress(),
        progress=count_progress(),
        blocked_at=None if answers else format_thread_stack(loop_thread_id),
        waits=tuple(
            ListedWait(
                who=wait.who, on=wait.on, seconds=now - wait.since, process=states.get(wait.pid, "")
            )
            for wait in waits
        ),
        tasks=tuple(
            ListedTask(
                name=task.get_name(), at=_describe_frames(list_awaiting_frames(task.get_coro()))
            )
            for task in list_tasks(loop)
        ),
        threads=_other_threads(loop_thread_id),
        exits=tuple(
            ListedExit(what=each.what, seconds=now - each.at) for each in list_recent_exits()
        ),
    )


def _loop_answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # it is closed
        return False
    # asked and not assumed: a loop that computes for seconds is what the reader looks for
    return answered.wait(LOOP_ANSWERS_WITHIN_S)


def _other_threads(loop_thread_id: int) -> tuple[ListedTask, ...]:
    frames, left_out = sys._current_frames(), (loop_thread_id, threading.get_ident())
    return tuple(
        ListedTask(name=thread.name, at=_describe_frames([frames[thread.ident]]))
        # a thread that has just begun has no frame yet
        for thread in threading.enumerate()
        if thread.ident not in left_out and thread.ident in frames
    )


def _describe_frames(frames: list[FrameType]) -> str:
    """Return the innermost functions with their lines, then the outermost."""
    # three, because the innermost is often asyncio's and the next an engine's or a pool's
    innermost = [_describe_frame(frame) for frame in reversed(frames[-3:])]
    outermost = [frames[0].f_code.co_qualname] if len(frames) > 3 else []
    return " in ".join([*innermost, *outermost]) or "its end"


def _describe_frame(frame: FrameType) -> str:
    path = Path(*Path(frame.f_code.co_filename).parts[-3:])
    return f"{frame.f_code.co_qualname} ({path}:{frame.f_lineno})"


logger = logging.getLogger(__name__)

ANSWER_S = 3.0
"""Longest time for an answer."""

_PROCESS_FILE = "process.json"
_CREDENTIALS = struct.Struct("3i")  # of the kernel: pid, uid and gid


class NoAnswer(VlaRlError):
    """A run could not be asked, or did not answer; the message is one sentence."""


class RunningProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that carries out a run, as its run directory names it.

    Example:
        RunningProcess(host="trainer", boot_id="6d0f...", pid=4711, start_ticks=81234, socket="@vla_rl/...")
    """

    host: str
    boot_id: str
    """Changes when the machine starts again."""

    pid: int
    start_ticks: int
    """Tells a process from a later one with the same pid."""

    socket: str


class WaitsSocket:
    """Answers `ask_run` from a thread of its own while its `with` block is open.

    If there is no room for its file, one line says so and the run goes on without.
    """

    def __init__(self, run: Path) -> None:
        self._file = run / _PROCESS_FILE
        self._loop, self._loop_thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._stop = threading.Event()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            try:
                listener, wakeup = self._listen(stack)
            except OSError as error:
                logger.warning(
                    "`vla-rl why` cannot ask this run what it waits for: %s; make room in the run "
                    "directory.",
                    error,
                )
                return self
            thread = threading.Thread(
                target=self._serve, args=(listener, wakeup), name="answers why", daemon=True
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(os.eventfd_write, wakeup, 1)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _listen(self, stack: contextlib.ExitStack) -> tuple[socket.socket, int]:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        # random, so that nobody binds it first
        name = f"@vla_rl-waits-{os.getpid()}-{secrets.token_hex(16)}"
        listener.bind(_socket_address(name))
        listener.listen()
        wakeup = os.eventfd(0)
        stack.callback(os.close, wakeup)
        pid = os.getpid()
        process = RunningProcess(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid=pid,
            start_ticks=_start_ticks(pid) or 0,
            socket=name,
        )
        replace_file(self._file, msgspec.json.encode(process))
        stack.callback(self._forget)
        return listener, wakeup

    def _forget(self) -> None:
        with contextlib.suppress(OSError):  # the directory is gone, or its disk does not answer
            self._file.unlink()

    def _serve(self, listener: socket.socket, wakeup: int) -> None:
        remove_all_abandoned_folders()  # in this thread: what killed runs left behind may be large
        news = select.poll()
        news.register(listener, select.POLLIN)
        news.register(wakeup, select.POLLIN)
        while all(ready != wakeup for ready, _ in news.poll()):
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(ANSWER_S)
                    if _peer_uid(connection) not in (0, os.getuid()):
                        continue
                    waits = collect_waits(self._loop, self._loop_thread_id, os.getpid())
                    connection.sendall(msgspec.json.encode(waits))
            except OSError:  # who asked has gone
                continue
            except Exception:  # a later question may be answered
                logger.exception("a question of `vla-rl why` could not be answered.")


def ask_run(run: RunDirectory, *, within_s: float = ANSWER_S) -> RunWaits:
    """Ask a running run what it waits for. Blocks for at most `within_s`.

    Raises: NoAnswer if it has ended, runs elsewhere, or does not answer in time.
    """
    process = _read_process(run)
    try:
        data = _receive(process.socket, within_s)
        if not data:
            raise NoAnswer(
                f"{run.path} runs in process {process.pid}, which answers only the user who started it "
                "and root; ask as one of them"
            )
        return msgspec.json.decode(data, type=RunWaits)
    except (OSError, msgspec.DecodeError) as error:
        raise NoAnswer(
            f"{run.path} runs in process {process.pid}, which gave no answer within "
            f"{within_s:g} s ({error or type(error).__name__}); it is "
            f"{describe_process(process.pid)}"
        ) from error


def _read_process(run: RunDirectory) -> RunningProcess:
    path = run.path / _PROCESS_FILE
    try:
        process = msgspec.json.decode(path.read_bytes(), type=RunningProcess)
    except FileNotFoundError:
        raise NoAnswer(
            f"{run.path} has ended, or has not started yet: it has no {_PROCESS_FILE}; expected a run "
            "that is going on"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise NoAnswer(
            f"{path} cannot be read ({error}), expected the process of the run; ask as the user "
            "who started it"
        ) from error
    this_host = socket.gethostname()
    if process.host != this_host:
        raise NoAnswer(
            f"{run.path} runs on {process.host!r} and this is {this_host!r}; ask it there, only "
            "processes of the same machine can"
        )
    if process.boot_id != _boot_id() or _start_ticks(process.pid) != process.start_ticks:
        raise NoAnswer(
            f"{run.path} has ended: its process {process.pid} was killed, or its machine was "
            "restarted; continue it with --resume"
        )
    return process


def _socket_address(name: str) -> str:
    """Return the address of an abstract socket, whose first character stands for a zero byte."""
    return f"\0{name.removeprefix('@')}"


def _peer_uid(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    return int(uid)


def _receive(name: str, within_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(within_s)
        connection.connect(_socket_address(name))
        parts = []
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if it has ended."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
