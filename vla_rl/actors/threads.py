"""The threads of this process that the kernel lists, including those of C libraries."""

import os
import threading
from pathlib import Path


def other_threads() -> list[str]:
    """Return the names of all threads but the first, sorted.

    For threads of C libraries they are the names that the kernel shows.
    """
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    return sorted(
        known.get(int(task.name))
        or (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
        for task in tasks
    )


def refuse_threads(culprit: str) -> None:
    """Raise RuntimeError if there are other threads.

    A fork would lack them, and hold their locks for ever.
    """
    if names := other_threads():
        raise RuntimeError(
            f"{culprit} left {len(names)} threads running in the fork server "
            f"({', '.join(names)}); a process with threads "
            "cannot be forked safely. Leave them to the children, or start the children as fresh "
            "interpreters."
        )
