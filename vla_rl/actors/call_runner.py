"""Runs the calls of one actor to their answers: a result, the items of a stream, or an error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from vla_rl.actors.actor import Actor, MethodTable
from vla_rl.actors.arrived import ArrivedCall
from vla_rl.actors.begun import BegunCall
from vla_rl.actors.codec import Codec
from vla_rl.actors.in_flight import MeteredSocket, array_bytes
from vla_rl.actors.wire import Frames, Kind, MalformedMessage
from vla_rl.util.error_reports import make_report

_RESULT = int(Kind.RESULT)


class CallRunner:
    """Calls the methods of one actor, and sends what comes of it.

    Args:
        actor, table: the instance and its methods.
        send: queues frames for the caller.
        outgoing: bounds the bytes on the way to the caller; see `ActorServer`.
        calls: calls that have no answer yet, by number; one leaves it here.
        reject: counts arguments that cannot be read.

    Attributes:
        functions: the actor's methods, by index.
        decoders: decoders of their arguments, by index.
    """

    def __init__(
        self,
        actor: Actor,
        table: MethodTable,
        codec: Codec,
        actor_id: int,
        send: Callable[[Frames], Any],
        outgoing: MeteredSocket | None,
        calls: dict[int, ArrivedCall],
        reject: Callable[[MalformedMessage], None],
    ) -> None:
        self._codec, self._actor_id, self._send = codec, actor_id, send
        self._outgoing, self._calls, self._reject = outgoing, calls, reject
        self._actor_label = type(actor).__name__
        self.functions = [getattr(actor, entry.name) for entry in table.methods]
        self.decoders = [codec.decoder(entry.args_type) for entry in table.methods]

    def answer(self, kind: Kind, call: int, value: Any) -> None:
        """Send an answer that is not a method's result."""
        self._send(self._codec.encode(kind, 0, self._actor_id, call, value, self._actor_label))

    async def run(self, work: ArrivedCall, begun: BegunCall | None = None) -> None:
        """Run one call to its answer, or continue one that was begun.

        Raises a cancellation only if the actor itself is being stopped.
        """
        method, call = work.method, work.call
        try:
            if begun is not None:
                self._send_result(work, await begun)
                return
            if work.cancelled:
                self._codec.discard(work.frames)
                self.answer(Kind.CANCELLED, call, None)
                return
            if self._outgoing is not None:
                await self._outgoing.until_room()
            args = self._codec.decode(self.decoders[method.index], work.frames)
            work.frames = ()
            function = self.functions[method.index]
            if method.is_stream:
                await self._stream(work, method.apply(function, args))
                self.answer(Kind.END, call, None)
            else:
                result = await (
                    function(*args) if method.num_plain_args >= 0 else method.apply(function, args)
                )
                self._send_result(work, result)
        except asyncio.CancelledError as error:
            if work.cancelled:
                self.answer(Kind.CANCELLED, call, None)
            elif (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            else:  # the application's own, e.g. it awaited a cancelled future
                self.answer(Kind.ERROR, call, make_report(error))
        except msgspec.ValidationError as error:
            problem = TypeError(f"{method.label} got wrong argument types: {error}")
            self.answer(Kind.ERROR, call, make_report(problem))
        except MalformedMessage as error:
            self._reject(error)
            self.answer(Kind.ERROR, call, make_report(error))
        except Exception as error:  # each exception of the actor is sent to the caller
            self.answer(Kind.ERROR, call, make_report(error))
        finally:
            del self._calls[call]

    def _send_result(self, work: ArrivedCall, result: Any) -> None:
        label = work.method.label
        self._send(self._codec.encode(_RESULT, 0, self._actor_id, work.call, result, label))

    async def _stream(self, work: ArrivedCall, items: AsyncIterator[Any]) -> None:
        """Send items as long as the caller grants credit.

        Close the generator however the stream ends.
        """
        try:
            async for item in items:
                if not work.has_credit:
                    await work.until_credit()
                if self._outgoing is not None:
                    await self._outgoing.until_room()
                frames = self._codec.encode(
                    Kind.ITEM, 0, self._actor_id, work.call, item, work.method.label
                )
                work.note_item(array_bytes(frames))
                self._send(frames)
        finally:
            await items.aclose()  # type: ignore[attr-defined]
