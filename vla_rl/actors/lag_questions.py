"""Questions for the lag of an actor's loop, which it answers beside its own calls."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from vla_rl.actors.actor import ActorMethod
from vla_rl.actors.channel import Channel
from vla_rl.actors.life import Life, State
from vla_rl.actors.pending import PendingCall
from vla_rl.actors.wire import Kind
from vla_rl.util.stalls import LagReport

_WITHIN_S = 10.0

_LOOP_LAG: Final = ActorMethod(
    index=0,
    name="loop_lag",
    label="loop_lag",
    signature=inspect.Signature(),
    args_type=Any,
    result_type=LagReport,
    is_stream=False,
    concurrent=True,
    deadline_s=None,
    keyword_only=(),
    num_plain_args=0,
)


class LagQuestions:
    """Asks one actor for the timer delays of its loop.

    Args:
        name: the actor's name.
        life: the actor's state; questions wait for a running incarnation.
        channel: returns the channel to the current incarnation, if there is one.
        ids: numbers of calls, shared with the actor's other calls.

    Attributes:
        unanswered: questions by number.
    """

    def __init__(
        self, name: str, life: Life, channel: Callable[[], Channel | None], ids: Iterator[int]
    ) -> None:
        self._name, self._life, self._channel, self._ids = name, life, channel, ids
        self.unanswered: dict[int, PendingCall] = {}

    async def ask(self) -> LagReport:
        """Return the timer delays of the actor's loop.

        Raises: TimeoutError if the actor does not report them; ActorDied.
        """
        try:
            # no deadline of a call: a blocked loop is what one asks about, and must not be killed
            async with asyncio.timeout(_WITHIN_S):
                await self._life.until_running()
                report: LagReport = await self._send()
        except TimeoutError:
            channel = self._channel()
            why = (
                "it is restarting"
                if self._life.state is State.RESTARTING
                else "its loop is blocked, or its process is stopped"
            )
            raise TimeoutError(
                f"actor {self._name!r} (pid {0 if channel is None else channel.pid}) did not "
                f"report its lag within {_WITHIN_S:g} s: {why}."
            ) from None
        return report

    def fail(self) -> None:
        """Fail all questions, as the incarnation has ended."""
        questions = [*self.unanswered.values()]
        self.unanswered.clear()
        for question in questions:
            question.fail(self._life.death())

    def _send(self) -> asyncio.Future[Any]:
        channel = self._channel()
        assert channel is not None
        decoder = channel.codec.decoder(LagReport)
        pending = PendingCall(
            asyncio.get_running_loop(), _LOOP_LAG, decoder, asyncio.current_task()
        )
        call = next(self._ids)
        self.unanswered[call] = pending
        channel.send(channel.codec.encode(Kind.LAG, 0, channel.actor_id, call, None, self._name))
        return pending.future
