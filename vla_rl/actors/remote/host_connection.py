"""A caller's connection to another host: one encrypted socket that launches processes, reports their ends.

    launch ──► its host ──► HELLO with port and key ──► direct link ──► all messages
    its host ──► DIED ──► read what the link still has ──► the end

The host alone reports the end; the link carries the rest. If the link is lost while the host still
answers, the host is asked to kill the process.

ZeroMQ's own heartbeats, sent by its thread even while our loop is busy, detect a lost host, by
default within two seconds. The socket's monitor reports it; all actors there end for their
callers. A lost connection is not resumed: a restart makes a new one.
"""

import asyncio
import itertools
import time
from collections.abc import Callable

import msgspec
import zmq

from vla_rl.actors.placement import HIGHEST_PORT, ChildProcess, RemoteHost, Takeover, is_key
from vla_rl.actors.processes.channels import ActorExit, OnEnd
from vla_rl.actors.remote.direct_link import (
    HANDSHAKE_FAILED,
    DirectLink,
    make_link_keys,
    parse_event,
    set_tcp_options,
)
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    ExitNotice,
    Frames,
    Kind,
    LaunchRequest,
    MalformedMessage,
    OnMessage,
    PrepareRequest,
    ProcessStart,
    unpack_envelope,
)
from vla_rl.actors.wire.sockets import LoopSocket
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.util.error_reports import ErrorReport, restore_error
from vla_rl.util.values import excerpt

LINK_WITHIN_S = 10.0
"""Time for the connection to a process that its host has started."""
_OTHER_END_WITHIN_S = 5.0
"""Time between the two signs of an end: the loss of the link, and the host's notice."""


