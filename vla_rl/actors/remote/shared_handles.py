"""Handles that were sent to another actor: each has a connection of its own to the actor.

    owner: runtime.share(camera) ──► camera: listens for one key ──► owner: a handle, with address and key
    owner: reader.read(handle) ──► reader: the first call connects ──► camera

The connection is encrypted on this machine too, so that a handle is the same value wherever it goes.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from vla_rl.actors.calls.actor import Actor, MethodTable, get_import_path, get_method_table
from vla_rl.actors.calls.callers import GUEST_CALLS
from vla_rl.actors.calls.client import ActorClient
from vla_rl.actors.calls.handles import get_client, handle_class
from vla_rl.actors.calls.pending import ActorLifecycle, ActorState
from vla_rl.actors.processes.channels import ActorExit
from vla_rl.actors.remote.host_connection import LINK_WITHIN_S
from vla_rl.actors.remote.peer_sockets import SocketAddress, open_link
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import ActorReference, Frames, OnMessage
from vla_rl.errors import ActorDied

_THIS_MACHINE: Final = "127.0.0.1"


class SharedChannel:
    """The holder's connection to an actor. See `Channel`.

    Args:
        reference: what was sent.
        on_message, on_end: as for other channels.

    Raises: ConnectionError for an address that cannot be.
    """

    pid: Final = 0
    """Unknown: a process id of another host would mean nothing here."""

    actor_id: Final = 0
    is_ending: Final = False

    def __init__(
        self,
        reference: ActorReference,
        on_message: OnMessage,
        on_end: Callable[[ActorExit], None],
    ) -> None:
        self.codec, self.on_message, self._on_end = Codec(), on_message, on_end
        self._stack = ExitStack()
        address = SocketAddress(port=reference.port, public_key=reference.public_key)
        self._link = self._stack.enter_context(
            open_link(
                reference.host or _THIS_MACHINE, address, reference.keys, self._take, self._on_lost
            )
        )
        self._timer = asyncio.get_running_loop().call_later(LINK_WITHIN_S, self._check)
        self._is_closed = False
        self.codec.peer_host = reference.host

    @property
    def unanswered(self) -> str:
        """Address that has not answered yet; else empty."""
        return "" if self._link.is_up else self._link.address

    def send_message(self, frames: Frames) -> None:
        """Queue one message."""
        self._link.send_frames(frames)

    @property
    def has_room(self) -> bool:
        """Whether the bytes on the way to the actor allow one more call."""
        return self._link.has_room

    async def until_room(self) -> None:
        """Wait until they do, or the connection has ended."""
        await self._link.wait_for_room()

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._link.deliver_received()

    def kill_incarnation(self) -> None:
        """Close the connection: the actor is not ours, and lives on."""
        self._end("its handle was closed")

    async def until_gone(self) -> None:
        """Return at once: nothing of the actor is here."""

    def _take(self, frames: Frames) -> None:
        self.on_message(frames)

    def _check(self) -> None:
        if not self._link.is_up:
            self._end(
                f"{self._link.address} does not answer within {LINK_WITHIN_S:g} s; an actor outside of a "
                "`RemoteHost` listens on its own machine only"
            )

    def _on_lost(self) -> None:
        self._end(f"the connection to {self._link.address} was lost")

    def _end(self, cause: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._timer.cancel()
            self._link.deliver_received()  # its last answers
            self._stack.close()
            self._on_end(ActorExit(0, cause))


class _OpenedByUse(ActorLifecycle):
    """State of an actor whose handle was received: its first call opens the connection."""

    def __init__(self, name: str, connect: Callable[[], None]) -> None:
        super().__init__(name)
        self._connect = connect

    async def until_running(self) -> None:
        if self.state is ActorState.STARTING:
            self._connect()
        await super().until_running()


class SharedClient(ActorClient):
    """Calls an actor that another runtime owns.

    Args:
        reference: what was sent.
        table: methods of the actor's class.
    """

    def __init__(self, reference: ActorReference, table: MethodTable) -> None:
        self._reference = reference
        self._channel: SharedChannel | None = None
        super().__init__(
            reference.name,
            table,
            GUEST_CALLS,
            # its owner watches it: one that stands still is killed, which ends this connection
            [None] * len(table.methods),
            lifecycle=_OpenedByUse(reference.name, self._open),
        )

    def make_reference(self) -> ActorReference:
        """Return what a message carries. Raises: TypeError if the handle was used here."""
        if self.state is not ActorState.STARTING:
            raise TypeError(
                f"the handle of {self.name!r} is used here, and its connection is for one holder; "
                "let its runtime share the actor again."
            )
        return self._reference

    def close(self) -> None:
        """Close the connection; calls raise ActorDied."""
        if self._channel is not None:
            self._channel.kill_incarnation()
        elif self.state is ActorState.STARTING:
            self.fail_waiters(ActorState.STOPPED, ActorDied(self.name, 0, "its handle was closed"))

    def close_later(self) -> None:
        """Close the connection from any thread, as the collector of garbage may run in any."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.close)

    def _open(self) -> None:
        try:
            channel = SharedChannel(self._reference, self.on_message, self._on_end)
        except ConnectionError as error:
            self.fail_waiters(ActorState.DEAD, ActorDied(self.name, 0, str(error)))
            return
        self._channel = channel
        self.attach_channel(channel)

    def _on_end(self, death: ActorExit) -> None:
        self.detach_channel(death, ActorState.DEAD)


def make_shared_handle(actor_class: Any, reference: ActorReference) -> Any:
    """Return the handle that a reference stands for, where a signature declares `actor_class`.

    Raises: ValueError if it is no such actor.
    """
    if not (isinstance(actor_class, type) and issubclass(actor_class, Actor)):
        name = getattr(actor_class, "__name__", actor_class)
        raise ValueError(f"Expected `{name}`, got a handle of the actor {reference.target}")
    table = get_method_table(actor_class)
    # the class is the declared one: a message may not name a module that is imported here
    if get_import_path(actor_class) != reference.target:
        raise ValueError(f"Expected a handle of {actor_class.__name__}, got {reference.target}")
    if table.fingerprint != reference.fingerprint:
        raise ValueError(
            f"{reference.target} has other methods here than at its owner; run the same code on both"
        )
    client = SharedClient(reference, table)
    handle = handle_class(actor_class)(client, None)
    weakref.finalize(handle, client.close_later).atexit = False
    return handle


def close_handle(handle: object) -> None:
    """Close the connection of a handle that was received; the actor lives on.

    Raises: TypeError for a handle of one's own actor, which a runtime stops.
    """
    client = get_client(handle)
    if not isinstance(client, SharedClient):
        raise TypeError(f"{handle!r} was not received in a message; use Runtime.stop.")
    client.close()
