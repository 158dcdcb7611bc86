"""The parent process of a keeper.

When the keeper or their owner ends, it kills the rest and removes their folder.

    owner ──► reaper ──fork──► keeper ──fork──► calls, and all that they start

It only waits for the two of them, so neither an import nor many calls can delay it. Orphans below
it become its children. If it is stopped when the owner dies, the kernel resumes it (its
parent-death signal is SIGCONT). If it is killed itself, the kernel kills the keeper and all calls;
processes that a call without namespaces started are then left over.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from vla_rl.actors.owned_folder import remove_tree
from vla_rl.actors.parent_link import die_with_parent_only
from vla_rl.sandbox.descendants import become_subreaper, kill_all_below
from vla_rl.sandbox.keeper import Keeper
from vla_rl.sandbox.linux import PR_SET_PDEATHSIG, prctl
from vla_rl.sandbox.protocol import Start

_SIGNALS_TO_END_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> NoReturn:
    """Run `python -m vla_rl.sandbox.reaper <Start as JSON>`.

    No process and no file is left when it has ended.
    """
    start = msgspec.json.decode(sys.argv[1], type=Start)
    become_subreaper()
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):  # the owner is dead already
        owner = os.pidfd_open(start.owner_pid)
        if os.getppid() == start.owner_pid:
            _keep(start, owner)
    remove_tree(Path(start.folder))
    os._exit(0)


def _keep(start: Start, owner: int) -> None:
    """Fork the keeper, wait for its end or for the owner's, and kill everything that is left."""
    reaper_pid, signals = os.getpid(), os.pipe()
    keeper_pid = os.fork()
    if keeper_pid == 0:
        die_with_parent_only(reaper_pid)
        for fd in (owner, start.folder_lock, *signals):
            os.close(fd)
        run_keeper(start)
    os.close(start.connection)  # the owner learns from its end that the keeper is gone
    os.set_blocking(signals[1], False)
    signal.set_wakeup_fd(signals[1])
    for number in _SIGNALS_TO_END_ON:
        signal.signal(number, lambda *_: None)
    # three ways to end, one wait: the owner dies, the keeper dies, or somebody asks this process to
    select.select([owner, os.pidfd_open(keeper_pid), signals[0]], [], [])
    kill_all_below(reaper_pid)


def run_keeper(start: Start) -> NoReturn:
    """Run the keeper until its socket is closed."""
    try:
        become_subreaper()
        with socket.socket(fileno=start.connection) as connection:
            os.set_inheritable(connection.fileno(), False)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                Keeper(connection, Path(start.folder), start.without).run()
        os._exit(0)  # without exit handlers of imported modules
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:  # no exception may return into the reaper's own code
        os._exit(1)


if __name__ == "__main__":
    main()
