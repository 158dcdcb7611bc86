"""Queue of requests for replies, which join the batch in order; one loop runs them all."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from vla_rl.engines.chat_interface import Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.generator import Generator
from vla_rl.engines.policy_model import LanguageModel
from vla_rl.engines.reply import Reply
from vla_rl.engines.sampling import StopWatch
from vla_rl.rollout import BatchStats
from vla_rl.types import Sampling
from vla_rl.util.tasks import is_being_cancelled, leave_group

MAX_QUEUE = 1024
"""Maximum number of requests that wait to join the batch; further callers wait before they are
queued."""


class _Waiter(msgspec.Struct, eq=False):
    reply: Reply
    answer: asyncio.Future[None]


class ReplyQueue:
    """Samples replies, any number at a time, with one model; owned by `async with`.

    Args:
        model: generates the replies.
        lane: runs the model.
        config: batching. If `is_deterministic`, replies run one at a time and nothing is kept, so
            that none depends on another.
        version: returns the version of the model's weights; called on the device lane.
    """

    def __init__(
        self,
        model: LanguageModel[Any],
        lane: DeviceLane,
        config: EngineConfig,
        version: Callable[[], int],
    ) -> None:
        self._model, self._lane, self._version = model, lane, version
        # Sums in a batch are rounded by its size, and a batch is whoever came in time.
        max_batch = 1 if config.is_deterministic else config.max_batch
        self._generator = Generator(
            model,
            max_batch,
            0 if config.is_deterministic else config.kept_conversations,
            shares=not config.is_deterministic,
        )
        self._queue: deque[_Waiter] = deque()
        self._running: dict[int, _Waiter] = {}
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._has_requests = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._opened_at = self._busy_s = 0.0
        self._num_requests = 0
        self._batch_sizes: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._runner = self._tasks.create_task(self._run(), name="replies of the policy")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop generating; callers that still wait get a RuntimeError."""
        assert self._tasks is not None
        assert self._runner is not None
        self._runner.cancel()
        try:
            await leave_group(self._tasks, kind, error, traceback)
        finally:
            self._runner = None
            self._fail([*self._running.values(), *self._queue], _closed())

    async def sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        """Sample one reply of at most `max_tokens`; a cancellation aborts it.

        Raises: RuntimeError if it is not open; what the reply's grammar or the model raises.
        """
        reply = self._reply(asked, sampling, max_tokens)
        await self._room.acquire()
        if self._runner is None or self._runner.done():
            self._room.release()
            raise _closed()
        waiter = _Waiter(reply, self._loop.create_future())
        self._queue.append(waiter)
        self._has_requests.set()
        try:
            await waiter.answer
        finally:
            # The generator owns the reply while it runs, on another thread: it is told, and lets go
            # before the next token.
            reply.is_cancelled = not waiter.answer.done() or waiter.answer.cancelled()
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._room.release()
        return _sampled(reply)

    def batch_stats(self) -> BatchStats:
        """Return the numbers of replies computed together, and the share of busy time."""
        elapsed = self._loop.time() - self._opened_at if self._tasks is not None else 0.0
        return BatchStats(
            num_batches=sum(self._batch_sizes.values()),
            num_requests=self._num_requests,
            busy_share=self._busy_s / elapsed if elapsed > 0 else 0.0,
            num_queued=len(self._queue),
            batch_sizes=dict(sorted(self._batch_sizes.items())),
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of prompt tokens that were not computed again, since the start."""
        return {"engine/prompt_share_reused": self._generator.reused_share}

    def _reply(self, asked: Question, sampling: Sampling, max_tokens: int) -> Reply:
        vocabulary, options = self._model.vocabulary, asked.options
        return Reply(
            asked.tokens,
            sampling,
            max_tokens,
            guide=None if asked.grammar is None else vocabulary.guide(asked.grammar),
            stop_watch=StopWatch(vocabulary, options.stop) if options.stop else None,
            num_alternatives=options.top_log_probs or 0,
            image_prompt=asked.image_prompt,
        )

    # who waits                 for              woken by
    # `sample`, before a place  `_room`          a request that joins the batch, or is cancelled before
    # `sample`, in the queue    its `answer`     the end of its reply; a failed pass; the queue's end
    # `_run`                    `_arrived`       the next request, while no reply runs
    # `_advance`                the lane         a reply that has ended, at the latest after `BURST` tokens

    async def _run(self) -> None:
        while True:
            await self._has_requests.wait()
            self._has_requests.clear()
            while self._queue or self._running:
                await self._advance(self._joining())

    def _joining(self) -> list[Reply]:
        """Return the replies that join the batch now, in order of arrival."""
        joining: list[Reply] = []
        while self._queue and len(joining) < self._generator.num_free:
            waiter = self._queue.popleft()
            self._room.release()
            if not waiter.answer.done():
                self._running[id(waiter.reply)] = waiter
                self._num_requests += 1
                joining.append(waiter.reply)
        return joining

    async def _advance(self, joining: list[Reply]) -> None:
        started = self._loop.time()
        size = self._generator.num_running + len(joining)
        self._batch_sizes[size] = self._batch_sizes.get(size, 0) + 1
        try:
            finished = await self._lane.run(self._step, joining, work="generate")
        except asyncio.CancelledError as error:
            # A cancellation has two meanings here: this task is to end, or the lane was closed
            # under it and dropped the work.
            if is_being_cancelled():
                raise
            lost = RuntimeError(
                "replies were lost: the device lane cancelled its work; was it closed before the "
                "engine?"
            )
            lost.__cause__ = error
            await self._fail_running(lost)
            return
        except Exception as error:
            await self._fail_running(error)
            return
        finally:
            self._busy_s += self._loop.time() - started
        for reply in finished:
            waiter = self._running.pop(id(reply))
            if waiter.answer.done():
                continue
            if reply.failure is not None:
                waiter.answer.set_exception(reply.failure)
            else:
                waiter.answer.set_result(None)
        for key, waiter in list(self._running.items()):
            if waiter.reply.is_cancelled:
                del self._running[key]

    async def _fail_running(self, error: Exception) -> None:
        """Fail all running replies with `error`, and discard the generator's state."""
        # What a failed pass has left in the memory of keys and values is unknown.
        self._fail(list(self._running.values()), error)
        self._running.clear()
        await self._lane.run(self._generator.discard_replies, work="generate")

    def _step(self, joining: list[Reply]) -> list[Reply]:
        return self._generator.advance(joining, self._version())

    def _fail(self, waiters: list[_Waiter], error: Exception) -> None:
        for waiter in waiters:
            if not waiter.answer.done():
                waiter.answer.set_exception(error)


def _sampled(reply: Reply) -> Sampled:
    assert reply.finish_reason is not None
    return Sampled(
        tokens=reply.tokens,
        log_probs=np.array(reply.log_probs, np.float32),
        versions=np.array(reply.versions, np.int64),
        finish_reason=reply.finish_reason,
        stopped_by=reply.stopped_by,
        alternatives=reply.alternatives,
    )


def _closed() -> RuntimeError:
    return RuntimeError("the engine is not open; generate inside its `async with` block")
