"""Check without waiting whether a descriptor is readable.

It is at input, at the end of a pipe, at the end of a process.
"""

import select


def is_ready(fd: int) -> bool:
    """Return whether a read of `fd` would not wait; for a pidfd, whether its process has ended.

    Uses poll(), since select() takes no descriptor above 1023, and a runtime of many processes has
    those.
    """
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(0))
