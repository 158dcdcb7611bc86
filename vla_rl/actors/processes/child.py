"""The program of an actor's own process: `python -m vla_rl.actors.processes.child NAME`.

Only a runtime starts it.

Its settings come from stdin (in a forked child: from its fork server), the class to build with its
arguments from the socket. The process ends with the actor, with the parent, or when the constructor
fails, which is reported to the parent first. A process that a host server has started also has a pipe to
that server:

    HELLO ──► host        whenever the process waits for a client
    LOST  ◄── host        its client is lost
    NEXT_CLIENT ◄── host  the next client has come
"""

import asyncio
import atexit
import contextlib
import gc
import os
import pkgutil
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import msgspec
import zmq

from vla_rl.actors.calls.actor import Actor, MethodTable, get_method_table
from vla_rl.actors.calls.running_calls import ActorLoop, WaitingSocket
from vla_rl.actors.calls.server import ActorServer
from vla_rl.actors.processes.liveness import start_heartbeat
from vla_rl.actors.remote.direct_link import (
    CurveAuthenticator,
    ListenAddress,
    ListeningSocket,
    keep_freed_memory,
    set_own_address,
)
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    OWN_CALL,
    ChildSettings,
    Frames,
    Kind,
    ListenSettings,
    MalformedMessage,
    NextClient,
    ProcessStart,
    SpawnRequest,
    unpack_envelope,
)
from vla_rl.actors.wire.slots import SlotReader, SlotWriter, set_block_writer
from vla_rl.actors.wire.sockets import BoundedSocket, LoopSocket, lift_high_water_mark
from vla_rl.util.error_reports import make_report
from vla_rl.util.processes import die_with_parent, leave_terminal_to_parent, name_process
from vla_rl.util.stalls import LoopLag


