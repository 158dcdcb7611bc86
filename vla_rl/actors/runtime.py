"""The runtime: owns all actors, tasks, child processes, sockets and shared memory, to their end."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple, cast

import msgspec

from vla_rl.actors.calls.actor import Actor, MethodTable, get_import_path, get_method_table
from vla_rl.actors.calls.client import ActorClient
from vla_rl.actors.calls.deadlines import resolve_deadlines, resolve_limits
from vla_rl.actors.calls.handles import get_client, get_record, handle_class
from vla_rl.actors.calls.pending import CallLimit
from vla_rl.actors.placement import ChildProcess, InLoop, Placement, RemoteHost, RestartPolicy
from vla_rl.actors.processes.fork_servers import LastingForkServers
from vla_rl.actors.remote.direct_link import make_link_keys
from vla_rl.actors.remote.shared_handles import make_shared_handle
from vla_rl.actors.supervision import Launchers, Supervisor
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import ActorReference, SpawnRequest
from vla_rl.errors import ActorDied
from vla_rl.util.error_reports import ErrorReport
from vla_rl.util.stalls import LagReport, LoopLag, Wait, add_wait_source, remove_wait_source

A = TypeVar("A", bound=Actor)
Ts = TypeVarTuple("Ts")
_IN_LOOP = InLoop()


class ActorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State of one actor, as its runtime knows it."""

    name: str
    pid: int
    """Process id of the current incarnation; 0 in this loop, or if there is none."""
    state: str
    """starting, running, restarting, stopped or dead."""
    placement: Placement
    num_restarts: int
    num_pending: int
    """Number of calls that wait for an answer."""
    num_waiting: int
    """Number of calls that wait for a free slot in the mailbox."""
    num_rejected: int
    """Number of received messages that could not be read."""
    num_slots_taken: int
    """Number of shared-memory slots that the actor still reads."""
    end: ActorDied | None
    """Error that ended it, or that ended its last incarnation while the next one starts; None while
    it is alive."""


_record_numbers = itertools.count()


class _Record:
    """One actor of one runtime, with what its handles need."""

    def __init__(
        self, runtime: "Runtime", client: ActorClient, supervisor: Supervisor, placement: Placement
    ) -> None:
        self.runtime, self.client, self.supervisor, self.placement = (
            runtime,
            client,
            supervisor,
            placement,
        )
        self.number = next(_record_numbers)


