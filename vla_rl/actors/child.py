"""The program of an actor's own process: `python -m vla_rl.actors.child NAME`.

Only a runtime starts it.

Its settings come from stdin (in a forked child: from its fork server), the class to build and its
arguments from the socket. The process ends with the actor, with the parent, or when the constructor
fails, which is reported to the parent first.
"""

import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import zmq

from vla_rl.actors.actor import Actor, MethodTable, table_of
from vla_rl.actors.actor_loop import ActorLoop, WaitingSocket
from vla_rl.actors.blocks import use_for_blocks
from vla_rl.actors.codec import Codec
from vla_rl.actors.fork_protocol import ChildSettings
from vla_rl.actors.in_flight import MeteredSocket
from vla_rl.actors.listening import Listening, keep_freed_memory
from vla_rl.actors.loop_lag import LoopLag
from vla_rl.actors.parent_link import die_with_parent, leave_terminal_to_parent, name_process
from vla_rl.actors.pulse import begin_beating
from vla_rl.actors.remote_errors import report_of
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
        sys.exit(runner.run(_live(settings)))


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
            life.say_hello(parent, Birth(os.getpid()))
            return await _run(life, parent)
        keep_freed_memory()
        listening = Listening(context, settings.listens)
        life.say_hello(parent, Birth(os.getpid(), listening.port, listening.public_key))
        parent.close(linger=_LAST_WORDS_MS)
        life.on_born = listening.close_door
        try:
            return await _run(life, listening.socket, is_far=True)
        finally:
            listening.close()


async def _run(life: "_Life", socket: zmq.Socket[bytes], *, is_far: bool = False) -> int:
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


class _Life:
    """Builds the actor from the first two messages, then hands the socket to its server."""

    def __init__(self, codec: Codec, actor_id: int) -> None:
        self._codec, self._actor_id = codec, actor_id
        self._birth: list[Frames] = []
        self.on_born: Callable[[], None] = lambda: None
        """Called when the actor's description has come, and so the peer that may send it."""
        self._born: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def say_hello(self, parent: zmq.Socket[bytes], birth: Birth) -> None:
        """Send the first message."""
        hello = self._codec.encode(Kind.HELLO, 0, self._actor_id, OWN_CALL, birth, "hello")
        parent.send_multipart(hello)

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
    ) -> int:
        """Run from the actor's description to its end.

        Return 0, or 1 if it could not be built or its `on_stop` raised.
        """
        send = socket.send
        await self._born
        self.on_born()
        try:
            actor, table, mailbox = self._build()
            server = ActorServer(
                actor,
                table,
                self._codec,
                self._actor_id,
                send,
                mailbox,
                lag,
                outgoing,
                at_once=True,
            )
            socket.on_message = server.on_message
            gc.freeze()  # imported modules stay: the collector need not visit them again
            await server.serve()
        except Exception as error:
            # the owner decides: it receives the report while the process ends
            send(
                self._codec.encode(
                    Kind.ERROR, 0, self._actor_id, OWN_CALL, report_of(error), "birth or end"
                )
            )
            return 1
        return 0

    def _build(self) -> tuple[Actor, MethodTable, int]:
        request: SpawnRequest = self._codec.decode(
            self._codec.decoder(SpawnRequest), self._birth[0]
        )
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
        return table.constructor.apply(table.actor_class, args), table, request.mailbox


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
