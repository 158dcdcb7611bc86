"""Everything that clients have on this host: their processes, their fork servers.

A process may outlive its client, for the next client of the same owner:

client lost ──► wait ──► claim: the next client of the same owner and name
                  ├────► its time is over, or a process of another owner is launched: killed
                  └────► it ends by itself
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from vla_rl.actors.placement import ChildProcess, Takeover
from vla_rl.actors.processes.channels import ActorExit, ChildChannel
from vla_rl.actors.processes.fork_servers import ForkServers
from vla_rl.actors.processes.liveness import ProcessObserver
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    ExitNotice,
    Frames,
    Kind,
    LaunchRequest,
    ListenSettings,
    NextClient,
)
from vla_rl.util.error_reports import escape_surrogates, make_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    takeover: Takeover
    process: ChildChannel
    end: asyncio.TimerHandle


class WaitingProcesses:
    """Owns these processes, which no client has at the time."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._dying: set[ChildChannel] = set()
        self._codec = Codec()

    def __len__(self) -> int:
        return len(self._waiting)

    def add_process(self, takeover: Takeover, process: ChildChannel) -> None:
        """Let a process wait for its next client; its calls of the last one are cancelled."""
        key = (takeover.owner, takeover.name)
        self._kill(key)
        process.hand_over(0, lambda frames: None, lambda death: self._forget(key, process, death))
        process.send_message(self._codec.encode(Kind.LOST, 0, 0, 0, None, "lost client"))
        end = asyncio.get_running_loop().call_later(takeover.within_s, self._give_up, key)
        self._waiting[key] = _Waiting(takeover, process, end)

    def claim_process(self, takeover: Takeover) -> ChildChannel | None:
        """Return the process that waits for this client, if any; kill those of other owners."""
        # The GPUs of a process that waits for another run would be missing to this one.
        for key in [key for key in self._waiting if key[0] != takeover.owner]:
            self._kill(key)
        found = self._waiting.pop((takeover.owner, takeover.name), None)
        if found is None:
            return None
        found.end.cancel()
        return found.process

    async def close(self) -> None:
        """Kill all of them, and wait until they have ended."""
        for key in list(self._waiting):
            self._kill(key)
        for process in list(self._dying):
            await process.until_gone()

    def _give_up(self, key: tuple[str, str]) -> None:
        logger.warning(
            "no client took over %s of %s within %g s; it is killed.",
            key[1],
            key[0],
            self._waiting[key].takeover.within_s,
        )
        self._kill(key)

    def _kill(self, key: tuple[str, str]) -> None:
        found = self._waiting.pop(key, None)
        if found is not None:
            found.end.cancel()
            self._dying.add(found.process)
            found.process.kill_incarnation()

    def _forget(self, key: tuple[str, str], process: ChildChannel, death: ActorExit) -> None:
        """Note the end of a process that waited."""
        self._dying.discard(process)
        found = self._waiting.get(key)
        if found is not None and found.process is process:
            found.end.cancel()
            del self._waiting[key]
            logger.warning("%s, which waited for a client, ended: %s", process.name, death.cause)


