"""The limit on an actor's unanswered calls; a sender waits while the limit is reached."""

import asyncio
from collections import deque


class Mailbox:
    """Places for unanswered calls. Waiting senders get them in the order of their requests."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"mailbox is {size}, expected at least 1 unanswered call.")
        self.size = size
        self._taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of senders that wait for a place."""
        return len(self._waiters)

    def try_enter(self) -> bool:
        """Take a place if one is free and no sender waits for it; return whether it was taken."""
        if self._taken < self.size and not self._waiters:
            self._taken += 1
            return True
        return False

    async def enter(self) -> None:
        """Take a place; waits while the mailbox is full."""
        if self.try_enter():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.leave()  # the place came together with the cancellation: pass it on
            elif waiter in self._waiters:  # else `leave` has passed over it
                self._waiters.remove(waiter)
            raise

    def leave(self) -> None:
        """Free a place, or hand it to the sender that has waited longest."""
        while self._waiters:
            waiter = self._waiters.popleft()
            # the place is handed over, not freed: else a caller that came later could take it first
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken -= 1
