"""Run one actor as its owner wants: launch, notice its end, restart within its policy, stop.

Invariant: while the runtime is open a supervisor has at most one incarnation, and none is left when
`run` has ended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from vla_rl.actors.channel import Channel, Death, OnEnd, OnMessage
from vla_rl.actors.client import ActorClient
from vla_rl.actors.life import State
from vla_rl.actors.placement import Intensity, RestartPolicy
from vla_rl.actors.wire import Frames, Kind, SpawnRequest, unpack_envelope
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.error_reports import ErrorReport, restore_error

logger = logging.getLogger(__name__)

GONE_WITHIN_S: Final = 30.0
"""Longest wait for the end of an actor that was killed. The kernel takes milliseconds."""

Launcher = Callable[[OnMessage, OnEnd], Channel]


class Supervisor:
    """Owns the incarnations of one actor.

    Args:
        prepare: awaited before each launch, and not counted as part of the start.
        launch: begins an incarnation; its messages and its end arrive through the two callbacks.
        request, args: what to build, sent to the incarnation after its hello.
        restart: None leaves a dead actor dead.
        start_timeout_s: longest time from launch to ready (s).
    """

    def __init__(
        self,
        client: ActorClient,
        prepare: Callable[[], Awaitable[None]],
        launch: Launcher,
        request: SpawnRequest,
        args: tuple[Any, ...],
        restart: RestartPolicy | None,
        start_timeout_s: float,
    ) -> None:
        self.client, self.num_restarts = client, 0
        self._prepare, self._launch_channel, self._request, self._args = (
            prepare,
            launch,
            request,
            args,
        )
        self._intensity = Intensity(restart) if restart is not None else None
        self._start_timeout_s = start_timeout_s
        self._channel: Channel | None = None
        self._incarnation = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._stopping = False
        self._last_words: tuple[str, ...] = ()
        self._restarting: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is no incarnation and none will come."""
        return self._channel is None and self.client.state in (State.DEAD, State.STOPPED)

    @property
    def is_stopping(self) -> bool:
        """Whether the owner has asked to stop the actor."""
        return self._stopping

    async def start(self) -> None:
        """Launch and wait until the actor is ready.

        Raises: what `prepare`, its constructor or `on_start` raises; ActorDied, also if it is
            stopped meanwhile; TimeoutError.
        """
        await self._prepare()
        if self._stopping:
            raise ActorDied(self.client.name, 0, "stopped by its owner before it was started")
        limit = asyncio.timeout(self._start_timeout_s)
        self._ready = asyncio.get_running_loop().create_future()
        self._ended.clear()
        number = self._incarnation = self._incarnation + 1
        channel = self._channel = self._launch_channel(
            self._on_first_words, lambda death: self._on_end(number, death)
        )
        try:
            async with limit:
                await self._ready
        except BaseException as error:
            unanswered = channel.unanswered
            # gone before this raises: the caller may start the next incarnation at once
            await self._kill(channel)
            if isinstance(error, TimeoutError) and limit.expired():  # else the actor raised it
                raise TimeoutError(self._describe_slow_start(unanswered)) from None
            raise

    def _describe_slow_start(self, unanswered: str) -> str:
        if unanswered:
            return (
                f"actor {self.client.name!r} was not ready within {self._start_timeout_s} s: no "
                f"answer from {unanswered}; expected `python -m vla_rl.actors.host` to serve "
                "there, at an address that this host can reach."
            )
        words = "".join(f"\n    {line}" for line in self._last_words)
        return (
            f"actor {self.client.name!r} was not ready within {self._start_timeout_s} s and was "
            "killed; raise start_timeout_s if its constructor "
            "needs longer" + (f"; its last words:{words}" if words else ".")
        )

    async def run(self) -> None:
        """Restart the actor whenever it ends, until it is stopped.

        Raises: ActorDied past the policy's limit.
        """
        while True:
            await self._ended.wait()
            if self._stopping or self._intensity is None:
                return
            if not await self._replace(self._intensity):
                return

    async def _replace(self, intensity: Intensity) -> bool:
        """Start the next incarnation.

        Return True once it is ready, False if the actor was stopped meanwhile.
        """
        cause: BaseException | None = None
        # a restart that fails counts like a death: a machine without memory must not be tried for ever
        while not self.is_stopping and intensity.admit(time.monotonic()):
            self.num_restarts += 1
            logger.warning("actor %s: restart %d.", self.client.name, self.num_restarts)
            self._restarting = asyncio.create_task(self.start(), name=f"restart {self.client.name}")
            try:
                await self._restarting
            except asyncio.CancelledError:
                if not self._stopping:
                    self._restarting.cancel()
                    raise
                return False
            except Exception as error:  # the policy decides whether to try again
                cause = error
                logger.warning("actor %s could not be restarted: %s", self.client.name, error)
            else:
                return True
            finally:
                self._restarting = None
        if self.is_stopping:
            return False
        limit = self.client.life.last_error(
            "it died more often than its restart policy allows", cause
        )
        self.client.give_up(State.DEAD, limit)
        raise limit from cause

    async def stop(self, grace_s: float) -> None:
        """Let the actor finish its calls and end, for at most `grace_s`; then kill it.

        A repeated call waits for the same end.

        An actor that is not ready yet has no calls and is killed at once: its `start` raises.
        """
        if not self._stopping:
            self._stopping = True
            if self._restarting is not None:
                self._restarting.cancel()
            self.client.ask_to_stop()
        channel = self._channel
        if channel is not None:
            if not self._ready.done():
                channel.kill()
            try:
                async with asyncio.timeout(grace_s):
                    await channel.until_gone()
            except TimeoutError:
                logger.warning(
                    "actor %s did not stop within %g s; it is killed.", self.client.name, grace_s
                )
                await self._kill(channel)
        self._ended.set()

    async def kill(self) -> None:
        """End the actor at once and for good."""
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self._channel is not None:
            await self._kill(self._channel)
        self.client.give_up(
            State.STOPPED, ActorDied(self.client.name, self.client.pid, "killed by its owner")
        )
        self._ended.set()

    async def _kill(self, channel: Channel) -> None:
        """End an incarnation; give up the wait for its end after some time, with one line."""
        number, pid = self._incarnation, channel.pid
        channel.kill()
        try:
            async with asyncio.timeout(GONE_WITHIN_S):
                await channel.until_gone()
        except TimeoutError:
            if channel is not self._channel:
                return
            cause = f"it was killed and has not ended within {GONE_WITHIN_S:g} s"
            logger.error(
                "actor %s (pid %d): %s, so nothing waits for it any longer. A process that waits for "
                "a device cannot be killed; a task may refuse its cancellation.",
                self.client.name,
                pid,
                cause,
            )
            self._on_end(number, Death(pid, cause))
            self._incarnation += 1

    def _on_first_words(self, frames: Frames) -> None:
        """Handle messages of an incarnation that is not ready yet."""
        channel = self._channel
        if channel is None or self._ready.done():
            return
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
            if kind == Kind.HELLO:
                self._send_request(channel)
            elif kind == Kind.READY:
                channel.on_message = self.client.on_message
                self.client.connect(channel)
                self._ready.set_result(None)
            elif kind == Kind.ERROR:
                report = channel.codec.decode(channel.codec.decoder(ErrorReport), frames)
                self._ready.set_exception(restore_error(report, self.client.name, channel.pid))
        except Exception as error:  # whatever the message does, `start` raises
            self._ready.set_exception(
                ActorDied(
                    self.client.name, channel.pid, f"its first message cannot be read: {error}"
                )
            )

    def _send_request(self, channel: Channel) -> None:
        codec, label = channel.codec, self.client.table.constructor.label
        try:
            request = codec.encode(Kind.SPAWN, 0, channel.actor_id, 0, self._request, label)
            args = codec.encode(Kind.SPAWN, 0, channel.actor_id, 0, self._args, label)
        except TypeError as error:
            self._ready.set_exception(error)
            return
        channel.send(request)
        channel.send(args)

    def _on_end(self, number: int, death: Death) -> None:
        if number != self._incarnation:
            return  # nothing waits for it any longer
        self._channel, self._last_words = None, death.last_words
        if not self._ready.done():
            cause = "stopped by its owner before it was ready" if self._stopping else death.cause
            kind = ActorFrozen if death.frozen and not self._stopping else ActorDied
            self._ready.set_exception(kind(self.client.name, death.pid, cause, death.last_words))
            return
        if self._stopping:
            self.client.disconnect(Death(death.pid, "stopped by its owner"), State.STOPPED)
        elif self._ready.cancelled() or self._ready.exception() is not None:
            return  # `start` raises
        else:
            self.client.disconnect(
                death, State.DEAD if self._intensity is None else State.RESTARTING
            )
        self._ended.set()
