"""The lower bound for a publication: copies through plain ZeroMQ sockets with CURVE, to each host.

No digest, no version, no supervision. `python -m benchmarks.hosts.bare_copies ADDRESS` answers each
frame that it gets with an empty one, until it gets an empty one.
"""

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import zmq

from benchmarks.hosts.namespaces import NamespaceHost

_IN_FLIGHT: Final = 2


class BareCopies:
    """The sending end, in this process; a receiving end runs on each host."""

    def __init__(self, hosts: Sequence[NamespaceHost]) -> None:
        self._receivers = [
            host.popen(
                [sys.executable, "-m", __name__, host.address], stdout=subprocess.PIPE, text=True
            )
            for host in hosts
        ]

    def __enter__(self) -> Self:
        # as many threads as the actors of other hosts have
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=4)
        self._sockets = []
        for receiver in self._receivers:
            assert receiver.stdout is not None
            address, key = receiver.stdout.readline().split()
            socket = self._context.socket(zmq.PAIR)
            socket.curve_serverkey = key.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(address)
            self._sockets.append(socket)
        self.send(len(self._sockets), bytes(1), 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for socket, receiver in zip(self._sockets, self._receivers, strict=True):
            socket.send(b"")
            receiver.wait()
            assert receiver.stdout is not None
            receiver.stdout.close()
        self._context.destroy(linger=0)

    def send(self, num_hosts: int, piece: bytes, number: int) -> None:
        """Send a piece `number` times to each of the first hosts; return once all have them."""
        left = dict.fromkeys(self._sockets[:num_hosts], number)
        unanswered = dict.fromkeys(left, 0)
        while any(left.values()) or any(unanswered.values()):
            for socket in left:
                while left[socket] and unanswered[socket] < _IN_FLIGHT:
                    socket.send(piece, copy=False)
                    left[socket] -= 1
                    unanswered[socket] += 1
            ready, _, _ = zmq.select([each for each, open in unanswered.items() if open], [], [])
            for socket in ready:
                socket.recv()
                unanswered[socket] -= 1


def main() -> None:
    """Receive until told to stop."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret
        port = socket.bind_to_random_port(f"tcp://{sys.argv[1]}")
        print(f"tcp://{sys.argv[1]}:{port} {public.decode()}", flush=True)
        while socket.recv(copy=False).buffer.nbytes:
            socket.send(b"")


if __name__ == "__main__":
    main()
