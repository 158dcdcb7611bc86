"""Encrypted connections between two hosts of a run: a door for one neighbour, and the way to it.

    taker: its key ──► giver: opens a door for that key alone ──► port and key ──► taker connects

The control process carries the keys, and nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from vla_rl.actors.channel import OnMessage
from vla_rl.actors.direct_link import DirectLink
from vla_rl.actors.fork_protocol import ListenSettings
from vla_rl.actors.in_flight import MeteredSocket
from vla_rl.actors.listening import Listening, own_place
from vla_rl.actors.placement import KeyPair
from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.wire import Frames
from vla_rl.actors.zap import Gatekeeper
from vla_rl.training.hosts.messages import Door


class OpenDoor:
    """Listens for one neighbour.

    Args:
        taker_key: public key of the only neighbour that may connect.
        on_message: called with each message.

    Raises: OSError if no port is free.
    """

    def __init__(self, taker_key: str, on_message: OnMessage) -> None:
        self._on_message, self._is_met = on_message, False
        # a context of its own: it has one gatekeeper, and threads beside those of the episodes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, [])
        settings = ListenSettings(*own_place(), taker_key)
        try:
            self._listening = Listening(self._context, settings, self._gatekeeper)
        except BaseException:
            self._gatekeeper.close()
            self._context.term()
            raise
        self._socket = LoopSocket(self._listening.socket, self._take, in_place=True)
        self._metered = MeteredSocket(self._socket, self._take)
        self.door = Door(port=self._listening.port, public_key=self._listening.public_key)
        """Place at which the neighbour connects."""

    def send(self, frames: Frames) -> None:
        """Queue one message."""
        self._metered.send(frames)

    def close(self) -> None:
        """Close the connection."""
        self._metered.close()
        self._socket.close()
        self._listening.close()
        self._gatekeeper.close()
        self._context.term()

    def _take(self, frames: Frames) -> None:
        if not self._is_met:
            # the neighbour has shown its key: the port answers to no one else
            self._listening.close_door()
            self._is_met = True
        self._on_message(frames)


@contextmanager
def linked(
    host: str, door: Door, keys: KeyPair, on_message: OnMessage, on_lost: Callable[[], None]
) -> Iterator[DirectLink]:
    """Connect to a neighbour's door while the block is open.

    Args:
        host: address of the neighbour's host, without a port.
        door: its place there.
        keys: those whose public one the neighbour was given.
        on_message, on_lost: as for `DirectLink`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"tcp://{host}:{door.port}"
    link = DirectLink(context, address, door.public_key, keys, on_message, on_lost)
    try:
        yield link
    finally:
        link.close()
        context.term()
