"""Engines that die, freeze, start again and go: nobody waits for ever, and nobody is answered by
old weights.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
from acting_team import OneEngine, Team, opened_team
from processes import all_end, is_gone, processes_of_session
from small_policies import log_prob_gap, moved, observe

from vla_rl.engines.vllm import adapter
from vla_rl.engines.vllm.launch import engine_folder
from vla_rl.engines.vllm.replica import Replica
from vla_rl.errors import ActorDied, ConfigError

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.needs_vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.slow,
]

SUPPORT = Path(__file__).parent / "support"

TWO_ENGINES = pytest.param(2, marks=pytest.mark.proof)
needs_two_engines = pytest.mark.parametrize("team", [TWO_ENGINES], indirect=True)
"""A proof: the suite starts one engine, for 9 s of CPU time; test_routing.py and test_half_loaded.py
have several, without vLLM's start-up. That one is the engine of test_contracts.py, which ends here."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[1, TWO_ENGINES])
async def team(request: pytest.FixtureRequest, one_engine: OneEngine) -> AsyncIterator[Team]:
    if request.param == 1:
        yield await one_engine.opened()
        return
    async with opened_team(request.param) as team:
        yield team


async def test_starting_engines_draws_no_random_number_of_the_learner(team: Team) -> None:
    assert len(team.engine.pids) == team.num_engines
    assert team.changed_by_start == []


async def test_engines_begin_with_the_weights_that_they_were_given_before(team: Team) -> None:
    engine = team.engine
    chunk = await engine.act(observe(0))
    assert chunk.weight_version == 5
    assert log_prob_gap(team.newer, observe(0), chunk, 1.0) < 1e-5
    with pytest.raises(ConfigError, match="can_sleep is False"):
        await engine.sleep()
    # as a live view asks, in a thread of its own
    stats = await asyncio.to_thread(engine.stats)
    assert 0.0 < stats.busy_share < 1.0


@needs_two_engines
async def test_requests_go_to_the_least_loaded_engine(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, all_asked, encode = [], asyncio.Event(), adapter.AsyncLLM.encode

    async def answer_once_all_have_asked(llm: Any, *args: object) -> AsyncIterator[object]:
        asked.append(llm)
        if len(asked) >= 12:
            all_asked.set()
        await all_asked.wait()
        async for output in encode(llm, *args):
            yield output

    monkeypatch.setattr(adapter.AsyncLLM, "encode", answer_once_all_have_asked)
    before = dict(team.engine.num_answers)
    assert len(before) == 2
    await asyncio.gather(*(team.ask(number) for number in range(12)))
    gained = [count - before[pid] for pid, count in team.engine.num_answers.items()]
    assert min(gained) >= 4


@needs_two_engines
async def test_every_engine_gets_new_weights_or_none_does(team: Team) -> None:
    await team.publish(moved(team.first, 1), 6)
    checksums = await team.engine.checksums()
    assert len(checksums) == 2
    assert len(set(checksums.values())) == 1


@needs_two_engines
async def test_a_killed_engine_loses_nobodys_request_and_comes_back_with_the_weights_of_now(
    team: Team,
) -> None:
    victim, survivor = team.engine.pids
    restarts = team.engine.num_restarts
    os.kill(victim, signal.SIGKILL)
    policy = moved(team.first, 2)
    publishing = asyncio.create_task(team.publish(policy, 7))
    await team.ask_until(lambda: len(team.engine.pids) == 2 and victim not in team.engine.pids)
    await publishing
    assert team.engine.num_restarts == restarts + 1
    assert survivor in team.engine.pids
    assert len(set((await team.engine.checksums()).values())) == 1
    team.answers.clear()
    await asyncio.gather(*(team.ask(number) for number in range(8)))
    assert {chunk.weight_version for _, chunk in team.answers} == {7}
    assert (
        max(log_prob_gap(policy, observe(number), chunk, 1.0) for number, chunk in team.answers)
        < 1e-5
    )


@needs_two_engines
async def test_an_engine_that_is_stopped_in_an_update_is_replaced_and_loses_nobodys_request(
    team: Team,
) -> None:
    frozen, other = team.engine.pids
    restarts = team.engine.num_restarts
    policy = moved(team.first, 3)
    os.kill(frozen, signal.SIGSTOP)
    publishing = asyncio.create_task(team.publish(policy, 8))
    await team.ask_until(lambda: len(team.engine.pids) == 2 and frozen not in team.engine.pids)
    await publishing
    assert is_gone(frozen)
    assert team.engine.num_restarts == restarts + 1
    assert other in team.engine.pids
    team.answers.clear()
    await asyncio.gather(*(team.ask(number) for number in range(8)))
    assert {chunk.weight_version for _, chunk in team.answers} == {8}
    assert (
        max(log_prob_gap(policy, observe(number), chunk, 1.0) for number, chunk in team.answers)
        < 1e-5
    )


async def test_ctrl_c_and_a_closed_terminal_leave_engines_to_their_parent(team: Team) -> None:
    pids, restarts = team.engine.pids, team.engine.num_restarts
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGHUP)
    for _ in range(2):  # an engine that heeds them is gone after the first answer
        await asyncio.gather(*(team.ask(number) for number in range(4)))
    assert (team.engine.pids, team.engine.num_restarts) == (pids, restarts)


