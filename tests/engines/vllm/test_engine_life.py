"""An engine dies once, with one cause, whatever its callers were waiting for."""

import asyncio
import subprocess
import sys

import pytest

from vla_rl.engines.vllm.process import EngineLifecycle
from vla_rl.errors import ActorDied, ActorFrozen

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


def start_sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])


async def test_the_end_of_its_process_ends_what_waits_for_it() -> None:
    life = EngineLifecycle("engine")
    life.start()
    process = await life.run(start_sleeper)
    life.note_pid(process.pid)
    process.kill()
    with pytest.raises(TimeoutError):
        async with life.limit(None):  # no deadline of its own
            await asyncio.Event().wait()
    assert life.died.is_set()
    assert str(life.death()) == str(
        ActorDied("engine", process.pid, "its process was killed by SIGKILL")
    )
    process.wait()
    await life.close()


async def test_a_missed_deadline_kills_an_engine_that_lives_and_only_reports_one_that_has_died() -> (
    None
):
    life = EngineLifecycle("engine")
    process = await life.run(start_sleeper)
    life.note_pid(process.pid)
    frozen = life.note_overdue("gave no token")
    assert isinstance(frozen, ActorFrozen)
    assert await asyncio.to_thread(process.wait) == -9
    later = life.note_overdue("did not answer")
    assert (type(later), later.cause, life.cause) == (ActorDied, "gave no token", "gave no token")
    await life.close()


async def test_the_first_cause_of_death_stays() -> None:
    life = EngineLifecycle("engine")
    assert (life.pid, life.died.is_set(), life.cause) == (0, False, "not started")
    assert life.note_death("could not start").cause == "could not start"
    life.note_death("closed")
    assert life.death().cause == "could not start"
    await life.close()


async def test_closing_kills_a_process_that_has_not_reported_its_id_yet() -> None:
    life = EngineLifecycle("engine")
    process = await life.run(start_sleeper)
    life.note_death("closed")
    await life.close()
    assert await asyncio.to_thread(process.wait) == -9
