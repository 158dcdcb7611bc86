"""Our end of the connection to one process on another host, which has messages for us alone.

The process shows the key that its host named; we show one that was made for this link. A link that
is lost is not resumed: the process is ended through its host.
"""

from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from vla_rl.actors.channel import OnMessage
from vla_rl.actors.in_flight import MeteredSocket
from vla_rl.actors.listening import keep_alive
from vla_rl.actors.parts import MAX_WIRE_FRAME_BYTES
from vla_rl.actors.placement import HIGHEST_PORT, KeyPair, is_key
from vla_rl.actors.sockets import HALF_SENT_MS, LoopSocket, lift_high_water_mark
from vla_rl.actors.wire import Frames
from vla_rl.util.values import excerpt

HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH

# -1 would forbid it, but then a lost connection takes along the messages that we have not read yet,
# the reason of an actor's end among them
_NEVER_MS = 24 * 3600 * 1000


def make_link_keys() -> KeyPair:
    """Return a key pair for one link."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def event_of(frames: Frames) -> int:
    """Return the event that a socket's monitor reports; 0 for anything else."""
    return int(parse_monitor_message(list(frames))["event"]) if len(frames) == 2 else 0


class DirectLink:
    """Connects at once.

    Args:
        address, public_key: of the process.
        keys: ours, whose public key it was given.
        on_message: called with each message.
        on_lost: called once, when no further message can come.

    Attributes:
        is_up: whether the process has shown its key.
        is_lost: whether the connection was made and has ended, or the key was wrong.

    Raises: ConnectionError for an address or a key that no process has; other hosts name them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        public_key: str,
        keys: KeyPair,
        on_message: OnMessage,
        on_lost: Callable[[], None],
    ) -> None:
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
            raise ConnectionError(
                f"address {excerpt(address)}, expected a port of 1 to {HIGHEST_PORT}"
            )
        if not is_key(public_key):
            raise ConnectionError(f"key {excerpt(public_key)}, expected 40 characters of Z85")
        self.address, self._on_lost = address, on_lost
        self.is_up = self.is_lost = False
        socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(socket)
        keep_alive(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.curve_serverkey = public_key.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, on_message, in_place=True)
        self._metered = MeteredSocket(self._socket, on_message)
        self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        socket.connect(address)

    def send(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the link is lost."""
        self._metered.send(frames)

    @property
    def has_room(self) -> bool:
        """See `MeteredSocket`."""
        return self._metered.has_room

    async def until_room(self) -> None:
        """See `MeteredSocket`; also returns if the link is closed."""
        await self._metered.until_room()

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def look(self) -> None:
        """Learn what has happened to the connection by now."""
        self._monitor.drain_all()

    def close(self) -> None:
        """Close the link, and report nothing more."""
        if not self._monitor.is_closed:
            # in this order: ZeroMQ's thread reports an event to an open monitor or to none. To one that
            # is closed it waits without end, and whoever disables the monitor waits for it
            self._zmq_socket.disable_monitor()
            self._monitor.close()
            self._socket.close(HALF_SENT_MS)
            self._metered.close()

    def _on_event(self, frames: Frames) -> None:
        event = event_of(frames)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up = True
        elif event and not self.is_lost:
            self.is_lost = True
            self._on_lost()
