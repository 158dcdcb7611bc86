"""Blocking work in a thread that is always waited for, even by a caller that is being cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from vla_rl.actors.completion import to_its_end

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_to_its_end(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """`fn(*args)` in a thread. A cancellation is let through only once `fn` has returned: a thread cannot be stopped."""
    return await to_its_end(asyncio.ensure_future(asyncio.to_thread(fn, *args)))
