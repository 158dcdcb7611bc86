"""The lower bound for the wire: two plain ZeroMQ sockets with CURVE, one frame a message.

No types, no deadlines, no supervision. `python -m benchmarks.hosts.bare_curve ADDRESS BYTES` sends
a frame for each message that it gets, until it gets an empty one.
"""

import secrets
import subprocess
import sys
from types import TracebackType
from typing import Self

import zmq

from benchmarks.hosts.namespaces import NamespaceHost


class BareCurve:
    """The receiving end, in this process; the sending end runs on `host`.

    Attributes:
        pid: of the sending end.
    """

    def __init__(self, host: NamespaceHost, num_bytes: int) -> None:
        command = [sys.executable, "-m", __name__, host.address, str(num_bytes)]
        self._sender = host.popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._sender.pid
        assert self._sender.stdout is not None
        self._address, self._key = self._sender.stdout.readline().split()

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.curve_serverkey = self._key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(self._address)
        self.receive(1, 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.send(b"")
        self._sender.wait()
        assert self._sender.stdout is not None
        self._sender.stdout.close()
        self._context.destroy(linger=0)

    def receive(self, number: int, in_flight: int) -> None:
        """Receive this many messages, with `in_flight` of them asked for ahead."""
        for asked in range(number + in_flight):
            if asked >= in_flight:
                self._socket.recv(copy=False)
            if asked < number:
                self._socket.send(b"next")


def main() -> None:
    """Send until told to stop."""
    address, num_bytes = sys.argv[1], int(sys.argv[2])
    frame = secrets.token_bytes(num_bytes)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret
        port = socket.bind_to_random_port(f"tcp://{address}")
        print(f"tcp://{address}:{port} {public.decode()}", flush=True)
        while socket.recv():
            socket.send(frame)  # a copy, as any sender makes that may write to its memory again


if __name__ == "__main__":
    main()
