"""The program of an actor's own process: `python -m vla_rl.actors.child NAME`.

Only a runtime starts it.

Its settings come from stdin (in a forked child: from its fork server), the class to build and its
arguments from the socket. The process ends with the actor, with the parent, or when the constructor
fails, which is reported to the parent first.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import msgspec
import zmq

from vla_rl.actors.actor import Actor, MethodTable, table_of
from vla_rl.actors.actor_loop import ActorLoop, WaitingSocket
from vla_rl.actors.blocks import use_for_blocks
from vla_rl.actors.codec import Codec
from vla_rl.actors.fork_protocol import ChildSettings, ListenSettings
from vla_rl.actors.host_pipe import HostPipe
from vla_rl.actors.in_flight import MeteredSocket
from vla_rl.actors.listening import (
    Listening,
    ListenPlace,
    keep_freed_memory,
    note_own_place,
)
from vla_rl.actors.pulse import begin_beating
from vla_rl.actors.server import ActorServer
from vla_rl.actors.slots import SlotReader, SlotWriter
from vla_rl.actors.sockets import lift_high_water_mark
from vla_rl.actors.wire import (
    OWN_CALL,
    Birth,
    Frames,
    Kind,
    MalformedMessage,
    SpawnRequest,
    unpack_envelope,
)
from vla_rl.actors.zap import Gatekeeper
from vla_rl.util.error_reports import make_report
from vla_rl.util.processes import die_with_parent, leave_terminal_to_parent, name_process
from vla_rl.util.stalls import LoopLag

_LAST_WORDS_MS = 2000


def main() -> None:
    """Become the actor that the parent asks for, and run until it ends."""
    leave_terminal_to_parent()
    settings, pipe_fd = _read_settings()
    die_with_parent(settings.parent_pid, pipe_fd)
    if settings.sys_path is not None:
        sys.path[:] = settings.sys_path
    live(settings)


def live(settings: ChildSettings) -> NoReturn:
    """Run the actor that the parent asks for over the socket, then exit."""
    if settings.pulse >= 0:
        begin_beating(settings.pulse)
    name_process(settings.name)
    sys.argv = [settings.name]
    with asyncio.Runner(loop_factory=ActorLoop) as runner:
        status = runner.run(_live(settings))
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Exit as Python does, but leave its objects to the kernel.

    Freeing what torch has imported takes 0.4 s, and copies 160 MB in a process that was forked.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in its children
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # no reader, or it was closed or replaced
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


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
                "vla_rl.actors.child is started by a runtime, which sends it its settings on stdin."
            )
        data += more
    return data


async def _live(settings: ChildSettings) -> int:
    codec = Codec()
    if settings.arena_in >= 0:
        slots_out = SlotWriter(settings.arena_out)
        use_for_blocks(slots_out)
        codec = Codec(slots_out, SlotReader(settings.arena_in))
        os.close(settings.arena_in)
        os.close(settings.arena_out)
    with zmq.Context() as context:
        parent: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(parent)
        parent.connect(settings.address)
        life = _Life(codec, settings.actor_id)
        if settings.listens is None:
            life.say_hello(parent.send_multipart, Birth(os.getpid()))
            status = await _run(life, parent)
            assert status is not None, "a parent that is lost takes its child along"
            return status
        keep_freed_memory()
        return await _live_far(life, context, parent, settings.listens)


async def _live_far(
    life: "_Life",
    context: zmq.Context[zmq.Socket[bytes]],
    parent: zmq.Socket[bytes],
    listens: ListenSettings,
) -> int:
    """Serve one client of another host after the other; return the exit status."""
    host = HostPipe(parent, life.abandon)
    note_own_place(ListenPlace(listens.interface, listens.ports))
    # one for all clients: ZeroMQ frees the name of its endpoint some time after it was closed
    gatekeeper = Gatekeeper(context, [])
    try:
        while True:
            try:
                listening = Listening(context, listens, gatekeeper)
            except OSError as error:
                sys.exit(str(error))
            birth = Birth(os.getpid(), listening.port, listening.public_key)
            life.say_hello(host.send, birth)
            if not listens.takes_over:
                host.close(linger_ms=_LAST_WORDS_MS)
            life.on_born = listening.close_door
            try:
                status = await _run(life, listening.socket, is_far=True)
            finally:
                listening.close()
            if status is not None:
                return status
            adoption = await host.adopted()
            listens = msgspec.structs.replace(listens, client_key=adoption.client_key)
            life.begin_again(adoption.actor_id)
    finally:
        gatekeeper.close()
        host.close(linger_ms=_LAST_WORDS_MS)


async def _run(life: "_Life", socket: zmq.Socket[bytes], *, is_far: bool = False) -> int | None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ActorLoop)
    own_socket = loop.open_socket(socket, life.on_message, in_place=is_far)
    metered = MeteredSocket(own_socket, life.on_message) if is_far else None
    lag = LoopLag()
    try:
        return await life.run(metered or own_socket, lag, metered)
    finally:
        lag.stop()
        own_socket.close(linger_ms=_LAST_WORDS_MS)


class _Built(NamedTuple):
    """An actor that was built, and from what."""

    actor: Actor
    table: MethodTable
    request: SpawnRequest


class _Life:
    """Builds the actor from the first two messages, then hands the socket to its server.

    The two messages of a client that takes it over are compared with it.
    """

    def __init__(self, codec: Codec, actor_id: int) -> None:
        self._codec, self._actor_id = codec, actor_id
        self._birth: list[Frames] = []
        self._built: _Built | None = None
        self._server: ActorServer | None = None
        self._is_lost = False
        self.on_born: Callable[[], None] = lambda: None
        """Called when the actor's description has come, and so the peer that may send it."""
        self._born: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def say_hello(self, send: Callable[[Frames], object], birth: Birth) -> None:
        """Send the first message."""
        send(self._codec.encode(Kind.HELLO, 0, self._actor_id, OWN_CALL, birth, "hello"))

    def abandon(self) -> None:
        """End the service of a client that is lost."""
        if self._server is not None:
            self._server.abandon()
            return
        self._is_lost = True
        if not self._born.done():
            self._born.set_result(None)

    def begin_again(self, actor_id: int) -> None:
        """Wait for the messages of the next client."""
        self._actor_id, self._server, self._is_lost = actor_id, None, False
        self._birth.clear()
        self._born = asyncio.get_running_loop().create_future()

    def on_message(self, frames: Frames) -> None:
        """Collect the two messages that describe the actor."""
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
        except MalformedMessage:
            return
        if kind == Kind.SPAWN and len(self._birth) < 2:
            self._birth.append(frames)
            if len(self._birth) == 2:
                self._born.set_result(None)

    async def run(
        self, socket: WaitingSocket | MeteredSocket, lag: LoopLag, outgoing: MeteredSocket | None
    ) -> int | None:
        """Run from the actor's description to its end.

        Return 0, or 1 if it could not be built or its `on_stop` raised; None if the client is lost
        and the actor is not.
        """
        send = socket.send
        await self._born
        if self._is_lost:
            # a process without an actor is worth nothing to the next client
            return 1 if self._built is None else None
        self.on_born()
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

    def _build(self) -> _Built:
        request: SpawnRequest = self._codec.decode(
            self._codec.decoder(SpawnRequest), self._birth[0]
        )
        if self._built is not None:
            return self._taken_over(self._built, request)
        table = table_of(import_target(request.target))
        if table.fingerprint != request.fingerprint:
            raise TypeError(
                f"{request.target} has other methods here than at its caller; run "
                "the same code on both."
            )
        args: tuple[Any, ...] = self._codec.decode(
            self._codec.decoder(table.constructor.args_type), self._birth[1]
        )
        self._birth.clear()
        return _Built(table.constructor.apply(table.actor_class, args), table, request)

    def _taken_over(self, built: _Built, request: SpawnRequest) -> _Built:
        """Return the actor for a client that would have had the same one built."""
        self._birth.clear()
        if (request.target, request.fingerprint) != (
            built.request.target,
            built.request.fingerprint,
        ):
            raise TypeError(
                f"the process that waited here holds {built.request.target}, expected "
                f"{request.target} with the same methods; take it over under another name."
            )
        return built._replace(request=request)


def import_target(target: str) -> type[Actor]:
    """Import the class `module:qualname`.

    Raises: ImportError, AttributeError or TypeError if there is none.
    """
    module_name, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{target} is not an actor class.")
    return found


if __name__ == "__main__":
    main()
