"""Engines as episodes see them: one protocol for action chunks, one for replies.

    ActionEngine    act        observation ─► ActionChunk
    ChatEngine      generate   conversation ─► Completion

`vla_rl.engines` implements both, with torch in this process and with processes of vLLM. An engine
of your own is any object with the members of one of them.

`DynamicBatcher` stands between many coroutines that each have one request and one function that
answers whole batches. By default it waits for no further request: as soon as the runner is free it
takes those that are there. What always holds:

    - requests are taken in the order in which they came, at most `max_batch` at a time, one batch
      at a time;
    - a waiter that was cancelled before its batch began is not in it;
    - an exception of `run_batch` reaches all waiters of that batch and no others; a cancellation of
      what it awaits reaches them as a RuntimeError.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, cast, runtime_checkable

import msgspec

from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    Completion,
    Observation,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolSpec,
)
from vla_rl.util.tasks import is_being_cancelled, leave_group


class ActionEngine(Protocol):
    """Answers the observations of any number of episodes, and batches the requests that wait.

    If it has an attribute `token_ids`, a range, the tokens that agents hand over have to be in it;
    the same holds for a `ChatEngine`.
    """

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that act from now on."""
        ...

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Choose an action chunk.

        The same observation, sampling (seed included) and weights give the same chunk.
        """
        ...


@runtime_checkable
class LaggingEngine(Protocol):
    """An engine that may have older weights than the learner has published, for a while."""

    def apply_in_background(self) -> None:
        """Let the learner go on before the engine has its new weights."""
        ...

    @property
    def pending_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        ...

    def on_weights_applied(self, call: Callable[[], None]) -> None:
        """Call `call` in this loop each time that `weight_version` has changed."""
        ...

    async def wait_applied(self) -> None:
        """Wait until nothing is on its way."""
        ...


class ChatEngine(Protocol):
    """Answers the conversations of any number of episodes, and batches the requests that wait."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that reply from now on."""
        ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply.

        The same prompt, sampling (seed included), options and weights give the same one.
        """
        ...


def require_action_engine(engine: ActionEngine | ChatEngine) -> ActionEngine:
    """Return the engine. Raises: TypeError if it generates text."""
    # an attribute, not isinstance: a check of a protocol costs several µs at every decision
    if not hasattr(engine, "act"):
        raise TypeError(
            "this engine's policy generates text and has no `act`; use `generate`, as chat_agent "
            "does"
        )
    return cast(ActionEngine, engine)


def require_chat_engine(engine: ActionEngine | ChatEngine) -> ChatEngine:
    """Return the engine. Raises: TypeError if it chooses action chunks."""
    if not hasattr(engine, "generate"):
        raise TypeError(
            "this engine's policy chooses action chunks and does not generate text; use `act`"
        )
    return cast(ChatEngine, engine)


Request = TypeVar("Request")
Response = TypeVar("Response")


class BatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an engine's work since it was opened.

    Example:
        Seven requests in three batches, of which one row was alone:

        BatchStats(num_batches=3, num_requests=7, busy_share=0.62, num_queued=2, batch_sizes={1: 1, 3: 2})
    """

    num_batches: int
    """Batches of decisions, or, of a language policy, stretches of a few tokens of the replies that
    run together."""

    num_requests: int
    """Requests that were put into a batch."""

    busy_share: float
    """Share of the time, in [0, 1], in which a batch was running."""

    num_queued: int
    """Requests that are waiting for a batch now."""

    batch_sizes: dict[int, int]
    """Number of batches by the number of requests in them; a reply is in several batches, one after
    the other."""


class _Waiter(Generic[Request, Response]):
    __slots__ = ("answer", "received_at", "request")

    def __init__(
        self, request: Request, answer: asyncio.Future[Response], received_at: float
    ) -> None:
        self.request, self.answer, self.received_at = request, answer, received_at