class RemoteChannel:
    """One process on another host. See `Channel`.

    Args:
        actor_id: number of the process at its host.
        address: the host's address.
        host: socket to the host.
        context: for the link.
        forget: called with `actor_id` when the process has ended.
    """

    is_ending = False
    """The host reports the end only when all is over."""

    def __init__(
        self,
        actor_id: int,
        address: str,
        host: LoopSocket,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: OnMessage,
        on_end: OnEnd,
        forget: Callable[[int], object],
    ) -> None:
        self.actor_id, self.on_message, self._on_end = actor_id, on_message, on_end
        self.codec, self.pid, self._address = Codec(), 0, address
        self.codec.peer_host = address.removeprefix("tcp://").rpartition(":")[0]
        self._host, self._context, self._forget = host, context, forget
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._keys = make_link_keys()
        self._link: DirectLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exit: ActorExit | None = None
        self._lost: str | None = None

    def request_launch(self, name: str, process: ChildProcess, takeover: Takeover | None) -> None:
        """Ask the host for the process."""
        request = LaunchRequest(name, process, self._keys.public, takeover)
        self._host.send(self.codec.encode(Kind.LAUNCH, 0, self.actor_id, 0, request, name))

    @property
    def unanswered(self) -> str:
        """Address that has not answered yet, of the host or of the process; else empty."""
        if self._link is None:
            return self._address
        return "" if self._link.is_up else self._link.address

    def send_message(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the process is lost."""
        if self._link is not None:
            self._link.send_frames(frames)

    @property
    def has_room(self) -> bool:
        """Whether the bytes on the way to the process allow one more call."""
        return self._link is None or self._link.has_room

    async def until_room(self) -> None:
        """Wait until they do, or the process has ended."""
        if self._link is not None:
            await self._link.wait_for_room()

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._host.drain_all()
        if self._link is not None:
            self._link.deliver_received()

    def kill_incarnation(self) -> None:
        """Have the host kill the process.

        If the host never answered, there is no process to wait for. If it does not report the end,
        the process counts as ended all the same: no owner waits for a host without end.
        """
        self._host.send(self.codec.encode(Kind.KILL, 0, self.actor_id, 0, None, "kill"))
        if self.pid == 0:
            self.report_exit(ActorExit(0, self._lost or "killed before its host answered"))
        elif self._exit is None:
            self._stop_timer()
            self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self._end_unreported)

    def _end_unreported(self) -> None:
        why = f"; {self._lost}" if self._lost else ""
        self.report_exit(
            ActorExit(
                self.pid,
                f"its host at {self._address} was asked to kill it, and has not reported its end "
                f"within {_OTHER_END_WITHIN_S:g} s{why}",
            )
        )

    async def until_gone(self) -> None:
        """Wait until the host reports the end of the process, or is lost itself.

        Once it was asked to kill the process, it has some seconds for that.
        """
        await asyncio.shield(self._gone)

    def handle_host_message(self, kind: int, frames: Frames) -> None:
        """Take one message of the host about this process."""
        try:
            if kind == Kind.EXITED:
                notice = self.codec.decode(self.codec.get_decoder(ExitNotice), frames)
                cause = self._lost or notice.cause
                self._on_notice(ActorExit(notice.pid, cause, notice.stderr_tail, notice.frozen))
            elif kind == Kind.HELLO and self._link is None:
                self._connect(self.codec.decode(self.codec.get_decoder(ProcessStart), frames))
                self.on_message(frames)
        except (MalformedMessage, msgspec.ValidationError, ConnectionError) as error:
            self._kill_lost(f"its host at {self._address} sent what cannot be used: {error}")

    def report_exit(self, death: ActorExit) -> None:
        """Report the end to the owner, once."""
        if self._gone.done():
            return
        self._stop_timer()
        if self._link is not None:
            self._link.deliver_received()  # its last answers
            self._link.close()
        self._forget(self.actor_id)
        self._gone.set_result(None)
        self._on_end(death)

    def _connect(self, start: ProcessStart) -> None:
        self.pid = start.pid
        address = f"{self._address.rpartition(':')[0]}:{start.port}"
        self._link = DirectLink(
            self._context,
            address,
            start.public_key,
            self._keys,
            lambda frames: self.on_message(frames),
            self._on_link_lost,
        )
        self._timer = self._loop.call_later(LINK_WITHIN_S, self._check_link)

    def _check_link(self) -> None:
        assert self._link is not None
        if not self._link.is_up:
            self._kill_lost(
                f"{self._link.address} does not answer within {LINK_WITHIN_S:g} s, although its "
                f"host at {self._address} does; expected a firewall that also admits the ports of "
                "the host's actors: serve with `--ports FIRST-LAST` and open those"
            )

    def _on_link_lost(self) -> None:
        """Wait for the host's notice, which says why; end if it has come already."""
        assert self._link is not None
        # Connection and notice end in any order; the notice has the exit code.
        if self._exit is not None:
            self.report_exit(self._exit)
            return
        self._stop_timer()
        what = f"its connection at {self._link.address} was lost, so it was killed"
        self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self._kill_lost, what)

    def _on_notice(self, death: ActorExit) -> None:
        """Read what the process has sent before; its end closes the link behind that."""
        self._exit = death
        if self._link is not None:
            self._link.read_events()  # which may end it
        if self._link is None or self._link.is_lost or not self._link.is_up:
            self.report_exit(death)
            return
        self._stop_timer()
        # a process that it forked may hold the connection open
        self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self.report_exit, death)

    def _kill_lost(self, cause: str) -> None:
        self._lost = cause
        self.kill_incarnation()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def require_reachable(host: RemoteHost) -> None:
    """Raise ConfigError for keys or an address that ZeroMQ would refuse."""
    keys = (host.server_public_key, host.client_keys.public, host.client_keys.secret)
    names = ("server_public_key", "client_keys.public", "client_keys.secret")
    for name, key in zip(names, keys, strict=True):
        if not is_key(key):
            raise ConfigError(
                f"{name} for {host.address} has {len(key)} characters, expected 40 characters of Z85; "
                "read it from the files that `python -m vla_rl.actors.keys` makes."
            )
    name, _, port = host.address.removeprefix("tcp://").rpartition(":")
    if not name or not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
        raise ConfigError(
            f"address is {excerpt(host.address)}, expected tcp://host:port of a vla_rl.actors.host "
            f"server, with a port of 1 to {HIGHEST_PORT}."
        )


