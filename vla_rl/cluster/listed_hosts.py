"""The hosts that a file lists: each runs `vla-rl host`, and may go and come back.

Hosts that are added to the file while it is in use join too.

file ──► one keeper for each host:  connect ─► Joined ─► wait for its death ─► Left ─┐
                                       ▲────────────── again, every few seconds ◄────┘
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from vla_rl.actors import Runtime
from vla_rl.cluster.host_file import KnownHost, read_host_file
from vla_rl.cluster.hosts import (
    Host,
    HostChange,
    HostMonitor,
    Joined,
    Left,
    get_own_resources,
    make_own_report,
    require_same_versions,
)
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.util.stalls import waiting

logger = logging.getLogger(__name__)

MOST_CHANGES: Final = 256
"""Changes that wait to be read; then the keepers of hosts wait."""


class ListedHosts:
    """The hosts of a file. All of them must answer when the block is entered.

    Args:
        path: the file, as `read_host_file` reads it.
        answer_within_s: time in which a host must answer; also the deadline of each later look.
        look_every_s: time between two looks for a host that has left.
        may_be_away: whether a host that does not answer is looked for later, as after a restart of
            a run, in which hosts were lost.

    Raises: ConfigError for a file, a key or a host that is wrong, by name.
    """

    def __init__(
        self,
        path: Path,
        *,
        answer_within_s: float = 20.0,
        look_every_s: float = 1.0,
        may_be_away: bool = False,
    ) -> None:
        # before the file is read: a change in between is then read once more, and not missed
        self._path, self._read_at = path, _get_change_time(path)
        self._known = read_host_file(path)
        self._answer_within_s, self._look_every_s = answer_within_s, look_every_s
        self._may_be_away = may_be_away
        self._local = Host(name="this host", resources=get_own_resources())
        self._there: dict[str, Host] = {}
        self._report = make_own_report()
        self._changes: asyncio.Queue[HostChange | None] = asyncio.Queue(MOST_CHANGES + 1)
        self._has_ended = False
        self._room = asyncio.Semaphore(MOST_CHANGES)
        self._runtime = Runtime("hosts")
        self._watch_tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Ask every host for its report. Raises: ConfigError naming each host that cannot be used."""
        await self._runtime.__aenter__()
        try:
            # All at once, and all errors in one text: a user with four wrong hosts corrects them together.
            found = await asyncio.gather(
                *(self._connect(known) for known in self._known), return_exceptions=True
            )
            monitors = _require_monitors(found, may_be_away=self._may_be_away)
        except BaseException as error:
            await self._runtime.__aexit__(type(error), error, error.__traceback__)
            raise
        for known, monitor in zip(self._known, monitors, strict=True):
            self._begin(self._watch_host(known, monitor), f"keeper of host {known.listed.name}")
        self._begin(self._read_again(), "reader of the list of hosts")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the monitors; iterations of `changes` end."""
        self._has_ended = True
        ended = [task for task in self._watch_tasks if task.done() and not task.cancelled()]
        self._changes.put_nowait(None)  # the queue has room for it beside all changes
        for watch_task in self._watch_tasks:
            watch_task.cancel()
        try:
            if self._watch_tasks:
                await asyncio.wait(self._watch_tasks)
        finally:
            await self._runtime.__aexit__(kind, error, traceback)
        # none is expected; one that is lost would be a host that is watched no longer, in silence
        for task in ended:
            if (failure := task.exception()) is not None and error is None:
                raise failure

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are there now, this host first."""
        return (self._local, *self._there.values())

    async def changes(self) -> AsyncIterator[HostChange]:
        """Yield each host that joins or leaves after the block was entered; for one reader."""
        while not (self._has_ended and self._changes.empty()):
            change = await self._changes.get()
            if change is None:
                return
            self._room.release()
            yield change

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._watch_tasks.append(asyncio.create_task(work, name=name))

    async def _read_again(self) -> None:
        """Read the file when it changes, and begin to look for the hosts that are new in it."""
        names, last = {known.listed.name for known in self._known}, self._read_at
        while True:
            await asyncio.sleep(self._look_every_s)
            changed = _get_change_time(self._path)
            # An editor replaces a file by another one, so it may be gone for a moment.
            if changed in (None, last):
                continue
            last = changed
            try:
                known = read_host_file(self._path)
            except ConfigError as error:
                logger.warning("the changed list of hosts is not used: %s", error)
                continue
            for new in known:
                if new.listed.name not in names:
                    names.add(new.listed.name)
                    self._begin(self._watch_host(new, None), f"keeper of host {new.listed.name}")

    async def _watch_host(self, known: KnownHost, monitor: HostMonitor | None) -> None:
        """Report each time that one host leaves and comes back, until cancelled."""
        name, last_error = known.listed.name, ""
        # waits for                              woken by
        # `wait_until_gone` of the monitor       the end of its process, its host or the connection
        # `_room`, in `_note`                    the reader of `changes`
        # `look_every_s`, then `_connect`        the clock; the host's answer
        while True:
            if monitor is not None:
                try:
                    await monitor.wait_until_gone()
                except ActorDied as death:
                    await self._note(Left(host=self._there.pop(name), cause=death.cause))
            await asyncio.sleep(self._look_every_s)
            try:
                with waiting("the list of hosts", on=f"host {name!r} to come back"):
                    monitor = await self._connect(known)
            except ConfigError as error:  # it is still away, or came back with another version
                monitor = None
                if str(error) != last_error:
                    last_error = str(error)
                    logger.warning("%s. It is tried again every %g s", error, self._look_every_s)
            else:
                last_error = ""
                await self._note(Joined(host=self._there[name]))

    async def _note(self, change: HostChange) -> None:
        # Bounded, and never dropped: a reader that missed a Left would wait for a host for ever.
        await self._room.acquire()
        self._changes.put_nowait(change)

    async def _connect(self, known: KnownHost) -> HostMonitor:
        """Start a monitor on a host, and add the host. Raises: ConfigError naming it, and why."""
        name, address = known.listed.name, known.listed.address
        monitor: HostMonitor | None = None
        try:
            monitor = await self._runtime.spawn(
                HostMonitor,
                name=f"monitor of {name}",
                placement=known.placement,
                deadlines_s={"report": self._answer_within_s},
                start_timeout_s=self._answer_within_s,
            )
            report = await monitor.report()
            require_same_versions(name, report, self._report)
        except (ActorDied, TimeoutError, TypeError, ImportError, AttributeError) as error:
            # the last three: another version of vla_rl there has another monitor, or none
            cause = error.cause if isinstance(error, ActorDied) else str(error)
            raise ConfigError(
                f"host {name!r} at {address} of {self._path} cannot be used: {cause.rstrip('.')}. Start "
                f"`vla-rl host` there with our public key allowed, and compare its two printed "
                "lines with the file"
            ) from error
        except ConfigError:
            # Another version: its process must not stay there until this run ends.
            assert monitor is not None
            await self._runtime.kill(monitor)
            raise
        resources = known.listed.apply_limits(report.resources)
        self._there[name] = Host(name=name, resources=resources, placement=known.placement)
        return monitor


def _require_monitors(
    found: Sequence[HostMonitor | BaseException], *, may_be_away: bool
) -> list[HostMonitor | None]:
    """Return the monitors of all hosts; None for one that may be away, and is.

    Raises: ConfigError about every host that cannot be used; else the first other error.
    """
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, ConfigError):
            raise error
        if may_be_away:
            logger.warning("%s. It is tried again", error)
    if errors and not may_be_away:
        raise ConfigError("\n".join(str(error) for error in errors)) from errors[0]
    return [None if isinstance(each, BaseException) else each for each in found]


def _get_change_time(path: Path) -> int | None:
    """Return when a file was changed, in nanoseconds; None if it is gone for the moment."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
