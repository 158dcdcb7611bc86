"""Serve processes of this host to known clients: `python -m vla_rl.actors.host --help`.

A client requests a process; from then on the host passes messages between the two, unread. The end
of a process is reported to its client at once; the end of a client ends its processes. All
connections are encrypted (CURVE), and only clients with listed public keys are accepted: such a
client can run any importable actor as this user.
"""

import argparse
import asyncio
import functools
import logging
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import uvloop
import zmq

from vla_rl.actors.channel import Death
from vla_rl.actors.child_process import ChildChannel
from vla_rl.actors.codec import Codec
from vla_rl.actors.host_connection import set_tcp_options
from vla_rl.actors.keys import read_keys, read_public_key
from vla_rl.actors.observer import ProcessObserver
from vla_rl.actors.placement import LOST_AFTER_S, ChildProcess, KeyPair, require_silence
from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.wire import (
    DeathNotice,
    Frames,
    Kind,
    LaunchRequest,
    MalformedMessage,
    is_batch,
    num_announced_frames,
    split_messages,
    unpack_envelope,
)
from vla_rl.actors.zap import DOMAIN, Gatekeeper
from vla_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 0.4
_HANDSHAKE_WITHIN_MS = 10_000
"""A connection whose peer has not shown a listed key by then is closed; until then it may hold one
part of a message."""


class HostServer:
    """Serves while its `async with` block is open; then ends all processes that it started.

    Args:
        address: `tcp://interface:port`; port 0 picks a free one.
        keys: the server's own keys.
        allowed: public keys of the clients.
        lost_after_s: silence after which a client is lost, as `RemoteHost.lost_after_s`.
    """

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        allowed: Collection[str],
        *,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        require_silence(lost_after_s)
        self._lost_after_s = lost_after_s
        self._bind_to, self._keys, self._allowed = address, keys, allowed
        self._clients: dict[bytes, dict[int, ChildChannel]] = {}
        self._codec = Codec()
        self._observer = ProcessObserver(f"the host at {address}")
        self.num_rejected = 0
        self.address = address

    async def __aenter__(self) -> Self:
        """Start serving. Raises: ConfigError if the address cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, self._allowed)
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        set_tcp_options(router, self._lost_after_s)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_WITHIN_MS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.curve_server = True
        router.curve_secretkey = self._keys.secret.encode()
        router.zap_domain = DOMAIN
        try:
            router.bind(self._bind_to)
        except zmq.ZMQError as error:
            router.close(linger=0)
            self._gatekeeper.close()
            self._context.term()
            raise ConfigError(
                f"actors cannot be served on {self._bind_to!r}: {zmq.strerror(error.errno or 0)}; "
                "expected tcp://interface:port of this host, with a free port, or 0 for any free "
                "port."
            ) from error
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
        self._probing.cancel()
        await asyncio.wait([self._probing])
        self._observer.close()
        children = [child for actors in self._clients.values() for child in actors.values()]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.until_gone() for child in children))
        self._socket.close(linger_ms=500)
        self._gatekeeper.close()
        self._context.term()

    @property
    def num_refused(self) -> int:
        """Number of peers without a known key."""
        return self._gatekeeper.num_refused

    @property
    def num_actors(self) -> int:
        """Number of processes that run."""
        return sum(len(actors) for actors in self._clients.values())

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

    def _take(self, client: bytes, frames: Frames) -> None:
        kind, _, actor, _ = unpack_envelope(frames[0])
        if num_announced_frames(frames[0]) != len(frames) - 1:
            raise MalformedMessage("message with another number of frames than it announces.")
        actors = self._clients.get(client, {})
        if kind == Kind.LAUNCH and actor not in actors:
            self._launch(client, actor, frames)
        elif actor not in actors:
            if kind not in (
                Kind.KILL,
                Kind.CANCEL,
                Kind.CREDIT,
                Kind.CALL,
                Kind.STOP,
            ):  # may have crossed a death notice
                raise MalformedMessage(
                    f"message of kind {kind} for actor {actor}, which does not exist."
                )
        elif kind == Kind.KILL:
            actors[actor].kill()
        else:
            actors[actor].send(frames)

    def _launch(self, client: bytes, actor: int, frames: Frames) -> None:
        try:
            request = self._codec.decode(self._codec.decoder(LaunchRequest), frames)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"launch request: {error}.") from None
        placement = ChildProcess(env=request.env, shared_memory_mib=0)
        on_end = functools.partial(self._on_end, client, actor)
        try:
            on_message = functools.partial(self._forward, client)
            child = ChildChannel(
                request.name, placement, self._context, on_message, on_end, self._observer, actor
            )
        except Exception as error:  # the client gets the error, and the others are served on
            on_end(Death(0, f"could not be started: {error}"))
            return
        self._clients.setdefault(client, {})[actor] = child

    def _forward(self, client: bytes, frames: Frames) -> None:
        self._socket.send([client, *frames])

    def _on_end(self, client: bytes, actor: int, death: Death) -> None:
        actors = self._clients.get(client, {})
        actors.pop(actor, None)
        if not actors:
            self._clients.pop(client, None)
        notice = DeathNotice(death.pid, death.cause, death.last_words, death.frozen)
        self._forward(client, self._codec.encode(Kind.DIED, 0, actor, 0, notice, "death notice"))

    async def _probe_clients(self) -> None:
        """End the processes of clients that have gone.

        ZeroMQ's heartbeats remove those from the router.
        """
        ping = self._codec.encode(Kind.PING, 0, 0, 0, None, "ping")
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            for client, actors in list(self._clients.items()):
                if not self._is_there(client, ping):
                    logger.warning("a client is gone; its %d actors are killed.", len(actors))
                    for child in actors.values():
                        child.kill()
            self._socket.look_again()

    def _is_there(self, client: bytes, ping: list[bytes]) -> bool:
        try:
            self._router.send_multipart([client, *ping], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True


async def serve(address: str, keys: KeyPair, allowed: Collection[str], lost_after_s: float) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with HostServer(address, keys, allowed, lost_after_s=lost_after_s) as server:
        print(f"serving actors on {server.address}", flush=True)
        await stop.wait()


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
    options = parser.parse_args()
    try:
        keys, allowed = read_keys(options.keys), [read_public_key(file) for file in options.allow]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    try:
        uvloop.run(serve(options.bind, keys, allowed, options.lost_after))
    except (ConfigError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
