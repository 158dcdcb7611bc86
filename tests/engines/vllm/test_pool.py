"""Routing: which engine answers a request, and what happens to it if that engine dies."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_rl.engines.vllm.pool import ReplicaPool
from vla_rl.engines.vllm.served import NO_RULES, Answer, EngineLayout, EngineRequest
from vla_rl.errors import ActorDied
from vla_rl.types import Sampling

pytestmark = [pytest.mark.asyncio, pytest.mark.needs_vllm, pytest.mark.timeout(60)]

CHUNKS = EngineLayout(config={}, runner="pooling", context_size=9, num_tokens=2)
REPLIES = EngineLayout(
    config={}, runner="generate", context_size=9, num_tokens=None, reuses_prefixes=True
)


def answered(*versions: int, finish_reason: str = "stop") -> Answer:
    size = len(versions)
    return Answer(
        np.zeros(size, np.int64), np.zeros(size, np.float32), np.array(versions), finish_reason
    )


class Replica:
    """Answers with what it was given, in this order; an error is raised."""

    def __init__(self, *outcomes: Answer | Exception) -> None:
        self.outcomes, self.num_asked, self.num_running, self.is_ready = [*outcomes], 0, 0, True

    async def answer_request(self, *_: object) -> Answer:
        self.num_asked += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            self.is_ready = False
            raise outcome
        return outcome


def router(*replicas: Replica, layout: EngineLayout = CHUNKS, attempts: int = 3) -> ReplicaPool:
    slots: Any = [SimpleNamespace(replica=replica, failure=None) for replica in replicas]
    made = ReplicaPool(slots, layout, attempts)
    made.is_open = True
    return made


async def ask(asked: ReplicaPool) -> Answer:
    return await asked.answer_request(EngineRequest([1]), Sampling(), 2, NO_RULES)


def dead() -> ActorDied:
    return ActorDied("vllm-0", 1, "its process is gone")


async def test_a_request_goes_to_the_least_loaded_engine() -> None:
    busy, free, resting = Replica(), Replica(answered(4, 4)), Replica()
    busy.num_running, free.num_running, resting.is_ready = 3, 2, False
    await ask(router(busy, free, resting))
    assert (busy.num_asked, free.num_asked, resting.num_asked) == (0, 1, 0)


async def test_the_request_of_an_engine_that_dies_is_answered_by_another_one() -> None:
    dying, living = Replica(dead()), Replica(answered(4, 4))
    living.num_running = 1
    assert (await ask(router(dying, living))).versions.tolist() == [4, 4]
    assert (dying.num_asked, living.num_asked) == (1, 1)


async def test_a_request_that_kills_engine_after_engine_fails_at_the_last_attempt() -> None:
    replicas = [Replica(dead()), Replica(dead()), Replica(answered(0))]
    with pytest.raises(ActorDied, match="its process is gone"):
        await ask(router(*replicas, attempts=2))
    assert [replica.num_asked for replica in replicas] == [1, 1, 0]


@pytest.mark.parametrize("first", [answered(1, 2), answered(finish_reason="abort")])
async def test_a_chunk_of_two_versions_or_an_aborted_one_is_asked_again(first: Answer) -> None:
    replica = Replica(first, answered(2, 2))
    assert (await ask(router(replica))).versions.tolist() == [2, 2]


async def test_a_reply_may_have_tokens_of_two_versions() -> None:
    asked = router(Replica(answered(1, 2)), layout=REPLIES)
    assert (await ask(asked)).versions.tolist() == [1, 2]


async def test_turns_of_a_conversation_stay_with_the_engine_that_has_read_it() -> None:
    first, other = Replica(answered(0), answered(0)), Replica(answered(0))
    asked = router(first, other, layout=REPLIES)
    await ask(asked)
    first.num_running = 5
    await ask(asked)
    assert (first.num_asked, other.num_asked) == (2, 0)
    await asyncio.create_task(ask(asked))  # another conversation
    assert other.num_asked == 1


async def test_a_caller_without_an_engine_waits_for_one_and_is_told_if_none_will_come() -> None:
    replica = Replica(answered(7))
    replica.is_ready = False
    asked = router(replica)
    waiting = asyncio.create_task(ask(asked))
    await asyncio.sleep(0)
    replica.is_ready = True
    asked.wake_callers()
    assert (await waiting).versions.tolist() == [7]
    replica.is_ready = False
    slots: Any = asked._slots
    slots[0].failure = ActorDied("vllm-0", 1, "not started again")
    with pytest.raises(ActorDied, match="not started again"):
        await ask(asked)
    asked.is_open = False
    with pytest.raises(RuntimeError, match="the engine is not open"):
        await ask(asked)
    assert asked.stats(now=1.0, opened_at=0.0).num_queued == 0
