"""Limits of this process that have to leave room for many processes before they are started.

Exceeding a limit halfway raises an OSError deep inside a start, or makes ZeroMQ abort; neither
names the limit. Each child costs this process descriptors (its socket, its pidfd, its stderr, the
memory shared with it), address space (the shared memory is reserved at once, but takes memory
only when used), besides some threads of the machine.
"""

import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from vla_rl.errors import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTORS_OF_A_PROCESS: Final = 10
"""Descriptors that this process holds for each running child."""

OTHER_DESCRIPTORS: Final = 64
"""Descriptors reserved for everything else that a run opens: fork servers, engines, logs,
videos."""

THREADS_OF_A_PROCESS: Final = 4
"""Threads of each running child, counted in one with an environment that has none: its loop, its
heartbeat and ZeroMQ's two."""

OTHER_THREADS: Final = 10
"""Threads of this process besides its first, and its fork server, counted in a small run."""

_OTHER_ADDRESS_SPACE = 1 << 29
_LEAST_FILE_BYTES = 16 << 20
_NO_THREAD: Final = (
    "can't start new thread",
    # what is left of it where an event loop or an executor ends
    "cannot join thread before it is started",
)
_MOST_DESCRIPTORS = 1 << 16
"""The limit on open files is raised beyond this only as far as needed: some programs visit every
possible descriptor."""


def require_process_limits(
    num_processes: int, *, num_extra: int, shared_bytes: int, remedy: str
) -> None:
    """Check that this process's limits allow these children.

    Raises its soft limit on open files if they need it.

    Args:
        num_processes: children that will live at the same time.
        num_extra: additional children that live for a while, such as successors of those that are
            replaced.
        shared_bytes: memory that a child shares with this process in each direction.
        remedy: how to need less, for the error message.

    Raises: ConfigError if a limit is too low, naming the limit, the need and the command that
    raises it.
    """
    children = num_processes + num_extra
    _require_descriptors(num_processes, children, remedy)
    # those of ours that start later, and a fork server
    others = max(OTHER_THREADS - len(os.listdir("/proc/self/task")), 2)
    _require_threads(
        THREADS_OF_A_PROCESS * num_processes + others,
        f"{num_processes} child processes and this one",
        remedy,
    )
    _require_file_size(shared_bytes)
    _require_address_space(num_processes, children, 2 * shared_bytes, remedy)


def require_run_limits() -> None:
    """Check that this process's limits allow a run at all, before it writes anything.

    Raises: ConfigError, as `require_room` does.
    """
    remedy = "run it elsewhere"
    _require_descriptors(0, 0, remedy)
    _require_threads(OTHER_THREADS, "this process and its fork server", remedy)
    _require_file_size(0)


class ThreadLimit(NamedTuple):
    """A limit on processes and threads.

    Attributes:
        what: its name, for people.
        most: its value.
        used: processes and threads that count.
    """

    what: str
    most: int
    used: int


def find_thread_limit() -> ThreadLimit | None:
    """Return the limit that leaves the fewest processes and threads; None if there is none."""
    return min(_list_thread_limits(), key=lambda limit: limit.most - limit.used, default=None)


def explain_thread_limit(error: BaseException | None) -> str | None:
    """Return what to do about an error that a thread too many has caused; None for any other."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        each = left.pop()
        if each is None or each in seen:
            continue
        if isinstance(each, RuntimeError) and str(each) in _NO_THREAD:
            limit = find_thread_limit()
            which = (
                f"{limit.what} is {limit.most}" if limit is not None else "no limit is known here"
            )
            return (
                f"no further process or thread can be started: {which}, expected room for some "
                f"{OTHER_THREADS} threads and {THREADS_OF_A_PROCESS} for each simulator; raise the "
                "limit, or take fewer simulators (--simulators.num-envs)"
            )
        seen.append(each)
        left += [each.__cause__, each.__context__]
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return None


def _list_thread_limits() -> Iterator[ThreadLimit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not hold root to it.
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        yield ThreadLimit(
            "`ulimit -u`, for all processes of this user,", soft, _count_user_threads()
        )
    yield from read_cgroup_limits(
        Path("/proc/self/cgroup").read_text(encoding="utf-8"), Path("/sys/fs/cgroup")
    )


def read_cgroup_limits(listed: str, mounted: Path) -> Iterator[ThreadLimit]:
    """Yield the limits of the cgroups that hold this process, of either version.

    Args:
        listed: /proc/self/cgroup.
        mounted: folder at which they are.
    """
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        top = mounted / controllers
        group = top / path.lstrip("/")
        # Each group above limits too, and the one of a container is often two levels up.
        for folder in (group, *group.parents):
            most, used = folder / "pids.max", folder / "pids.current"
            if (
                most.is_file()
                and used.is_file()
                and (words := most.read_text(encoding="utf-8").strip()) != "max"
            ):
                yield ThreadLimit(
                    f"pids.max of the cgroup {folder}",
                    int(words),
                    int(used.read_text(encoding="utf-8")),
                )
            if folder == top:
                break


def _count_user_threads() -> int:
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                total += len(os.listdir(folder / "task"))
        except OSError:  # it has ended meanwhile
            continue
    return total


def _require_threads(need: int, who: str, remedy: str) -> None:
    limit = find_thread_limit()
    if limit is not None and limit.most - limit.used < need:
        raise ConfigError(
            f"{limit.what} is {limit.most} and {limit.used} are used, but {who} need about {need} more "
            f"processes and threads; raise it (`docker run --pids-limit`, `ulimit -u`), or {remedy}."
        )


def _require_file_size(shared_bytes: int) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Memory that processes share is a file for the kernel, so that `ulimit -f` holds for it.
    need = max(shared_bytes, _LEAST_FILE_BYTES)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    raise ConfigError(
        f"`ulimit -f` is {soft >> 10} KiB, expected at least {need >> 10}: no file of a run may be "
        "larger, nor the memory that a child process shares with this one; run `ulimit -f unlimited` "
        "in the shell before."
    )


def _require_descriptors(num_processes: int, children: int, remedy: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    need = held + children * DESCRIPTORS_OF_A_PROCESS + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    who = f"{num_processes} child processes need" if children else "a run needs"
    each = f" up to {children} processes take {DESCRIPTORS_OF_A_PROCESS} each," if children else ""
    what_for = (
        f"{who} about {need} open files ({held} are open,{each} everything else up to "
        f"{OTHER_DESCRIPTORS})"
    )
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"`ulimit -n` is {soft}, at most {hard} here, but {what_for}; run `ulimit -n {need}` "
            f"in the shell before, which may need an administrator, or {remedy}."
        )
    raised = max(
        need, _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    logger.warning("raised `ulimit -n` of this process from %d to %d: %s.", soft, raised, what_for)


def _require_address_space(
    num_processes: int, children: int, shared_bytes: int, remedy: str
) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    reserved = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    need = reserved + children * shared_bytes + _OTHER_ADDRESS_SPACE
    # a limit that was set on purpose is not raised
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    raise ConfigError(
        f"`ulimit -v` is {soft >> 10} KiB, but {num_processes} child processes need about "
        f"{need >> 10} KiB of address space "
        f"({reserved >> 10} KiB are taken, up to {children} processes share {shared_bytes >> 10} "
        "KiB each with this one); "
        "run `ulimit -v unlimited` in the shell before, which may need an administrator, or "
        f"{remedy}."
    )
