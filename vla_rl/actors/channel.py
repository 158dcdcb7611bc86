"""What connects a caller to one incarnation of an actor, wherever that runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vla_rl.actors.codec import Codec
from vla_rl.actors.wire import Frames


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one incarnation, as its channel saw it."""

    pid: int
    cause: str
    last_words: tuple[str, ...] = field(default=())
    frozen: bool = False
    """Whether it lived, and was killed because it did not go on."""


OnMessage = Callable[[Frames], None]


class Channel(Protocol):
    """The caller's end. Made by a launcher together with the incarnation; used once.

    The launcher is given `on_message`, called with each message of the incarnation, and `on_end`, called once, on the
    loop, when the incarnation is gone for whatever reason; no message follows it. `on_message` may be replaced.
    """

    on_message: OnMessage

    @property
    def pid(self) -> int:
        """Process id there, 0 in this loop."""
        ...

    @property
    def codec(self) -> Codec:
        """Encodes for this incarnation and decodes from it."""
        ...

    @property
    def actor_id(self) -> int:
        """What every envelope on this channel carries as its actor."""
        ...

    @property
    def unanswered(self) -> str:
        """Who has not said a word so far, where that is not the incarnation itself; else nothing."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the incarnation is known to be gone, and `on_end` about to be called."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue one message; where the incarnation is gone it is dropped, since `on_end` follows."""
        ...

    def poll(self) -> None:
        """Deliver what has already arrived."""
        ...

    def kill(self) -> None:
        """End the incarnation at once; `on_end` follows."""
        ...

    async def until_gone(self) -> None:
        """Wait for the end; all resources of the incarnation are free then."""
        ...


OnEnd = Callable[[Death], None]