class Runtime:
    """Spawns actors.

    `async with Runtime() as runtime:` stops them all on the way out, whatever the reason.

    An actor that dies more often than its restart policy allows ends the `async with` body and
    raises ActorDied from it.

    Args:
        name: name for logs.
        stop_grace_s: time that a stopped actor has to finish its calls (s); then it is killed.
        fork_servers: fork servers that outlive this runtime; None: it has its own.
    """

    def __init__(
        self,
        name: str = "main",
        *,
        stop_grace_s: float = 5.0,
        fork_servers: LastingForkServers | None = None,
    ) -> None:
        self.name = name
        self._stop_grace_s = stop_grace_s
        self._fork_servers = fork_servers
        self._living: set[_Record] = set()
        self._numbers = itertools.count()
        self._group: asyncio.TaskGroup | None = None
        self._is_left = False
        self._launchers: Launchers | None = None
        self._lag: LoopLag | None = None

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError(f"runtime {self.name!r} is open already; make another one.")
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._lag = LoopLag(self._extend_deadlines)
        self._launchers = Launchers(self.name, self._lag, self._fork_servers)
        self._waits_token = add_wait_source(self._waits)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._group is not None
        assert self._launchers is not None
        assert self._lag is not None
        self._is_left = True
        try:
            try:
                await self._stop_all()
            finally:
                await self._launchers.close_fork_servers()
        finally:
            self._lag.stop_sampling()
            self._launchers.close()
            remove_wait_source(self._waits_token)
            try:
                await self._group.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                if len(group.exceptions) > 1:
                    raise
                if group.exceptions[0] is not error:
                    raise group.exceptions[0] from None

    async def spawn(
        self,
        actor_class: Callable[[*Ts], A],
        *args: *Ts,
        name: str | None = None,
        placement: Placement = _IN_LOOP,
        restart: RestartPolicy | None = None,
        deadline_s: float | None = None,
        deadlines_s: Mapping[str, float] | None = None,
        limits: Mapping[str, CallLimit] | None = None,
        start_timeout_s: float = 60.0,
        mailbox: int = 64,
    ) -> A:
        """Start an actor and wait until it is ready; return a handle with the class's actor methods.

        Args:
            actor_class, args: the class and its constructor's arguments, by position.
            name: name for errors, logs and the wait graph; by default the class's name and a
                number.
            placement: `InLoop()`, `ChildProcess(...)` or `RemoteHost(...)`.
            restart: how often to replace it when it dies; None leaves it dead.
            deadline_s: longest time for one call (s), without the wait behind other calls; after
                that the actor is killed and the call raises ActorFrozen. None waits for ever.
            deadlines_s: deadlines of single methods, by name; they replace `deadline_s` and those
                of the class.
            limits: limits of single methods, by name, which shorten a call's deadline from the
                durations of earlier calls.
            start_timeout_s: longest time for its constructor and `on_start` (s).
            mailbox: largest number of unanswered calls; further senders wait.

        Raises: what the constructor or `on_start` raises; ActorDied, also if the runtime is closed
            meanwhile; TimeoutError; TypeError for a class or an argument that cannot be sent;
            ValueError for a deadline of an unknown method; what `prepare` raises.
        """
        if not start_timeout_s > 0:
            raise ValueError(f"start_timeout_s is {start_timeout_s}, expected more than 0 seconds.")
        kind = cast(type[Actor], actor_class)
        table = get_method_table(kind)
        _check_annotations(table)
        name = name if name is not None else f"{kind.__name__}-{next(self._numbers)}"
        deadlines = resolve_deadlines(table, deadline_s, deadlines_s or {})
        client = ActorClient(name, table, mailbox, deadlines, resolve_limits(table, limits or {}))
        target = kind.__qualname__ if isinstance(placement, InLoop) else get_import_path(kind)
        request = SpawnRequest(target, table.fingerprint, mailbox)
        bound = table.constructor.bind_arguments(args, {})
        group, launchers = self._opened()
        launch = launchers.make_launcher(name, table, bound, placement, mailbox)
        prepare = functools.partial(launchers.prepare_placement, placement, start_timeout_s)
        supervisor = Supervisor(client, prepare, launch, request, bound, restart, start_timeout_s)
        record = _Record(self, client, supervisor, placement)
        self._living.add(record)  # closing the runtime meanwhile stops it
        try:
            await supervisor.start_actor()
        except BaseException:
            self._living.discard(record)
            raise
        group.create_task(self._supervise(record), name=f"supervise {name}")
        return cast(A, handle_class(kind)(client, record))

    async def prepare(
        self, placement: ChildProcess | RemoteHost, *, start_timeout_s: float = 60.0
    ) -> None:
        """Check the interpreter and start the fork server of a placement now.

        Then the first `spawn` need not wait for them.

        Args:
            start_timeout_s: longest time until another host answers (s).

        Raises: ConfigError for an unusable interpreter; what a prepare hook raises; ActorFrozen
            naming a hook that did not end in time; ActorDied if the fork server or its host dies;
            TimeoutError if the host does not answer.
        """
        _, launchers = self._opened()
        await launchers.prepare_placement(placement, start_timeout_s)

    async def share(self, actor: A, host: str = "") -> A:
        """Return a handle of an actor to send to another actor, which then calls it directly.

        The handle is for one holder: share the actor once for each. It serves the current incarnation,
        until the holder drops it, and for a minute if it is not used.

        Args:
            actor: one of this runtime.
            host: address at which the holder reaches the actor's machine; empty for the one at which
                this runtime does.

        Raises: ActorDied if the actor is gone; TimeoutError if it does not answer; TypeError if no other
            process can import its class; OSError if its host has no free port.
        """
        record = self._find(actor)
        table = record.client.table
        target, keys = get_import_path(table.actor_class), make_link_keys()
        listening = await record.client.share(keys.public)
        placement = record.placement
        reference = ActorReference(
            target,
            table.fingerprint,
            record.client.name,
            host or (placement.host if isinstance(placement, RemoteHost) else ""),
            listening.port,
            listening.public_key,
            keys,
        )
        shared: A = make_shared_handle(table.actor_class, reference)
        return shared

    def info(self, actor: Actor) -> ActorInfo:
        """Return the state of an actor as known local, without asking the actor."""
        record = self._find(actor)
        client = record.client
        return ActorInfo(
            name=client.name,
            pid=client.pid,
            state=client.state.value,
            placement=record.placement,
            num_restarts=record.supervisor.num_restarts,
            num_pending=client.num_pending,
            num_waiting=client.mailbox.num_waiting,
            num_rejected=client.num_rejected,
            num_slots_taken=client.num_slots_taken,
            end=client.exit_error,
        )

    async def loop_lag(self, actor: Actor | None = None) -> LagReport:
        """Return how late the actor's loop ran its timers over the last minute.

        Without an actor, return it for our own loop.
        """
        if actor is not None:
            return await get_client(actor).loop_lag()
        assert self._lag is not None, "the runtime is not open"
        return self._lag.make_report()

    async def stop(self, actor: Actor) -> None:
        """Stop an actor: the calls in its mailbox are answered, then `on_stop` runs.

        An exception of `on_stop` is logged as an error, with its remote traceback; the actor ends
        anyway. Concurrent calls that still run, and later ones, raise ActorDied.
        """
        await self._find(actor).supervisor.stop_actor(self._stop_grace_s)

    async def kill(self, actor: Actor) -> None:
        """End an actor at once and for good, whatever its restart policy.

        Pending and later calls raise ActorDied.
        """
        await self._find(actor).supervisor.kill_actor()

    def _extend_deadlines(self, lost_s: float) -> None:
        for record in self._living:
            record.client.extend_deadlines(lost_s)

    def _waits(self) -> list[Wait]:
        """Return the tasks that wait for answers; called on the watchdog's thread."""
        return [
            # a pid of another host means nothing local
            replace(wait, pid=record.client.pid)
            if isinstance(record.placement, ChildProcess)
            else wait
            for record in list(self._living)
            for wait in record.client.list_waits()
        ]

    async def _supervise(self, record: "_Record") -> None:
        """Restart the actor as its policy allows; after its end only its handles refer to it."""
        try:
            await record.supervisor.supervise()
        finally:
            # not if another actor's end cancels this: closing the runtime stops it
            if record.supervisor.is_over:
                self._living.discard(record)

    def _find(self, actor: Actor) -> "_Record":
        client, record = get_client(actor), get_record(actor)
        if not isinstance(record, _Record) or record.runtime is not self:
            raise ValueError(
                f"actor {client.name!r} belongs to another runtime than {self.name!r}."
            )
        return record

    def _opened(self) -> tuple[asyncio.TaskGroup, Launchers]:
        if self._group is None or self._launchers is None or self._is_left:
            raise RuntimeError(f"runtime {self.name!r} is not open; use `async with`.")
        return self._group, self._launchers

    async def _stop_all(self) -> None:
        """Stop the actors, newest first, those of this loop before all others.

        They may hold handles to the others.
        """
        records = sorted(self._living, key=lambda record: record.number)
        local = [record.supervisor for record in records if isinstance(record.placement, InLoop)]
        others = [
            record.supervisor for record in records if not isinstance(record.placement, InLoop)
        ]
        try:
            for supervisor in reversed(local):
                await supervisor.stop_actor(self._stop_grace_s)
            await asyncio.gather(
                *(supervisor.stop_actor(self._stop_grace_s) for supervisor in others)
            )
        except BaseException:  # a second cancellation: kill at once, and leave nothing behind
            await asyncio.gather(*(supervisor.kill_actor() for supervisor in (*local, *others)))
            raise


def _check_annotations(table: MethodTable) -> None:
    """Make each decoder once.

    Raises: TypeError naming the method whose annotation cannot be sent.
    """
    codec = Codec()
    for entry in (table.constructor, *table.methods):
        try:
            codec.get_decoder(entry.args_type)
            codec.get_decoder(entry.result_type)
        except TypeError as error:
            raise TypeError(
                f"{entry.label} has an annotation that cannot be sent in a message: {error}"
            ) from error
    codec.get_decoder(ErrorReport)