class HostedClient:
    """Owns them until `close`.

    Args:
        name: for errors of fork servers.
        context: for the pipes on which processes say hello.
        observer: watches the processes.
        interface, ports: where processes listen for the client.
        send: queues a message for the client.
        waiting: processes whose clients were lost.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        observer: ProcessObserver,
        interface: str,
        ports: tuple[int, int],
        send: Callable[[Frames], None],
        waiting: WaitingProcesses,
    ) -> None:
        self._context, self._observer = context, observer
        self._interface, self._ports, self._send = interface, ports, send
        self._codec, self._waiting = Codec(), waiting
        self._children: dict[int, ChildChannel] = {}
        self._takeovers: dict[int, Takeover] = {}
        self._fork_servers = ForkServers(name, observer)
        self._preparing: set[asyncio.Task[None]] = set()

    @property
    def num_actors(self) -> int:
        """Number of its processes that run."""
        return len(self._children)

    def has_process(self, actor: int) -> bool:
        """Return whether the process with this number runs."""
        return actor in self._children

    def launch_process(self, actor: int, request: LaunchRequest) -> None:
        """Start a process, or take over one; its hello or its end is sent to the client."""
        if request.takeover is not None:
            self._takeovers[actor] = request.takeover
            found = self._waiting.claim_process(request.takeover)
            if found is not None:
                self._reuse_process(actor, found, request.client_key)
                return
        # Its caller is on another machine: arenas would only take address space.
        process = msgspec.structs.replace(request.process, shared_memory_mib=0)
        on_end = functools.partial(self._on_end, actor)
        takes_over = request.takeover is not None
        listens = ListenSettings(self._interface, self._ports, request.client_key, takes_over)
        try:
            self._children[actor] = ChildChannel(
                request.name,
                process,
                self._context,
                self._send,
                on_end,
                self._observer,
                actor,
                self._fork_servers.get_starter(process),
                listens,
            )
        except Exception as error:  # the client gets the error, and the others are served on
            on_end(ActorExit(0, f"could not be started: {error}"))

    def prepare_process(self, call: int, process: ChildProcess) -> None:
        """Prepare what such processes need; the client gets the outcome as the answer to `call`."""
        preparing = asyncio.create_task(self._prepare(call, process), name="preparation")
        self._preparing.add(preparing)
        preparing.add_done_callback(self._preparing.discard)

    def kill_process(self, actor: int) -> None:
        """Kill a process, if it still runs."""
        if actor in self._children:
            self._children[actor].kill_incarnation()

    def keep_for_next_client(self) -> int:
        """Let the processes wait that another client may take over; return their number.

        Call it once this client is lost.
        """
        # Only those that asked for it: an actor whose owner is gone and that nobody looks for is a leak.
        takeovers, self._takeovers = self._takeovers, {}
        for actor, takeover in takeovers.items():
            self._waiting.add_process(takeover, self._children.pop(actor))
        return len(takeovers)

    def release_process(self, owner: str, name: str) -> None:
        """Let one process wait that another client asks for; it has ended for this one."""
        for actor, takeover in list(self._takeovers.items()):
            if (takeover.owner, takeover.name) == (owner, name):
                child = self._children[actor]
                del self._takeovers[actor]
                self._on_end(
                    actor, ActorExit(child.pid, f"another process of {owner} took it over")
                )
                self._waiting.add_process(takeover, child)

    async def close(self) -> None:
        """End everything, and wait until it has ended."""
        # Before the processes: a preparation that ends now would start another one.
        preparing = list(self._preparing)
        for task in preparing:
            task.cancel()
        await asyncio.gather(*preparing, return_exceptions=True)
        children = list(self._children.values())
        for child in children:
            child.kill_incarnation()
        await asyncio.gather(*(child.until_gone() for child in children))
        await self._fork_servers.close()

    def _reuse_process(self, actor: int, child: ChildChannel, client_key: str) -> None:
        child.hand_over(actor, self._send, functools.partial(self._on_end, actor))
        self._children[actor] = child
        next_client = NextClient(actor, client_key)
        child.send_message(
            self._codec.encode(Kind.NEXT_CLIENT, 0, actor, 0, next_client, "adoption")
        )

    async def _prepare(self, call: int, process: ChildProcess) -> None:
        try:
            await self._fork_servers.prepare(process)
        except Exception as error:  # raised again in the client's `spawn`
            answer = self._codec.encode(Kind.ERROR, 0, 0, call, make_report(error), "preparation")
        else:
            answer = self._codec.encode(Kind.PREPARED, 0, 0, call, None, "preparation")
        self._send(answer)

    def _on_end(self, actor: int, death: ActorExit) -> None:
        self._children.pop(actor, None)
        self._takeovers.pop(actor, None)
        # a cause may name a file whose name is no text, and the client has to hear of the end
        words = tuple(map(escape_surrogates, death.stderr_tail))
        notice = ExitNotice(death.pid, escape_surrogates(death.cause), words, death.frozen)
        self._send(self._codec.encode(Kind.EXITED, 0, actor, 0, notice, "death notice"))