class DynamicBatcher(Generic[Request, Response]):
    """Answers single requests by running batches of those that wait; owned by `async with`.

    Args:
        run_batch: answers a list of requests with as many responses, in the same order. Never run
            twice at once.
        max_batch: most requests in a batch.
        max_wait_s: how long a free runner waits for a fuller batch, counted from the arrival of the
            oldest request. With 0 it starts as soon as it is free, which costs nothing if there are
            two episodes per row of a batch.
        max_queue: most requests that wait for a batch; further callers wait for room before they
            queue, in order.
        deterministic: batches of exactly one, so that no answer depends on the other requests that
            happened to wait.
        name: name of the runner's task.
    """

    def __init__(
        self,
        run_batch: Callable[[list[Request]], Awaitable[list[Response]]],
        *,
        max_batch: int,
        max_wait_s: float = 0.0,
        max_queue: int = 1024,
        deterministic: bool = False,
        name: str = "policy",
    ) -> None:
        if max_batch < 1 or max_queue < 1 or max_wait_s < 0:
            raise ValueError(
                f"max_batch is {max_batch}, max_queue {max_queue}, max_wait_s {max_wait_s}; "
                "expected >= 1, >= 1 and >= 0"
            )
        self._run_batch, self._name = run_batch, name
        self._max_batch = 1 if deterministic else max_batch
        self._max_wait_s = 0.0 if deterministic else max_wait_s
        self._queue: dict[int, _Waiter[Request, Response]] = {}
        self._tickets = itertools.count()
        self._room = asyncio.Semaphore(max_queue)
        self._has_requests = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._opened_at = self._busy_s = 0.0
        self._running_since: float | None = None
        self._batch_sizes: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError(
                f"batcher {self._name!r} is already open; make a new one for another use"
            )
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._runner = self._tasks.create_task(self._run(), name=f"batches of {self._name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop running batches; requests that still wait get a `RuntimeError`."""
        assert self._tasks is not None
        assert self._runner is not None
        self._runner.cancel()
        try:
            await leave_group(self._tasks, kind, error, traceback)
        finally:
            self._runner = None
            _fail_waiters(self._queue.values(), self._closed())

    async def submit(self, request: Request) -> Response:
        """Return the response to `request` once a batch has answered it.

        Waits while the queue is full.

        Raises: whatever `run_batch` raised for the batch this request was in; RuntimeError if the
        batcher is not open.
        """
        # Waiting for room comes before the queue: so a caller that is cancelled here leaves nothing
        # behind.
        await self._room.acquire()
        if self._runner is None or self._runner.done():
            self._room.release()
            raise self._closed()
        ticket = next(self._tickets)
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._queue[ticket] = _Waiter(request, answer, self._loop.time())
        self._has_requests.set()
        try:
            return await answer
        finally:
            # cancelled, or closed, before its batch began
            if self._queue.pop(ticket, None) is not None:
                self._room.release()

    def batch_stats(self) -> BatchStats:
        """Return the counts since the batcher was opened; may be called from any thread."""
        batch_sizes = dict(self._batch_sizes)  # at once: the loop may count on meanwhile
        now = self._loop.time() if self._tasks is not None else 0.0
        busy_s = self._busy_s + (
            now - self._running_since if self._running_since is not None else 0.0
        )
        return BatchStats(
            num_batches=sum(batch_sizes.values()),
            num_requests=sum(size * count for size, count in batch_sizes.items()),
            busy_share=busy_s / (now - self._opened_at) if now > self._opened_at else 0.0,
            num_queued=len(self._queue),
            batch_sizes=dict(sorted(batch_sizes.items())),
        )

    def _closed(self) -> RuntimeError:
        return RuntimeError(
            f"batcher {self._name!r} is not open; submit inside its `async with` block"
        )

    # who waits                   for                    woken by
    # `submit`, before the queue  `_room`                a batch that takes requests, a request that is cancelled
    # `submit`, in the queue      its `answer`           the end of its batch; the batcher's end
    # `_run`                      `_has_requests`        the next request
    # `_wait_for_a_fuller_batch`  `_has_requests`, a time the next request; `max_wait_s` after the oldest one

    async def _run(self) -> None:
        while True:
            await self._has_requests.wait()
            # by default a free runner starts at once: with two episodes for each row, waiting up to
            # 20 ms changed nothing, and waiting for a full batch cost 10 % of the episodes
            if self._max_wait_s > 0:
                await self._wait_for_a_fuller_batch()
            batch = self._take()
            if batch:
                await self._answer(batch)

    async def _wait_for_a_fuller_batch(self) -> None:
        oldest = next(iter(self._queue.values()), None)
        if oldest is None:
            return
        try:
            async with asyncio.timeout_at(oldest.received_at + self._max_wait_s):
                while len(self._queue) < self._max_batch:
                    self._has_requests.clear()
                    await self._has_requests.wait()
        except TimeoutError:
            return

    def _take(self) -> list[_Waiter[Request, Response]]:
        """Take the next batch from the queue, without requests that were cancelled."""
        batch: list[_Waiter[Request, Response]] = []
        while self._queue and len(batch) < self._max_batch:
            waiter = self._queue.pop(next(iter(self._queue)))
            self._room.release()
            if not waiter.answer.done():
                batch.append(waiter)
        if not self._queue:
            self._has_requests.clear()
        return batch

    async def _answer(self, batch: list[_Waiter[Request, Response]]) -> None:
        self._batch_sizes[len(batch)] = self._batch_sizes.get(len(batch), 0) + 1
        self._running_since = self._loop.time()
        try:
            responses = await self._run_batch([waiter.request for waiter in batch])
            if len(responses) != len(batch):
                raise ValueError(
                    f"run_batch returned {len(responses)} responses to {len(batch)} requests, "
                    "expected one each"
                )
        except asyncio.CancelledError as error:
            # Only the runner's own cancellation ends it; one that came from what it awaited is a
            # fault of that batch.
            if is_being_cancelled():
                raise
            lost = RuntimeError(
                f"a batch of {self._name!r} was lost: its runner was cancelled; close the batcher "
                "before what it runs on"
            )
            lost.__cause__ = error
            _fail_waiters(batch, lost)
        except Exception as error:
            _fail_waiters(batch, error)
        else:
            for waiter, response in zip(batch, responses, strict=True):
                if not waiter.answer.done():
                    waiter.answer.set_result(response)
        finally:
            self._busy_s += self._loop.time() - self._running_since
            self._running_since = None
            _fail_waiters(batch, self._closed())


def _fail_waiters(waiters: Iterable[_Waiter[Request, Response]], error: Exception) -> None:
    for waiter in waiters:
        if not waiter.answer.done():
            waiter.answer.set_exception(error)
