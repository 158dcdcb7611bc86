"""An actor in the caller's own loop.

Channel, codec and server are those of other placements.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from vla_rl.actors.actor import Actor, MethodTable
from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.server import ActorServer
from vla_rl.actors.wire import OWN_CALL, Frames, Kind
from vla_rl.util.error_reports import make_report
from vla_rl.util.stalls import LoopLag


class InLoopChannel:
    """Owns the task that builds and serves the actor. See `Channel`.

    Args:
        build: makes the instance; runs in the actor's task.
        mailbox: largest number of unanswered calls.
        lag: lag sampler of this loop.
    """

    pid = 0
    actor_id = 0
    unanswered = ""
    has_room = True

    def __init__(
        self,
        name: str,
        table: MethodTable,
        build: Callable[[], Actor],
        mailbox: int,
        lag: LoopLag,
        on_message: OnMessage,
        on_end: OnEnd,
    ) -> None:
        self.codec = Codec()
        self.on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._server: ActorServer | None = None
        self._killed = False
        self._task = self._loop.create_task(
            self._live(table, build, mailbox, lag), name=f"actor {name}"
        )
        self._task.add_done_callback(self._ended)

    @property
    def is_ending(self) -> bool:
        """Whether its task has ended."""
        return self._task.done()

    def send(self, frames: Frames) -> None:
        """Hand over a copy of one message; it is dropped if the actor has ended."""
        if self._server is not None and not self._task.done():
            self._server.on_message([bytes(frame) for frame in frames])

    async def until_room(self) -> None:
        """Return at once: the mailbox alone bounds what is on the way in this host."""

    def poll(self) -> None:
        """Do nothing: there is no buffer between the actor and its caller."""

    def kill(self) -> None:
        """Cancel all work of the actor."""
        self._killed = True
        if self._server is not None:
            self._server.is_killed = True
        self._task.cancel()

    async def until_gone(self) -> None:
        """Wait until its task has ended."""
        await asyncio.wait([self._task])

    async def _live(
        self, table: MethodTable, build: Callable[[], Actor], mailbox: int, lag: LoopLag
    ) -> None:
        try:
            actor = build()
            codec = self.codec
            self._server = ActorServer(
                actor, table, codec, self.actor_id, self._receive, mailbox, lag, at_once=False
            )
            await self._server.serve()
        except Exception as error:  # the owner decides: it receives the report while the actor ends
            self._receive(
                self.codec.encode(
                    Kind.ERROR, 0, self.actor_id, OWN_CALL, make_report(error), "birth or end"
                )
            )

    def _receive(self, frames: Frames) -> None:
        self.on_message([bytes(frame) for frame in frames])

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            cause = "killed" if self._killed else "its task was cancelled"
        else:
            error = task.exception()
            cause = "it returned" if error is None else f"{type(error).__name__}: {error}"
        self._on_end(Death(0, cause))
