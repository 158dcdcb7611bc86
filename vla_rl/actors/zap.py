"""Accept only peers whose public key is on a list (ZeroMQ's authentication protocol, RFC 27)."""

import logging
from collections.abc import Collection

import zmq
from zmq.utils import z85

from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.wire import Frames

logger = logging.getLogger(__name__)

DOMAIN = b"vla_rl"
_ENDPOINT = "inproc://zeromq.zap.01"


class Gatekeeper:
    """Answers the context's requests about new peers, until it is closed.

    Args:
        allowed: public keys in Z85 form.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self.num_refused = 0
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.bind(_ENDPOINT)
        self._socket = LoopSocket(socket, self._on_question, raw=True)

    def allow(self, allowed: Collection[str]) -> None:
        """Accept peers with these keys instead."""
        self._allowed = frozenset(allowed)

    def close(self) -> None:
        """Stop answering: no new peer is accepted."""
        self._socket.close()

    def _on_question(self, frames: Frames) -> None:
        version, request_id, *_ = frames
        is_known = (
            len(frames) == 7
            and frames[2] == DOMAIN
            and frames[5] == b"CURVE"
            and self._knows(frames[6])
        )
        if not is_known:
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning(
                    "refused a peer at %s: its key is unknown. Later ones are only counted.",
                    frames[3],
                )
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        self._socket.send([version, request_id, *status, b"", b""])

    def _knows(self, key: bytes) -> bool:
        return len(key) == 32 and z85.encode(key).decode() in self._allowed