async def test_a_failed_update_leaves_no_engine_paused(team: Team) -> None:
    broken = team.first.copy()
    del broken.network.projector.fc2
    with pytest.raises(Exception, match="2 missing"):
        await team.lane.run(team.engine.apply_weights, broken.network, 9)
    await asyncio.gather(*(team.ask(number) for number in range(4)))


async def test_callers_of_engines_that_stay_dead_are_told_before_anything_of_them_is_cleaned_up(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_close, close = asyncio.Event(), Replica.close

    async def close_later(replica: Replica) -> None:
        await may_close.wait()
        await close(replica)

    engine, pids = team.engine, team.engine.pids
    monkeypatch.setattr(Replica, "close", close_later)
    monkeypatch.setattr(engine._pool, "_attempts", 1)
    for slot in engine._slots:
        once = msgspec.structs.replace(slot._config, max_restarts=0)
        monkeypatch.setattr(slot, "_config", once)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asking = [asyncio.create_task(engine.act(observe(number))) for number in range(8)]
    await asyncio.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    may_close.set()
    assert [type(outcome) for outcome in outcomes] == [ActorDied] * 8
    with pytest.raises(
        ActorDied, match=r"in a row, the last one: its process (is gone|was killed by SIGKILL)"
    ):
        await engine.act(observe(0))
    # nobody is there to take them: remembered
    await team.publish(team.first, 10)
    assert engine.weight_version == 10


async def test_a_closed_engine_leaves_nothing_behind_and_remembers_weights(team: Team) -> None:
    assert team.files()
    await team.close()
    assert team.files() == []
    await team.publish(team.newer, 11)
    assert team.engine.weight_version == 11


# test_preload.py starts such processes without vLLM, test_engine_folder.py leaves their folders
@pytest.mark.proof
async def test_engines_that_run_or_are_stopped_while_they_start_die_with_their_parent_and_leave_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from small_policies import oft_policy
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmConfig, VllmActionEngine
from vla_rl.models.vllm import serve

async def main():
    config = EngineConfig(vllm=VllmConfig(num_engines=2))
    async with DeviceLane(1) as lane, VllmActionEngine(serve(oft_policy()), lane, config):
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as own:  # a short path, as sockets need
        parent = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", script, str(SUPPORT)],
            env={**os.environ, "TMPDIR": own},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with parent:
            # the first runs before the second is started
            while len(loaded := children_with_torch(parent.pid)) < 2:
                assert parent.poll() is None
                await asyncio.sleep(0.02)
            pidfds = [
                os.pidfd_open(pid) for pid in processes_of_session(parent.pid) if pid != parent.pid
            ]
            os.kill(max(loaded, key=lambda pid: psutil.Process(pid).create_time()), signal.SIGSTOP)
            parent.kill()
        try:
            assert await asyncio.to_thread(all_end, pidfds, 60)
        finally:
            for pid in processes_of_session(parent.pid):
                os.kill(pid, signal.SIGKILL)
        monkeypatch.setattr(tempfile, "tempdir", own)
        with engine_folder():
            pass
        assert os.listdir(own) == []


def children_with_torch(parent: int) -> list[int]:
    """Children of a process that have begun to load torch.

    Not theirs: an engine that runs a program, such as lscpu, is two processes for a moment.
    """
    loaded = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(OSError):  # ended while we looked
            if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                loaded.append(child.pid)
    return loaded