class HostPipe:
    """Reads what the host server says about the clients of this process.

    Args:
        socket: connected to the server.
        on_lost: called each time that the client is lost.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_lost: Callable[[], None]) -> None:
        self._on_lost, self._codec = on_lost, Codec()
        self._next_clients: asyncio.Queue[NextClient] = asyncio.Queue(1)
        self._socket = LoopSocket(socket, self._on_message)

    def send_frames(self, frames: Frames) -> None:
        """Queue one message for the server."""
        self._socket.send(frames)

    async def wait_for_client(self) -> NextClient:
        """Wait for the next client."""
        return await self._next_clients.get()

    def close(self, linger_ms: int) -> None:
        """Close the pipe; messages not sent after `linger_ms` are dropped."""
        self._socket.close(linger_ms)

    def _on_message(self, frames: Frames) -> None:
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
            if kind == Kind.LOST and self._next_clients.empty():
                self._on_lost()
            elif kind == Kind.LOST:  # that of a client which this process has not met yet
                self._next_clients.get_nowait()
            elif kind == Kind.NEXT_CLIENT:
                self._next_clients.put_nowait(
                    self._codec.decode(self._codec.get_decoder(NextClient), frames)
                )
        except (MalformedMessage, msgspec.ValidationError):
            return


_LAST_MESSAGES_MS = 2000


def main() -> None:
    """Become the actor that the parent asks for, and run until it ends."""
    leave_terminal_to_parent()
    settings, pipe_fd = _read_settings()
    # First of all: a parent that dies while we import would otherwise leave us behind.
    die_with_parent(settings.parent_pid, pipe_fd)
    if settings.sys_path is not None:
        sys.path[:] = settings.sys_path
    run_child(settings)


def run_child(settings: ChildSettings) -> NoReturn:
    """Run the actor that the parent asks for over the socket, then exit."""
    if settings.heartbeat >= 0:
        start_heartbeat(settings.heartbeat)
    name_process(settings.name)
    sys.argv = [settings.name]
    with asyncio.Runner(loop_factory=ActorLoop) as runner:
        status = runner.run(_serve_parent(settings))
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Exit as Python does, but leave its objects to the kernel.

    Freeing what torch has imported takes 0.4 s, and copies 160 MB in a process that was forked.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in its children
    atexit._run_exitfuncs()
    flush_output()
    os._exit(status)


def flush_output() -> None:
    """Write out what was printed and is still buffered in this process."""
    for stream in (sys.stdout, sys.stderr):
        # no reader, or a hook or an actor closed or replaced it
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _read_settings() -> tuple[ChildSettings, int]:
    """Read the settings from stdin.

    Return them and the pipe, moved away so that reading stdin yields nothing.
    """
    pipe_fd = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    length = int.from_bytes(_read_exactly(pipe_fd, 4), "little")
    return msgspec.json.decode(_read_exactly(pipe_fd, length), type=ChildSettings), pipe_fd


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = os.read(fd, num_bytes - len(data))
        if not more:
            sys.exit(
                "vla_rl.actors.processes.child is started by a runtime, which sends it its settings on stdin."
            )
        data += more
    return data


async def _serve_parent(settings: ChildSettings) -> int:
    codec = Codec()
    if settings.arena_in >= 0:
        slots_out = SlotWriter(settings.arena_out)
        set_block_writer(slots_out)
        codec = Codec(slots_out, SlotReader(settings.arena_in))
        os.close(settings.arena_in)
        os.close(settings.arena_out)
    with zmq.Context() as context:
        parent: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(parent)
        parent.connect(settings.address)
        # The hello comes before the class is imported: the parent then knows that the interpreter works.
        lifecycle = _ActorProcess(codec, settings.actor_id)
        if settings.listens is None:
            lifecycle.send_hello(parent.send_multipart, ProcessStart(os.getpid()))
            status = await _run_actor(lifecycle, parent)
            assert status is not None, "a parent that is lost takes its child along"
            return status
        keep_freed_memory()
        return await _serve_clients(lifecycle, context, parent, settings.listens)


async def _serve_clients(
    lifecycle: "_ActorProcess",
    context: zmq.Context[zmq.Socket[bytes]],
    parent: zmq.Socket[bytes],
    listens: ListenSettings,
) -> int:
    """Serve one client of another host after the other; return the exit status."""
    host = HostPipe(parent, lifecycle.abandon)
    set_own_address(ListenAddress(listens.interface, listens.ports))
    # one for all clients: ZeroMQ frees the name of its endpoint some time after it was closed
    authenticator = CurveAuthenticator(context, [])
    try:
        while True:
            try:
                listening = ListeningSocket(context, listens, authenticator)
            except OSError as error:
                sys.exit(str(error))
            start = ProcessStart(os.getpid(), listening.port, listening.public_key)
            lifecycle.send_hello(host.send_frames, start)
            if not listens.takes_over:
                host.close(linger_ms=_LAST_MESSAGES_MS)
            lifecycle.on_described = listening.refuse_connections
            try:
                status = await _run_actor(lifecycle, listening.socket, on_host=True)
            finally:
                listening.close()
            if status is not None:
                return status
            next_client = await host.wait_for_client()
            listens = msgspec.structs.replace(listens, client_key=next_client.client_key)
            lifecycle.await_next_client(next_client.actor_id)
    finally:
        authenticator.close()
        host.close(linger_ms=_LAST_MESSAGES_MS)


async def _run_actor(
    lifecycle: "_ActorProcess", socket: zmq.Socket[bytes], *, on_host: bool = False
) -> int | None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ActorLoop)
    own_socket = loop.open_socket(socket, lifecycle.on_message, in_place=on_host)
    bounded = BoundedSocket(own_socket, lifecycle.on_message) if on_host else None
    lag = LoopLag()
    try:
        return await lifecycle.run_actor(bounded or own_socket, lag, bounded)
    finally:
        lag.stop_sampling()
        own_socket.close(linger_ms=_LAST_MESSAGES_MS)


class _BuiltActor(NamedTuple):
    """An actor that was built, and from what."""

    actor: Actor
    table: MethodTable
    request: SpawnRequest


class _ActorProcess:
    """Builds the actor from the first two messages, then hands the socket to its server.

    The two messages of a client that takes it over are compared with it.
    """

    def __init__(self, codec: Codec, actor_id: int) -> None:
        self._codec, self._actor_id = codec, actor_id
        self._spawn_messages: list[Frames] = []
        self._built: _BuiltActor | None = None
        self._server: ActorServer | None = None
        self._is_lost = False
        self.on_described: Callable[[], None] = lambda: None
        """Called when the actor's description has come, and so the peer that may send it."""
        self._described: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_hello(self, send: Callable[[Frames], object], start: ProcessStart) -> None:
        """Send the first message."""
        send(self._codec.encode(Kind.HELLO, 0, self._actor_id, OWN_CALL, start, "hello"))

    def abandon(self) -> None:
        """End the service of a client that is lost."""
        if self._server is not None:
            self._server.abandon()
            return
        self._is_lost = True
        if not self._described.done():
            self._described.set_result(None)

    def await_next_client(self, actor_id: int) -> None:
        """Wait for the messages of the next client."""
        self._actor_id, self._server, self._is_lost = actor_id, None, False
        self._spawn_messages.clear()
        self._described = asyncio.get_running_loop().create_future()

    def on_message(self, frames: Frames) -> None:
        """Collect the two messages that describe the actor."""
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
        except MalformedMessage:
            return
        # Nothing is built here: this is called by the socket, and a constructor may take minutes.
        if kind == Kind.SPAWN and len(self._spawn_messages) < 2:
            self._spawn_messages.append(frames)
            if len(self._spawn_messages) == 2:
                self._described.set_result(None)

    async def run_actor(
        self, socket: WaitingSocket | BoundedSocket, lag: LoopLag, outgoing: BoundedSocket | None
    ) -> int | None:
        """Run from the actor's description to its end.

        Return 0, or 1 if it could not be built or its `on_stop` raised; None if the client is lost
        and the actor is not.
        """
        send = socket.send
        await self._described
        if self._is_lost:
            # a process without an actor is worth nothing to the next client
            return 1 if self._built is None else None
        self.on_described()
        try:
            is_started = self._built is not None
            built = self._built = self._build()
            server = self._server = ActorServer(
                built.actor,
                built.table,
                self._codec,
                self._actor_id,
                send,
                built.request.mailbox,
                lag,
                outgoing,
                at_once=True,
            )
            socket.on_message = server.on_message
            gc.freeze()  # imported modules stay: the collector need not visit them again
            return 0 if await server.serve(is_started=is_started) else None
        except Exception as error:
            # the owner decides: it receives the report while the process ends
            send(
                self._codec.encode(
                    Kind.ERROR, 0, self._actor_id, OWN_CALL, make_report(error), "birth or end"
                )
            )
            return 1

    def _build(self) -> _BuiltActor:
        request: SpawnRequest = self._codec.decode(
            self._codec.get_decoder(SpawnRequest), self._spawn_messages[0]
        )
        if self._built is not None:
            return self._taken_over(self._built, request)
        table = get_method_table(import_actor_class(request.target))
        # Methods travel as numbers: with another version of the class, a call would reach another method.
        if table.fingerprint != request.fingerprint:
            raise TypeError(
                f"{request.target} has other methods here than at its caller; run "
                "the same code on both."
            )
        args: tuple[Any, ...] = self._codec.decode(
            self._codec.get_decoder(table.constructor.args_type), self._spawn_messages[1]
        )
        self._spawn_messages.clear()
        return _BuiltActor(table.constructor.call_function(table.actor_class, args), table, request)

    def _taken_over(self, built: _BuiltActor, request: SpawnRequest) -> _BuiltActor:
        """Return the actor for a client that would have had the same one built."""
        self._spawn_messages.clear()
        if (request.target, request.fingerprint) != (
            built.request.target,
            built.request.fingerprint,
        ):
            raise TypeError(
                f"the process that waited here holds {built.request.target}, expected "
                f"{request.target} with the same methods; take it over under another name."
            )
        return built._replace(request=request)


def import_actor_class(target: str) -> type[Actor]:
    """Import the class `module:qualname`.

    Raises: ImportError, AttributeError or TypeError if there is none.
    """
    found = pkgutil.resolve_name(target)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{target} is not an actor class.")
    return found


if __name__ == "__main__":
    main()
