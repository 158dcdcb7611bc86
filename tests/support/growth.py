"""How the work of a function grows with its input, in CPU time of this process."""

import time
from collections.abc import Callable
from typing import Final

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
