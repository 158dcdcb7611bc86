"""The threads of this process that the kernel knows, whoever started them."""

import os
import threading
from pathlib import Path


def other_threads() -> list[str]:
    """Names of all threads beside the first one, sorted; those of C libraries have the name that the kernel shows."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    return sorted(known.get(int(task.name)) or (task / "comm").read_text().strip() for task in tasks)


def refuse_threads(culprit: str) -> None:
    """Raise RuntimeError where there are any: in a fork they would be missing, and their locks held for ever."""
    if names := other_threads():
        raise RuntimeError(
            f"{culprit} left {len(names)} threads running in the fork server ({', '.join(names)}); a process with threads "
            "cannot be forked safely. Leave them to the children, or start the children as fresh interpreters."
        )
