"""Tasks that an object owns: how they leave their group, and why one is cancelled.

A single error leaves its group as itself.
"""

import asyncio
from types import TracebackType


def is_being_cancelled() -> bool:
    """Return whether the running task was asked to end.

    If not, a CancelledError in it is an error of what it awaited.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def leave(
    tasks: asyncio.TaskGroup,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Leave `tasks` from the owner's `__aexit__`, waiting for all of them.

    A single error, of a task or of the owner's block, is raised as it was, traceback and notes
    included, so that callers catch it by its type; several are raised together as an
    `ExceptionGroup`.
    """
    only_error: Exception | None = None
    try:
        await tasks.__aexit__(kind, error, traceback)
    except ExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        only_error = errors.exceptions[0]
    if only_error is not None and only_error is not error:
        raise only_error
