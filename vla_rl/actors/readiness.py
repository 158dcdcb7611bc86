"""Whether a descriptor has something to say, without waiting: input, the end of a pipe, the end of a process."""

import select


def is_ready(fd: int) -> bool:
    """Whether a read of `fd` would not wait; of a pidfd, whether its process is gone.

    By poll(), since select() takes no descriptor above 1023, and a runtime of many processes has those.
    """
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(0))
