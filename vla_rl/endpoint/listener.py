"""A listening socket that limits the number of open connections.

    kernel's backlog ─► accept one ─► is there room? ─► Connection ─► aiohttp's protocol
                                          └── if not: the oldest stranger is closed, or it waits for one to close

A stranger is a connection that has not shown a valid key for a while. One new connection at a time
is accepted; the others wait in the backlog, where they use no file descriptor.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_PAUSE_S: Final = 0.1
_GRACE_S: Final = 1.0
"""Seconds until a connection that has not shown a key may be closed to make room."""

_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections for a protocol.

    Args:
        make: makes a protocol for each connection.
        max_connections: most open connections.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], max_connections: int) -> None:
        self._make, self._max = make, max_connections
        self._open: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        self._closed_one = asyncio.Event()
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that the listener is bound to."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    @property
    def is_crowded(self) -> bool:
        """Whether half of the connections are in use.

        Idle ones should then not stay open for a later request.
        """
        return 2 * len(self._open) > self._max

    async def bind(self, host: str, port: int) -> None:
        """Start to listen. Raises: OSError if the address is not available."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._max = _affordable(self._max)

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                # other errors come from a client that is gone
                if error.errno in _OUT_OF_DESCRIPTORS:
                    logger.warning(
                        "the endpoint cannot accept a connection (%s); it tries again", error
                    )
                    await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await self._wait_for_room()
                await loop.connect_accepted_socket(self._connection, accepted)
            except OSError:
                accepted.close()
            except asyncio.CancelledError:
                accepted.close()
                raise

    def close(self) -> None:
        """Stop listening; the protocols close the open connections."""
        if self._socket is not None:
            self._socket.close()

    def note_key(self, connection: "Connection") -> None:
        """Record that a connection has shown a valid key, so that it is no stranger."""
        self._strangers.pop(connection, None)

    def note_open(self, connection: "Connection") -> None:
        """Record that a connection was made."""
        self._open.add(connection)
        self._strangers[connection] = None

    def note_closed(self, connection: "Connection") -> None:
        """Record that a connection was closed."""
        self._open.discard(connection)
        self._strangers.pop(connection, None)
        self._closed_one.set()

    def _connection(self) -> "Connection":
        return Connection(self._make(), self)

    async def _wait_for_room(self) -> None:
        while len(self._open) >= self._max:
            self._closed_one.clear()
            # never a client with a key: two hundred silent connections once kept `spawn` from descriptors
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                await self._closed_one.wait()
                continue
            try:
                async with asyncio.timeout_at(oldest.made_at + _GRACE_S):
                    await self._closed_one.wait()
            except TimeoutError:
                if oldest in self._strangers:
                    oldest.abort()
                    await self._closed_one.wait()


class Connection(asyncio.Protocol):
    """Forwards everything to its protocol, and reports start and end to the listener."""

    def __init__(self, inner: asyncio.Protocol, listener: Listener) -> None:
        self._inner, self.listener = inner, listener
        self._transport: Any = None
        self.made_at = asyncio.get_running_loop().time()
        """Time of the connection's start, by the clock of the loop."""

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.listener.note_open(self)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.note_closed(self)
        self._inner.connection_lost(exc)


def _affordable(wanted: int) -> int:
    """Lower a number of connections so that half of the free descriptors remain.

    The rest of the process needs them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    num_free = limit - len(os.listdir("/proc/self/fd"))
    affordable = max(1, num_free // 2)
    if affordable >= wanted:
        return wanted
    logger.warning(
        "the endpoint accepts %d connections instead of max_connections=%d, because the process "
        "may open only %d more files; raise `ulimit -n`",
        affordable,
        wanted,
        num_free,
    )
    return affordable
