"""A caller's channel to a process on another host.

    launch ──► its host ──► HELLO with port and key ──► direct link ──► all messages
    its host ──► DIED ──► read what the link still has ──► the end

The host alone reports the end; the link carries the rest. If the link is lost while the host still
answers, the host is asked to kill the process.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.direct_link import DirectLink, make_link_keys
from vla_rl.actors.placement import ChildProcess, Takeover
from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.wire import Birth, DeathNotice, Frames, Kind, LaunchRequest, MalformedMessage

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
        self._host, self._context, self._forget = host, context, forget
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._keys = make_link_keys()
        self._link: DirectLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._death: Death | None = None
        self._lost: str | None = None

    def launch(self, name: str, process: ChildProcess, takeover: Takeover | None) -> None:
        """Ask the host for the process."""
        request = LaunchRequest(name, process, self._keys.public, takeover)
        self._host.send(self.codec.encode(Kind.LAUNCH, 0, self.actor_id, 0, request, name))

    @property
    def unanswered(self) -> str:
        """Address that has not answered yet, of the host or of the process; else empty."""
        if self._link is None:
            return self._address
        return "" if self._link.is_up else self._link.address

    def send(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the process is lost."""
        if self._link is not None:
            self._link.send(frames)

    @property
    def has_room(self) -> bool:
        """Whether the bytes on the way to the process allow one more call."""
        return self._link is None or self._link.has_room

    async def until_room(self) -> None:
        """Wait until they do, or the process has ended."""
        if self._link is not None:
            await self._link.until_room()

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._host.drain_all()
        if self._link is not None:
            self._link.poll()

    def kill(self) -> None:
        """Have the host kill the process.

        If the host never answered, there is no process to wait for. If it does not report the end,
        the process counts as ended all the same: no owner waits for a host without end.
        """
        self._host.send(self.codec.encode(Kind.KILL, 0, self.actor_id, 0, None, "kill"))
        if self.pid == 0:
            self.end(Death(0, self._lost or "killed before its host answered"))
        elif self._death is None:
            self._stop_timer()
            self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self._end_unreported)

    def _end_unreported(self) -> None:
        why = f"; {self._lost}" if self._lost else ""
        self.end(
            Death(
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

    def take_from_host(self, kind: int, frames: Frames) -> None:
        """Take one message of the host about this process."""
        try:
            if kind == Kind.DIED:
                notice = self.codec.decode(self.codec.decoder(DeathNotice), frames)
                cause = self._lost or notice.cause
                self._on_notice(Death(notice.pid, cause, notice.last_words, notice.frozen))
            elif kind == Kind.HELLO and self._link is None:
                self._connect(self.codec.decode(self.codec.decoder(Birth), frames))
                self.on_message(frames)
        except (MalformedMessage, msgspec.ValidationError, ConnectionError) as error:
            self._kill_lost(f"its host at {self._address} sent what cannot be used: {error}")

    def end(self, death: Death) -> None:
        """Report the end to the owner, once."""
        if self._gone.done():
            return
        self._stop_timer()
        if self._link is not None:
            self._link.poll()  # its last answers
            self._link.close()
        self._forget(self.actor_id)
        self._gone.set_result(None)
        self._on_end(death)

    def _connect(self, birth: Birth) -> None:
        self.pid = birth.pid
        address = f"{self._address.rpartition(':')[0]}:{birth.port}"
        self._link = DirectLink(
            self._context,
            address,
            birth.public_key,
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
        if self._death is not None:
            self.end(self._death)
            return
        self._stop_timer()
        what = f"its connection at {self._link.address} was lost, so it was killed"
        self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self._kill_lost, what)

    def _on_notice(self, death: Death) -> None:
        """Read what the process has sent before; its end closes the link behind that."""
        self._death = death
        if self._link is not None:
            self._link.look()  # which may end it
        if self._link is None or self._link.is_lost or not self._link.is_up:
            self.end(death)
            return
        self._stop_timer()
        # a process that it forked may hold the connection open
        self._timer = self._loop.call_later(_OTHER_END_WITHIN_S, self.end, death)

    def _kill_lost(self, cause: str) -> None:
        self._lost = cause
        self.kill()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
