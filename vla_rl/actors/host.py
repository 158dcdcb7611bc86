"""Serve processes of this host to known clients: `python -m vla_rl.actors.host --help`.

A client requests a process, which then waits for that client at a port of its own: the host passes
on where, and sees none of their messages. The end of a process is reported to its client at once;
the end of a client ends its processes, except those that wait a while for its successor. All
connections are encrypted (CURVE), and only clients with listed public keys are accepted: such a
client can run any importable actor as this user.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import uvloop
import zmq

from vla_rl.actors.keys import read_keys, read_public_key
from vla_rl.actors.placement import HIGHEST_PORT, LOST_AFTER_S, KeyPair, require_silence
from vla_rl.actors.processes.liveness import ProcessObserver
from vla_rl.actors.remote.direct_link import (
    DOMAIN,
    HANDSHAKE_WITHIN_MS,
    CurveAuthenticator,
    explain_open_ports,
    set_tcp_options,
)
from vla_rl.actors.remote.hosted_clients import HostedClient, WaitingProcesses
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    ExitNotice,
    Frames,
    Kind,
    LaunchRequest,
    MalformedMessage,
    PrepareRequest,
    is_batch,
    num_announced_frames,
    split_messages,
    unpack_envelope,
)
from vla_rl.actors.wire.sockets import LoopSocket
from vla_rl.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_INTERVAL_S = 0.4


class HostServer:
    """Serves while its `async with` block is open; then ends all processes that it started.

    Args:
        address: `tcp://interface:port`; port 0 picks a free one.
        keys: the server's own keys.
        allowed: public keys of the clients.
        lost_after_s: silence after which a client is lost, as `RemoteHost.lost_after_s`.
        ports: first and last port for the processes, each of which takes one; (0, 0) for any.
    """

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        allowed: Collection[str],
        *,
        lost_after_s: float = LOST_AFTER_S,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        require_silence(lost_after_s)
        if ports != (0, 0) and not 0 < ports[0] <= ports[1] <= HIGHEST_PORT:
            raise ValueError(
                f"ports are {ports[0]} to {ports[1]}, expected a first one and a last one from 1 to "
                f"{HIGHEST_PORT}."
            )
        self._ports = ports
        self._lost_after_s = lost_after_s
        self._bind_to, self._keys, self._allowed = address, keys, allowed
        self._clients: dict[bytes, HostedClient] = {}
        self._waiting = WaitingProcesses()
        self._leaving: set[asyncio.Task[None]] = set()
        self._codec = Codec()
        self._observer = ProcessObserver(f"the host at {address}")
        self.num_rejected = 0
        self.address = address

    async def __aenter__(self) -> Self:
        """Start serving. Raises: ConfigError if the address cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = CurveAuthenticator(self._context, self._allowed)
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        set_tcp_options(router, self._lost_after_s)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN_MS)
        # Else messages to a client that is gone vanish; the error is how `_probe_clients` learns of it.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.curve_server = True
        router.curve_secretkey = self._keys.secret.encode()
        router.zap_domain = DOMAIN
        try:
            router.bind(self._bind_to)
        except zmq.ZMQError as error:
            router.close(linger=0)
            self._authenticator.close()
            self._context.term()
            raise ConfigError(
                f"actors cannot be served on {self._bind_to!r}: {zmq.strerror(error.errno or 0)}; "
                "expected tcp://interface:port of this host, with a free port, or 0 for any free "
                "port."
            ) from error
        if why := explain_open_ports():
            logger.warning(
                "this kernel refuses filters on sockets to this user (%s): the ports of actors accept "
                "connections after their client has come; without its key they get nothing.",
                why,
            )
        self.address = str(router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._router = router
        self._socket = LoopSocket(router, self._on_message, raw=True)
        self._probing = asyncio.create_task(self._probe_clients(), name="probe clients")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # First what would see clients vanish, then the clients, at last the socket that they are told by.
        self._probing.cancel()
        await asyncio.wait([self._probing])
        self._observer.close()
        for client in list(self._clients):
            self._stop_client(client)
        await asyncio.gather(*self._leaving)
        await self._waiting.close()
        self._socket.close(linger_ms=500)
        self._authenticator.close()
        self._context.term()

    @property
    def num_refused(self) -> int:
        """Number of peers without a known key."""
        return self._authenticator.num_refused

    @property
    def num_actors(self) -> int:
        """Number of processes that run, without those that wait for a client."""
        return sum(client.num_actors for client in self._clients.values())

    @property
    def num_waiting_processes(self) -> int:
        """Number of processes whose client was lost, and that wait for the next one."""
        return len(self._waiting)

    def _on_message(self, frames: Frames) -> None:
        identity, *rest = frames
        try:
            if not rest:
                raise MalformedMessage("message without content.")
            if is_batch(rest[0]):
                for message in split_messages(rest[0]):
                    self._take(identity, [message])
            else:
                self._take(identity, rest)
        except MalformedMessage as error:
            self.num_rejected += 1
            if self.num_rejected == 1:
                logger.warning("rejected a message: %s Later ones are only counted.", error)

    def _take(self, identity: bytes, frames: Frames) -> None:
        kind, _, actor, call = unpack_envelope(frames[0])
        if num_announced_frames(frames[0]) != len(frames) - 1:
            raise MalformedMessage("message with another number of frames than it announces.")
        client = self._clients.get(identity)
        if kind == Kind.KILL:  # which may have crossed a death notice
            if client is not None:
                client.kill_process(actor)
        elif kind == Kind.LAUNCH and (client is None or not client.has_process(actor)):
            try:
                launch = self._read(LaunchRequest, frames)
            except MalformedMessage as error:
                cause = f"{error} Install the same version of vla_rl on both hosts"
                notice = ExitNotice(0, f"could not be started: {cause}", ())
                # A client of another version must read why: its `spawn` would only see a timeout.
                answer = self._codec.encode(Kind.EXITED, 0, actor, 0, notice, "death notice")
                self._socket.send([identity, *answer])
                raise
            if launch.takeover is not None:
                # its client may have been lost so recently that it was not noticed yet
                for each in self._clients.values():
                    each.release_process(launch.takeover.owner, launch.takeover.name)
            (client or self._admit(identity)).launch_process(actor, launch)
        elif kind == Kind.PREPARE:
            prepare = self._read(PrepareRequest, frames)
            (client or self._admit(identity)).prepare_process(call, prepare.process)
        else:
            raise MalformedMessage(f"message of kind {kind} for actor {actor} is not for a host.")

    def _read(self, type_: type[T], frames: Frames) -> T:
        try:
            request: T = self._codec.decode(self._codec.get_decoder(type_), frames)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"{type_.__name__}: {error}.") from None
        return request

    def _admit(self, identity: bytes) -> HostedClient:
        interface = self.address.removeprefix("tcp://").rpartition(":")[0]
        client = self._clients[identity] = HostedClient(
            f"a client of {self.address}",
            self._context,
            self._observer,
            interface,
            self._ports,
            lambda frames: self._socket.send([identity, *frames]),
            self._waiting,
        )
        return client

    def _stop_client(self, identity: bytes) -> None:
        """End everything that a client has here."""
        client = self._clients.pop(identity)
        leaving = asyncio.create_task(client.close(), name="end of a client")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _probe_clients(self) -> None:
        """End the processes of clients that have gone.

        ZeroMQ's heartbeats remove those from the router.
        """
        ping = self._codec.encode(Kind.PING, 0, 0, 0, None, "ping")
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            for identity, client in list(self._clients.items()):
                if not self._is_there(identity, ping):
                    if num_waiting := client.keep_for_next_client():
                        logger.warning(
                            "a client is gone; %d of its actors wait for the next one.", num_waiting
                        )
                    if client.num_actors:
                        logger.warning(
                            "a client is gone; its %d actors are killed.", client.num_actors
                        )
                    self._stop_client(identity)
            # The router was used behind the back of its reader, whose descriptor is edge-triggered.
            self._socket.read_later()

    def _is_there(self, identity: bytes, ping: list[bytes]) -> bool:
        try:
            self._router.send_multipart([identity, *ping], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True


async def serve(
    address: str,
    keys: KeyPair,
    allowed: Collection[str],
    lost_after_s: float,
    ports: tuple[int, int] = (0, 0),
) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    opened = HostServer(address, keys, allowed, lost_after_s=lost_after_s, ports=ports)
    async with opened as server:
        print(f"serving actors on {server.address}", flush=True)
        await stop.wait()


def port_range(words: str) -> tuple[int, int]:
    """Return the first and the last port of words such as 7100-7199. Raises: ValueError."""
    first, _, last = words.partition("-")
    return int(first), int(last or first)


def main() -> None:
    """Run `serve` from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bind",
        default="tcp://127.0.0.1:7070",
        help="tcp://interface:port; port 0 picks a free one",
    )
    parser.add_argument("--keys", type=Path, required=True, help="the server's .key file")
    parser.add_argument(
        "--allow", type=Path, nargs="+", required=True, help=".pub files of the clients"
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=LOST_AFTER_S,
        metavar="SECONDS",
        help="silence after which a client is lost and its processes are killed (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--ports",
        type=port_range,
        default=(0, 0),
        metavar="FIRST-LAST",
        help="ports of the actors, each of which listens at its own; a firewall has to admit them "
        "besides the server's (default: any free port)",
    )
    options = parser.parse_args()
    try:
        keys, allowed = read_keys(options.keys), [read_public_key(file) for file in options.allow]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    try:
        uvloop.run(serve(options.bind, keys, allowed, options.lost_after, options.ports))
    except (ConfigError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
