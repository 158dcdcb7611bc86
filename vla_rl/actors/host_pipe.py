"""The end of a process on another host of the pipe to its host server.

HELLO ──► host        whenever the process waits for a client
LOST  ◄── host        its client is lost
ADOPT ◄── host        the next client has come
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from vla_rl.actors.codec import Codec
from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.wire import Adoption, Frames, Kind, MalformedMessage, unpack_envelope


class HostPipe:
    """Reads what the host server says about the clients of this process.

    Args:
        socket: connected to the server.
        on_lost: called each time that the client is lost.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_lost: Callable[[], None]) -> None:
        self._on_lost, self._codec = on_lost, Codec()
        self._adoptions: asyncio.Queue[Adoption] = asyncio.Queue(1)
        self._socket = LoopSocket(socket, self._on_message)

    def send(self, frames: Frames) -> None:
        """Queue one message for the server."""
        self._socket.send(frames)

    async def adopted(self) -> Adoption:
        """Wait for the next client."""
        return await self._adoptions.get()

    def close(self, linger_ms: int) -> None:
        """Close the pipe; messages not sent after `linger_ms` are dropped."""
        self._socket.close(linger_ms)

    def _on_message(self, frames: Frames) -> None:
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
            if kind == Kind.LOST and self._adoptions.empty():
                self._on_lost()
            elif kind == Kind.LOST:  # that of a client which this process has not met yet
                self._adoptions.get_nowait()
            elif kind == Kind.ADOPT:
                self._adoptions.put_nowait(
                    self._codec.decode(self._codec.decoder(Adoption), frames)
                )
        except (MalformedMessage, msgspec.ValidationError):
            return
