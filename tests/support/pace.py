"""Deadlines that have to pass for one call and to hold for the others, on machines of any speed."""

from collections.abc import Awaitable, Callable

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
