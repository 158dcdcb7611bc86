"""Engines that fail in the middle of an update, of a start or of a sleep: none of them is asked
with weights it has not.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from fake_llm import FakeReplica, weights

from vla_rl.engines.vllm import VllmConfig
from vla_rl.engines.vllm.pool import EngineSlot
from vla_rl.engines.vllm.publication import Publication, run_in_each
from vla_rl.engines.vllm.replica import EngineFault
from vla_rl.engines.vllm.served import EngineRequest
from vla_rl.engines.vllm.staging import MappedWeights, StagedWeights
from vla_rl.errors import ActorDied, ActorFrozen, CheckpointError
from vla_rl.types import Sampling

pytestmark = [pytest.mark.asyncio, pytest.mark.needs_vllm, pytest.mark.timeout(60)]

CONFIG = VllmConfig(max_restarts=1)
Start = Callable[[], Awaitable[FakeReplica]]


@pytest_asyncio.fixture
async def publication() -> AsyncIterator[Publication]:
    publication = Publication(CONFIG, "drain", "host")
    publication.current = publication.write_version(weights(1), 1)
    yield publication
    publication.free_memory()


@pytest_asyncio.fixture
async def start(publication: Publication) -> AsyncIterator[Start]:
    """Starts a replica with the weights of now."""
    async with AsyncExitStack() as stack:

        async def start() -> FakeReplica:
            replica = FakeReplica("engine", CONFIG)
            stack.push_async_callback(replica.close)
            await replica.build()
            assert publication.current is not None
            await replica.join(publication.current)
            return replica

        yield start


def content(staged: StagedWeights | None) -> float:
    assert staged is not None
    return float(dict(MappedWeights(staged).named_tensors())["weight"][0])


@pytest.mark.parametrize("step", ["pause", "apply_weights", "version 2", "resume"])
async def test_an_engine_that_fails_in_the_middle_of_an_update_is_killed_and_the_others_go_on(
    publication: Publication, start: Start, step: str
) -> None:
    healthy, broken = await start(), await start()
    broken.llm.fails.add(step)
    staged = publication.write_version(weights(2), 2)
    await publication.publish(staged, [healthy, broken], began=0.0)
    assert publication.current is staged
    assert (healthy.is_ready, healthy.weight_version, healthy.llm.done[-1]) == (True, 2, "resume")
    assert not broken.is_ready
    assert await asyncio.to_thread(broken.llm.process.wait) == -9


@pytest.mark.parametrize("step", ["stage_weights", "apply_weights"])
async def test_an_engine_that_dies_in_the_middle_of_an_update_holds_up_nobody(
    publication: Publication, start: Start, step: str
) -> None:
    healthy, dying = await start(), await start()
    dying.llm.dies_at.add(step)
    async with asyncio.timeout(20):  # `update_timeout_s` is six times as long
        await publication.publish(
            publication.write_version(weights(2), 2), [healthy, dying], began=0.0
        )
    assert (healthy.is_ready, healthy.weight_version) == (True, 2)
    assert (dying.is_ready, dying.cause) == (False, "its process was killed by SIGKILL")


@pytest.mark.parametrize("step", ["stage_weights", "apply_weights"])
async def test_an_engine_that_is_stopped_in_the_middle_of_an_update_is_killed_in_seconds(
    publication: Publication, start: Start, step: str
) -> None:
    healthy, frozen = await start(), await start()
    frozen.llm.stops_at.add(step)
    async with asyncio.timeout(40):  # `update_timeout_s` is three times as long
        await publication.publish(
            publication.write_version(weights(2), 2), [healthy, frozen], began=0.0
        )
    assert (healthy.is_ready, healthy.weight_version) == (True, 2)
    assert frozen.cause == f"its process {frozen.pid} was stopped by a signal such as SIGSTOP"
    assert await asyncio.to_thread(frozen.llm.process.wait) == -9


async def test_callers_of_an_engine_that_is_stopped_while_it_answers_or_is_idle_get_its_death(
    start: Start,
) -> None:
    asked, idle = await start(), await start()
    asked.llm.stops_at.add("ask")
    idle.llm.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(40):  # a request has no deadline, and no health is asked for
        with pytest.raises(ActorDied, match="was stopped by a signal such as SIGSTOP"):
            await asked.answer_request(EngineRequest([1, 2, 3]), Sampling())
        await idle.died.wait()
    with pytest.raises(ActorDied, match="was stopped by a signal such as SIGSTOP"):
        await idle.answer_request(EngineRequest([1, 2, 3]), Sampling())


async def test_an_engine_that_gives_no_token_in_time_is_killed_though_its_process_runs(
    start: Start,
) -> None:
    replica = await start()
    replica._config = VllmConfig(health_timeout_s=0.1)
    replica.llm.hangs_at.add("ask")
    with pytest.raises(ActorFrozen, match=r"gave no token for 0.1 s"):
        await replica.check_health()
    assert await asyncio.to_thread(replica.llm.process.wait) == -9


class Starting(FakeReplica):
    """Waits for its process without a deadline, as vLLM does for one that starts."""

    def _build(self) -> None:
        self.llm.start()
        self._loop.call_soon_threadsafe(self.has_started.set)
        raise RuntimeError(f"engine core initialization failed: {self.llm.process.wait()}")

    def begin(self, publication: Publication) -> "asyncio.Task[None]":
        self._loop, self.has_started = asyncio.get_running_loop(), asyncio.Event()
        return asyncio.create_task(
            EngineSlot(lambda: self, publication, CONFIG, lambda: None).start_engine()
        )


@pytest.mark.parametrize(
    ("startup_s", "cause"), [(300.0, "was stopped by a signal"), (0.2, "startup_s = 0.2")]
)
async def test_an_engine_that_is_stopped_or_too_slow_while_it_starts_is_killed(
    publication: Publication, startup_s: float, cause: str
) -> None:
    replica = Starting("engine", VllmConfig(startup_s=startup_s))
    starting = replica.begin(publication)
    await replica.has_started.wait()
    if startup_s > 1.0:
        replica.llm.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(40):
        with pytest.raises(ActorDied, match=cause):
            await starting
    assert replica.llm.process.returncode == -9


async def test_cancelling_the_start_of_an_engine_ends_its_process_instead_of_waiting_for_it(
    publication: Publication,
) -> None:
    replica = Starting("engine", CONFIG)
    starting = replica.begin(publication)
    await replica.has_started.wait()
    starting.cancel()
    async with asyncio.timeout(40):
        await asyncio.wait([starting])
    assert starting.cancelled()
    assert replica.llm.process.returncode == -9


async def test_an_update_that_is_cancelled_while_it_is_applied_leaves_no_engine_with_older_weights(
    publication: Publication, start: Start
) -> None:
    class Stuck(FakeReplica):
        async def apply_version(self, staged: StagedWeights) -> None:
            applying.set()
            await asyncio.Event().wait()

    applying, quick = asyncio.Event(), await start()
    stuck = await start()
    stuck.__class__ = Stuck
    publishing = asyncio.create_task(
        publication.publish(publication.write_version(weights(2), 2), [quick, stuck], began=0.0)
    )
    await applying.wait()
    while quick.weight_version != 2:  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait([publishing])
    assert publication.current is not None
    assert publication.current.version == 2
    assert (quick.is_ready, stuck.is_ready) == (True, False)


async def test_weights_that_an_engine_refuses_are_applied_nowhere_and_their_memory_is_used_again(
    publication: Publication, start: Start
) -> None:
    first, second = await start(), await start()
    second.llm.fails.add("stage_weights")
    for version in (2, 3):
        with pytest.raises(CheckpointError, match=r"rejects the weights: .*out of memory"):
            await publication.publish(
                publication.write_version(weights(version), version), [first, second], began=0.0
            )
        assert (
            content(publication.current),
            publication.current and publication.current.version,
        ) == (1.0, 1)
    assert (first.is_ready, second.is_ready) == (True, True)
    assert "pause" not in first.llm.done


@pytest.mark.parametrize("step", ["process_id", "stage_weights", "apply_weights", "ask"])
async def test_an_engine_that_cannot_begin_says_so_as_a_death(
    publication: Publication, step: str
) -> None:
    replica = FakeReplica("engine", CONFIG)
    replica.llm.fails.add(step)
    slot = EngineSlot(lambda: replica, publication, CONFIG, lambda: None)
    with pytest.raises(ActorDied, match="out of memory"):
        await slot.start_engine()
    assert slot.replica is None


@pytest.mark.parametrize("step", ["pause", "resume", "checksum", "sleep", "wake"])
async def test_an_engine_that_was_closed_meanwhile_is_dead_to_whoever_still_holds_it(
    publication: Publication, start: Start, step: str
) -> None:
    closed, healthy = await start(), await start()
    staged = publication.write_version(weights(2), 2)
    publishing = asyncio.create_task(publication.publish(staged, [closed, healthy], began=0.0))
    closing = asyncio.create_task(closed.close())  # runs after publish saw that it is ready
    await publishing
    await closing
    assert (healthy.is_ready, healthy.weight_version) == (True, 2)
    with pytest.raises(ActorDied, match="closed"):
        await (closed.pause("keep") if step == "pause" else getattr(closed, step)())


async def test_an_engine_that_is_given_up_is_logged_as_an_error(
    publication: Publication, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> FakeReplica:
        replica = FakeReplica("engine", CONFIG)
        replica.llm.fails.update({"ask"} if first.died.is_set() else set())
        return replica

    first = FakeReplica("engine", CONFIG)
    made = iter([first])
    slot = EngineSlot(lambda: next(made, None) or broken(), publication, CONFIG, lambda: None)
    await slot.start_engine()
    first.llm.process.kill()
    async with asyncio.timeout(20):
        await slot.keep_running()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "not started again after 2 deaths in a row" in record.getMessage()
    assert "its slot stays empty" in record.getMessage()


async def test_a_killed_engine_is_replaced_by_one_with_the_weights_of_now(
    publication: Publication,
) -> None:
    made: list[FakeReplica] = []

    def make() -> FakeReplica:
        made.append(FakeReplica("engine", CONFIG))
        return made[-1]

    slot = EngineSlot(make, publication, CONFIG, lambda: None)
    await slot.start_engine()
    assert made[0].weight_version == 1
    running = asyncio.create_task(slot.keep_running())
    made[0].llm.process.kill()
    async with asyncio.timeout(20):
        async with publication.turn:  # as the engine holds it over an update
            await publication.publish(publication.write_version(weights(2), 2), made[:1], began=0.0)
        while slot.replica in (None, made[0]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert slot.replica is made[1]
    assert (made[1].is_ready, made[1].weight_version) == (True, 2)
    assert slot.num_restarts == 1
    running.cancel()
    await asyncio.wait([running])
    await slot.stop_engine()


async def test_an_engine_that_dies_asleep_is_replaced_only_once_it_may_wake(
    publication: Publication,
) -> None:
    made: list[FakeReplica] = []

    def make() -> FakeReplica:
        made.append(FakeReplica("engine", CONFIG))
        return made[-1]

    changed = asyncio.Event()
    slot = EngineSlot(make, publication, CONFIG, changed.set)
    await slot.start_engine()
    running = asyncio.create_task(slot.keep_running())
    async with asyncio.timeout(20):
        async with publication.turn:
            publication.awake.clear()
            await made[0].sleep()
        changed.clear()
        made[0].llm.process.kill()
        await changed.wait()  # its place is empty
        await asyncio.to_thread(made[0].llm.process.wait)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(made) == 1
        publication.awake.set()
        while slot.replica is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert slot.replica.is_ready
    running.cancel()
    await asyncio.wait([running])
    await slot.stop_engine()


async def test_an_engine_whose_start_ends_while_the_others_sleep_sleeps_too(
    publication: Publication,
) -> None:
    replica = FakeReplica("engine", CONFIG)
    slot = EngineSlot(lambda: replica, publication, CONFIG, lambda: None)
    async with publication.turn:
        opening = asyncio.create_task(slot.start_engine())
        while not replica.pid:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        publication.awake.clear()
    async with asyncio.timeout(20):
        await opening
    assert (replica.is_asleep, replica.is_ready) == (True, False)
    assert "ask" not in replica.llm.done
    await slot.stop_engine()


async def test_an_engine_that_fell_asleep_while_its_health_waited_is_asked_nothing(
    publication: Publication, start: Start
) -> None:
    replica = await start()
    slot = EngineSlot(lambda: replica, publication, CONFIG, lambda: None)
    async with publication.turn:
        probing = asyncio.create_task(slot._probe(replica))
        await asyncio.sleep(0)
        await replica.sleep()
        asked = replica.llm.done.count("ask")
    await probing
    assert replica.llm.done.count("ask") == asked


async def test_a_drain_may_take_longer_than_an_update(publication: Publication) -> None:
    replica = FakeReplica("engine", VllmConfig(update_timeout_s=0.05, drain_timeout_s=20.0))
    await replica.build()
    replica.llm.drained.clear()
    asyncio.get_running_loop().call_later(0.15, replica.llm.drained.set)
    await replica.pause("drain")
    await replica.close()
    impatient = FakeReplica("engine", VllmConfig(drain_timeout_s=0.1))
    await impatient.build()
    impatient.llm.drained.clear()
    with pytest.raises(ActorFrozen, match=r"drain_timeout_s = 0.1 s; raise it, or use 'keep'"):
        await impatient.pause("drain")
    await impatient.close()


async def test_an_engine_whose_process_is_gone_is_not_killed_by_its_number(
    publication: Publication, start: Start
) -> None:
    replica = await start()
    replica.llm.process.kill()
    await asyncio.to_thread(replica.llm.process.wait)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.kill", lambda *_: pytest.fail("the number may be another process's"))
        replica.mark_dead("frozen", frozen=True)
        await replica.close()


async def test_each_engine_is_ended_that_cannot_do_what_all_do(start: Start) -> None:
    async def act(replica: FakeReplica) -> None:
        raise EngineFault("no room")

    replica = await start()
    await run_in_each([replica], act, "sleep")  # type: ignore[arg-type]
    assert replica.cause == "could not sleep: no room"
