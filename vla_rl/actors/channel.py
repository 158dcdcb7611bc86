"""The connection of a caller to one incarnation of an actor, in any placement."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vla_rl.actors.codec import Codec
from vla_rl.actors.wire import Frames


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one incarnation, as its channel observed it."""

    pid: int
    cause: str
    last_words: tuple[str, ...] = field(default=())
    frozen: bool = False
    """Whether the process was alive but stuck, and was killed for that."""


OnMessage = Callable[[Frames], None]


class Channel(Protocol):
    """The caller's end. Made by a launcher together with the incarnation; used once.

    The launcher receives two callbacks: `on_message` is called with each message of the
    incarnation; `on_end` is called once, on the loop, when the incarnation has ended for any
    reason, and no message follows it. `on_message` may be replaced.
    """

    on_message: OnMessage

    @property
    def pid(self) -> int:
        """Process id of the actor; 0 in this loop."""
        ...

    @property
    def codec(self) -> Codec:
        """Encodes for this incarnation and decodes from it."""
        ...

    @property
    def actor_id(self) -> int:
        """Actor number in each envelope on this channel."""
        ...

    @property
    def unanswered(self) -> str:
        """Name of what has not answered yet, if that is not the incarnation itself.

        Else an empty string.
        """
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the incarnation is known to have ended, and `on_end` is about to be called."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the incarnation has ended, since `on_end` follows."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a call may be sent now, or else has to wait in `until_room`."""
        ...

    async def until_room(self) -> None:
        """Wait until the bytes on the way allow one more call, or the incarnation has ended."""
        ...

    def poll(self) -> None:
        """Deliver what has already arrived."""
        ...

    def kill(self) -> None:
        """End the incarnation at once; `on_end` follows."""
        ...

    async def until_gone(self) -> None:
        """Wait for the end; afterwards all resources of the incarnation are free."""
        ...


OnEnd = Callable[[Death], None]