class HostConnection:
    """Connects at once; `is_lost` stays True once the connection was lost.

    Raises: ConfigError for keys or an address that no host has.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: RemoteHost) -> None:
        require_reachable(host)
        self.address, self.is_lost = host.address, False
        self._context, self._codec = context, Codec()
        self._channels: dict[int, RemoteChannel] = {}
        self._preparations: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_message_s = 0.0
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        set_tcp_options(socket, host.lost_after_s)
        socket.curve_serverkey = host.server_public_key.encode()
        socket.curve_publickey = host.client_keys.public.encode()
        socket.curve_secretkey = host.client_keys.secret.encode()
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._on_message)
        self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        socket.connect(host.address)

    def launch_process(
        self, name: str, host: RemoteHost, on_message: OnMessage, on_end: OnEnd
    ) -> RemoteChannel:
        """Ask for a process there; its messages and its end arrive through the callbacks."""
        channel = RemoteChannel(
            next(self._numbers),
            self.address,
            self._socket,
            self._context,
            on_message,
            on_end,
            self._channels.pop,
        )
        self._channels[channel.actor_id] = channel
        channel.request_launch(name, host.launched_process, host.takeover)
        return channel

    async def prepare_process(self, process: ChildProcess, connect_within_s: float) -> None:
        """Have the interpreter and the fork server of a process prepared there.

        Raises: what preparing it here would raise; ActorDied if the host is lost meanwhile;
            TimeoutError if nothing answers at its address in time.
        """
        try:
            async with asyncio.timeout(connect_within_s):
                await asyncio.shield(self._connected)
        except TimeoutError:
            raise TimeoutError(
                f"no answer from {self.address} within {connect_within_s} s; expected `python -m "
                "vla_rl.actors.host` to serve there, at an address that this host can reach."
            ) from None
        number = next(self._numbers)
        answer = self._preparations[number] = asyncio.get_running_loop().create_future()
        request = PrepareRequest(process)
        try:
            self._socket.send(self._codec.encode(Kind.PREPARE, 0, 0, number, request, "prepare"))
            await self._answered(answer, process.most_preparation_s, connect_within_s)
        finally:
            del self._preparations[number]

    async def _answered(
        self, answer: "asyncio.Future[None]", within_s: float, silent_within_s: float
    ) -> None:
        """Wait for an answer of the host, which sends a sign of life several times a second.

        Raises: TimeoutError if it was silent for so long, or does not answer at all.
        """
        began_s = self._last_message_s = time.monotonic()
        while not answer.done():
            now = time.monotonic()
            left_s = min(began_s + within_s, self._last_message_s + silent_within_s) - now
            if left_s <= 0:
                silent_s = now - self._last_message_s
                what = (
                    f"was silent for {silent_s:.3g} s"
                    if silent_s >= silent_within_s
                    else f"did not answer within {within_s:g} s"
                )
                raise TimeoutError(
                    f"{self.address} {what} while it prepared a process; expected `python -m "
                    "vla_rl.actors.host` of the same version to serve there."
                )
            await asyncio.wait([answer], timeout=left_s)
        answer.result()

    def close(self) -> None:
        """Close the connection; the host ends our actors."""
        self._lose(f"connection to {self.address} was closed")

    def _on_message(self, frames: Frames) -> None:
        self._last_message_s = time.monotonic()
        try:
            kind, _, actor, call = unpack_envelope(frames[0])
        except MalformedMessage:
            return
        if call in self._preparations:
            self._on_prepared(self._preparations[call], kind, frames)
        channel = self._channels.get(actor)
        if channel is not None and kind != Kind.PING:
            channel.handle_host_message(kind, frames)

    def _on_prepared(self, answer: "asyncio.Future[None]", kind: int, frames: Frames) -> None:
        if answer.done():
            return
        if kind == Kind.PREPARED:
            answer.set_result(None)
        elif kind == Kind.ERROR:
            name = f"fork server of {self.address}"
            try:
                report = self._codec.decode(self._codec.get_decoder(ErrorReport), frames)
            except (MalformedMessage, msgspec.ValidationError) as error:
                answer.set_exception(ActorDied(name, 0, f"its answer cannot be read: {error}"))
            else:
                answer.set_exception(restore_error(report, name, 0))

    def _on_event(self, frames: Frames) -> None:
        event = parse_event(frames)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if not self._connected.done():
                self._connected.set_result(None)
        elif event & HANDSHAKE_FAILED:
            self._lose(f"{self.address} rejected our key, or does not have the expected server key")
        elif event == zmq.EVENT_DISCONNECTED:
            self._lose(f"connection to {self.address} is lost")

    def _lose(self, cause: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._zmq_socket.disable_monitor()  # before its reader closes, as in `DirectLink.close`
        self._monitor.close()
        self._socket.close()
        error = ActorDied(f"fork server of {self.address}", 0, cause)
        for waiting in (self._connected, *self._preparations.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # perhaps nothing waits
        for channel in list(self._channels.values()):
            channel.report_exit(ActorExit(channel.pid, cause))
