"""Durations on machines of any speed: deadlines that scale, CPU time that grows with an input."""

import time
from collections.abc import Awaitable, Callable
from typing import Final

SCALES = (1.0, 8.0, 24.0)
"""The first is for a machine with nothing else to do; what is broken fails at all of them."""


async def at_some_pace(body: Callable[[float], Awaitable[None]]) -> None:
    """Run `body` with every one of its durations multiplied by a scale, and by a larger one where
    it fails.

    A machine that holds a process up for a second fails the first run, and none of the next.
    Raises: what the last raised.
    """
    for scale in SCALES[:-1]:
        try:
            return await body(scale)
        except Exception as error:  # a body that lost against the clock may fail anywhere
            print(f"failed at {scale:g} times its durations: {error!r}")
    return await body(SCALES[-1])


MEASURABLE_S: Final = 0.05
"""CPU time from which on a ratio says something."""

MOST_CHARACTERS: Final = 1 << 22


def assert_grows_in_proportion(
    work: Callable[[int], object], *, most_characters: int = MOST_CHARACTERS
) -> None:
    """Fail if four times the size takes more than ten times the CPU time: quadratic work takes 16
    times.

    Args:
        work: does the work for an input of a size.
        most_characters: largest size, at which work of less than `MEASURABLE_S` passes.
    """
    size = 1 << 12
    while (took := cpu_time(work, size)) < MEASURABLE_S and size < most_characters:
        size *= 2
    # the size that was just measured, and a quarter of it, which is the best of three
    smaller = min(cpu_time(work, size // 4) for _ in range(3))
    larger = min(took, cpu_time(work, size))
    assert larger <= max(10.0 * smaller, MEASURABLE_S), (
        f"{size // 4} took {smaller:.4f} s of CPU time, {size} took {larger:.4f} s"
    )


def cpu_time(work: Callable[[int], object], size: int) -> float:
    """Return the CPU time of this thread for one call, in seconds."""
    began = time.thread_time()
    work(size)
    return time.thread_time() - began
