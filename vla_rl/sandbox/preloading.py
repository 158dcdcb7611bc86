"""Import of a module in the keeper, which must watch its calls meanwhile."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

IMPORT_TIMEOUT_S: Final = 60
"""Most seconds for one import."""

_LOOK_EVERY_S: Final = 0.1


def import_ahead(module: str, meanwhile: Callable[[], None] | None) -> None:
    """Import a module ahead of its calls.

    If that fails or takes too long, the call that needs it fails with the reason.

    Args:
        module: name of the module.
        meanwhile: called ten times a second, between two instructions of the import; must import
            nothing itself. None: the import is not interrupted until its time is over.
    """
    until = time.monotonic() + IMPORT_TIMEOUT_S

    def look(number: int, stack: object) -> None:
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() > until:
            raise TimeoutError(f"it took longer than {IMPORT_TIMEOUT_S} s")

    previous = signal.signal(signal.SIGALRM, look)
    signal.setitimer(
        signal.ITIMER_REAL, IMPORT_TIMEOUT_S if meanwhile is None else _LOOK_EVERY_S, _LOOK_EVERY_S
    )
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        sys.stderr.write(
            f"the sandbox cannot import {module!r} ahead of its calls: "
            f"{type(error).__name__}: {error}\n"
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.stderr.write(
            f"the sandbox has {num_threads} threads since it imported {module!r}, expected 1: a "
            "call that needs one of them "
            "will hang until its deadline; start threads in functions, not when a module is "
            "imported\n"
        )
