"""The version of the weights that engines serve, and the one that is on its way to them.

staged ─► begin ─► applied in every engine ─► now        the learner waits for it,
            └────── coming ──────────────────┘           or goes on: `go_ahead`
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class ServedVersion:
    """The versions of one policy's engines. Owned by one event loop.

    Args: `version`, the one that they begin with.

    Attributes:
        now: version that all engines serve.
        coming: version that they will serve; `now` if none is on its way.
        goes_ahead: whether `begin` returns before a version is applied.
    """

    def __init__(self, version: int) -> None:
        self.now = self.coming = version
        self.goes_ahead = False
        self._applying: asyncio.Task[None] | None = None
        self._calls: list[Callable[[], None]] = []

    async def begin(
        self, version: int, applying: Coroutine[Any, Any, None], tasks: asyncio.TaskGroup
    ) -> None:
        """Apply a version; return once it is applied, or at once if the learner goes ahead.

        Args:
            version: its number.
            applying: applies it, and calls `note`.
            tasks: owns it if the learner goes ahead; an error is theirs then.
        """
        if not self.goes_ahead:
            await applying
            return
        self.coming = version
        self._applying = tasks.create_task(applying, name=f"weights {version} to the engines")

    async def arrive(self) -> None:
        """Wait until nothing is on its way."""
        if self._applying is not None:
            await asyncio.wait((self._applying,))

    def note(self, version: int) -> None:
        """Note that all engines serve this version."""
        self.now = self.coming = version
        for call in self._calls:
            call()

    def when_served(self, call: Callable[[], None]) -> None:
        """Call `call` each time that engines serve another version."""
        self._calls.append(call)
