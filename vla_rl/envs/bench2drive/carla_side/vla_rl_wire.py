"""Messages between the machine with CARLA and the machine with the policy, over TCP.

A message is a header of JSON and a body of bytes: 4 bytes of magic, the lengths of both as
unsigned 32-bit numbers, the header, the body. The two sides take turns:

    agent                                        policy
    hello   version, route, cameras, plan   ->
                                            <-   welcome  version        (or refused: why)
    tick    time, speed, gps, imu, images ->
                                            <-   control  throttle, steer, brake, look
    ...
    end                                     ->

The body of a tick holds the images named in its header, under `images`, BGRA, one after
another. A tick has images if the control before it asked to look; the first one always has.
"""

# ruff: noqa: UP041  # in Python 3.8 socket.timeout is no TimeoutError
from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

VERSION = 1
PREFIX = struct.Struct(">4sII")
MAGIC = b"VRB2"
MOST_HEADER = 1 << 22
MOST_BODY = 1 << 28


class WireError(Exception):
    """The other side is silent, gone, or speaks something else."""


def packed(message: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of a message."""
    header = json.dumps(message).encode()
    return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


def unpack_sizes(prefix: bytes, peer: str) -> tuple[int, int]:
    """Return the lengths of the header and the body. Raises: WireError if it is no prefix."""
    magic, header, body = PREFIX.unpack(prefix)
    # bounded before it is allocated: a browser or a scanner that finds the port sends any length
    if magic != MAGIC or header > MOST_HEADER or body > MOST_BODY:
        raise WireError(f"{peer} sent {prefix!r}, expected a message of vla_rl; check the port")
    return header, body


def decode_message(header: bytes, peer: str) -> dict[str, Any]:
    """Return the fields of a message. Raises: WireError if the header holds anything else."""
    try:
        message = json.loads(header.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"{peer} sent a header that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"{peer} sent a header of {type(message).__name__}, expected fields")
    return message


def require_version(message: dict[str, Any], peer: str) -> None:
    """Raise WireError unless a hello or welcome has this file's version."""
    if message.get("version") != VERSION:
        raise WireError(
            f"{peer} speaks version {message.get('version')}, expected {VERSION}; copy the files "
            "that `vla-rl export carla DIR` writes on the machine with the policy"
        )


class Wire:
    """One connection, used by one side at a time.

    Args:
        connection: a connected socket, which the wire owns.
        peer: name of the other side, for errors.
        timeout_s: longest wait for one message.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self._socket, self.peer, self.timeout_s = connection, peer, timeout_s
        # both sides take turns, so a small control that waits to be joined by more would wait for
        # nothing
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a message. Raises: WireError if the other side is gone, or takes nothing."""
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.sendall(packed(message, body))
        except OSError as error:
            raise WireError(f"{self.peer} takes no message: {error}") from error

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its body. Raises: WireError."""
        deadline = time.monotonic() + self.timeout_s
        header_size, body_size = unpack_sizes(self._read(PREFIX.size, deadline), self.peer)
        header = self._read(header_size, deadline)
        return decode_message(header, self.peer), self._read(body_size, deadline)

    def expect(self, *kinds: str) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its body, of one of `kinds`. Raises: WireError."""
        message, body = self.receive()
        if message.get("kind") in kinds:
            return message, body
        if "why" in message:
            raise WireError(f"{self.peer}: {message['why']}")
        wanted = " or ".join(kinds)
        raise WireError(f"{self.peer} sent {message.get('kind')!r}, expected {wanted}")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise socket.timeout
                self._socket.settimeout(left)
                part = self._socket.recv(min(size, 1 << 20))
            except socket.timeout as error:
                raise WireError(
                    f"{self.peer} sent nothing for {self.timeout_s:g} s; look at its output, or "
                    "raise the timeout"
                ) from error
            except OSError as error:
                raise WireError(f"{self.peer} is gone: {error}") from error
            if not part:
                raise WireError(f"{self.peer} closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def connect(host: str, port: int, peer: str, timeout_s: float) -> Wire:
    """Return a wire to a listening side. Raises: WireError."""
    try:
        return Wire(socket.create_connection((host, port), timeout_s), peer, timeout_s)
    except OSError as error:
        raise WireError(f"{peer} does not answer at {host}:{port}: {error}") from error
