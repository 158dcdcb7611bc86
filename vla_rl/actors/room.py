"""Check that the limits of this process leave room for many processes before they are started.

Exceeding a limit halfway raises an OSError deep inside a start, or makes ZeroMQ abort; neither
names the limit. Each child costs this process descriptors (its socket, its pidfd, its stderr, the
memory shared with it) and address space (the shared memory is reserved at once, but takes memory
only when used).
"""

import logging
import os
import resource
from pathlib import Path
from typing import Final

from vla_rl.actors.placement import ChildProcess
from vla_rl.errors import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTORS_OF_A_PROCESS: Final = 10
"""Descriptors that this process holds for each running child."""

OTHER_DESCRIPTORS: Final = 64
"""Descriptors reserved for everything else that a run opens: fork servers, engines, logs,
videos."""

_OTHER_ADDRESS_SPACE = 1 << 29
_MOST_DESCRIPTORS = 1 << 16
"""The limit on open files is raised beyond this only as far as needed: some programs visit every
possible descriptor."""


def require_room(num_processes: int, placement: ChildProcess, *, beside: int, remedy: str) -> None:
    """Check that this process's limits allow these children.

    Raises its soft limit on open files if they need it.

    Args:
        num_processes: children that will live at the same time.
        placement: placement of each child.
        beside: additional children that live for a while, such as successors of those that are
            replaced.
        remedy: how to need less, for the error message.

    Raises: ConfigError if a limit is too low, naming the limit, the need and the command that
    raises it.
    """
    children = num_processes + beside
    _require_descriptors(num_processes, children, remedy)
    _require_address_space(num_processes, children, 2 * placement.arena_bytes, remedy)


def _require_descriptors(num_processes: int, children: int, remedy: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    need = held + children * DESCRIPTORS_OF_A_PROCESS + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    what_for = (
        f"{num_processes} child processes need about {need} open files ({held} are open, up to "
        f"{children} processes take {DESCRIPTORS_OF_A_PROCESS} each, everything else up to "
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
    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
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
