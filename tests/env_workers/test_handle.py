"""Env handles: the five-tuple over a process boundary, states that travel, and faults with
a name.
"""

import asyncio
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from vla_rl.actors import Runtime
from vla_rl.env_workers import EnvHandle, SimulatorConfig, open_env
from vla_rl.envs import run_chunk
from vla_rl.errors import ActorDied, ActorFrozen, EnvError, StartError
from vla_rl.types import EnvSpec

TOY = "vla_rl/toy_reach-v0"
STILL = np.zeros(7, np.float32)
RIGHT = np.tile(np.array([0.3, 0.1, 0, 0, 0, 0, 0], np.float32), (3, 1))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def runtime(shared_runtime: Runtime) -> Runtime:
    return shared_runtime


def faulty(fault: str, at_step: int = 1) -> EnvSpec:
    return EnvSpec(id="vla_rl/faulty-v0", kwargs={"fault": fault, "at_step": at_step})


async def test_a_handle_behaves_as_the_environment_in_this_process(runtime: Runtime) -> None:
    local = gymnasium.make("vla_rl.envs:" + TOY, render_mode="rgb_array")
    spec = EnvSpec(id=TOY, kwargs={"render_mode": "rgb_array"})
    async with asyncio.timeout(30), open_env(runtime, spec) as env:
        assert env.observation_space == local.observation_space
        assert env.action_space == local.action_space
        assert env.render_mode == "rgb_array"
        expected, expected_info = local.reset(seed=5, options={"init_state_id": 4})
        observation, info = await env.reset(seed=5, options={"init_state_id": 4})
        assert info == expected_info
        for row in RIGHT:
            assert np.array_equal(observation["image"], expected["image"])
            assert np.array_equal(observation["state"], expected["state"])
            assert observation["instruction"] == expected["instruction"]
            expected, *expected_rest = local.step(row)
            observation, *rest = await env.step(row)
            assert rest == expected_rest
        image: Any = local.render()
        assert np.array_equal(await env.render(), image)


async def test_a_start_that_does_not_exist_is_told_from_a_fault(runtime: Runtime) -> None:
    async with asyncio.timeout(30), open_env(runtime, faulty("no_start", at_step=0)) as env:
        with pytest.raises(StartError, match="there is no such start"):
            await env.reset(seed=0)


async def test_frames_say_which_image_of_the_observation_they_are(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "support")
    spec = EnvSpec(id="sample_envs:two/cameras-v0")
    rows = np.zeros((4, 1), np.float32)
    async with asyncio.timeout(60):
        for kwargs, key, shades in (
            ({"render_key": "wrist_image"}, "wrist_image", [102, 104]),
            ({}, None, [202, 204]),
        ):
            async with open_env(runtime, msgspec.structs.replace(spec, kwargs=kwargs)) as env:
                await env.reset(seed=0)
                outcome = await env.step_chunk(rows, frames_every=2)
                assert outcome.frames is not None
                assert (outcome.frames_key, outcome.frames[:, 0, 0, 0].tolist()) == (key, shades)
        with pytest.raises(
            EnvError,
            match=r"its render_key is 'left', expected .* one of \['image', 'wrist_image'\]",
        ):
            async with open_env(
                runtime, msgspec.structs.replace(spec, kwargs={"render_key": "left"})
            ):
                pass


async def test_a_chunk_is_one_message_and_gives_what_its_rows_give(runtime: Runtime) -> None:
    local = gymnasium.make("vla_rl.envs:" + TOY)
    local.reset(seed=1)
    expected, rewards, terminated, truncated, info = run_chunk(local, RIGHT)
    async with asyncio.timeout(30), open_env(runtime, TOY) as env:
        await env.reset(seed=1)
        outcome = await env.step_chunk(RIGHT)
    assert np.array_equal(outcome.observation["image"], expected["image"])
    assert outcome.rewards.dtype == np.float32
    assert outcome.rewards.tolist() == rewards.tolist()
    assert (outcome.terminated, outcome.truncated, outcome.info) == (terminated, truncated, info)


async def test_a_simulator_is_saved_moved_to_another_process_and_restored(runtime: Runtime) -> None:
    async with (
        asyncio.timeout(30),
        open_env(runtime, TOY, name="old") as old,
        open_env(runtime, TOY, name="new") as new,
    ):
        await old.reset(seed=2)
        await old.step_chunk(RIGHT)
        state = await old.get_state()
        stayed = [await old.step_chunk(RIGHT), await old.step_chunk(RIGHT)]
        await new.set_state(state)
        moved = [await new.step_chunk(RIGHT), await new.step_chunk(RIGHT)]
    for one, other in zip(stayed, moved, strict=True):
        assert np.array_equal(one.observation["image"], other.observation["image"])
        assert np.array_equal(one.observation["state"], other.observation["state"])


async def test_an_exception_of_the_environment_arrives_with_its_traceback(runtime: Runtime) -> None:
    async with asyncio.timeout(30), open_env(runtime, faulty("raise")) as env:
        await env.reset(seed=0)
        with pytest.raises(EnvError, match="lost its mind") as caught:
            await env.step(STILL)
        assert "in _misbehave" in "".join(traceback.format_exception(caught.value))


async def test_observations_stay_as_they_are_while_they_are_kept(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    async with (
        asyncio.timeout(30),
        open_env(runtime, "benchmarks.frames_env:benchmarks/frames-v0") as env,
    ):
        kept = [(await env.reset(seed=0))[0]["image"]]
        kept += [(await env.step(STILL))[0]["image"] for _ in range(9)]
        assert not np.array_equal(kept[0], kept[1])
        for earlier, later in zip(kept, kept[4:], strict=False):  # its images repeat after four
            assert np.array_equal(earlier, later)
        with pytest.raises(ValueError, match="read-only"):
            kept[0][0, 0, 0] = 1


@pytest.mark.parametrize("fault", ["raise", "wrong_shape", "ask"])
async def test_a_broken_environment_raises_and_its_process_lives_on(
    runtime: Runtime, fault: str
) -> None:
    async with asyncio.timeout(30), open_env(runtime, faulty(fault)) as env:
        await env.reset(seed=0)
        with pytest.raises(
            EnvError, match=r"vla_rl/faulty-v0.*(lost its mind|expected uint8|EOFError)"
        ):
            await env.step(STILL)
        with pytest.raises(EnvError, match="no environment is open"):
            await env.step(STILL)
        assert env.process.is_alive()


@pytest.mark.parametrize(("fault", "cause"), [("exit", "exit code 3"), ("kill", "SIGKILL")])
async def test_a_dying_process_says_how_it_died(runtime: Runtime, fault: str, cause: str) -> None:
    async with asyncio.timeout(30), open_env(runtime, faulty(fault)) as env:
        await env.reset(seed=0)
        with pytest.raises(ActorDied, match=cause):
            await env.step(STILL)
        with pytest.raises(ActorDied):
            await env.reset(seed=0)


@pytest.mark.parametrize(("fault", "at_step"), [("stop", 1), ("never_answer", 0)])
async def test_a_process_that_never_answers_is_killed_at_its_deadline(
    runtime: Runtime, fault: str, at_step: int
) -> None:
    reset_timeout_s = 3.0 if at_step == 0 else 60.0
    config = SimulatorConfig(
        step_timeout_s=0.3, reset_timeout_s=reset_timeout_s, frozen_after_s=None
    )
    async with asyncio.timeout(30), open_env(runtime, faulty(fault, at_step), config) as env:
        pid = env.process.pid
        with pytest.raises(ActorFrozen, match=r"did not answer within (0\.3|3) s"):
            await reset_and_step(env)
        await env.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def reset_and_step(env: EnvHandle) -> None:
    await env.reset(seed=0)
    await env.step(STILL)


async def test_a_wrong_action_never_reaches_the_simulator(runtime: Runtime) -> None:
    async with asyncio.timeout(30), open_env(runtime, TOY) as env:
        before, _ = await env.reset(seed=0)
        for action in (np.full(7, 2.0), np.full(7, np.nan), np.zeros(6), np.zeros((1, 7))):
            with pytest.raises(ValueError, match="action for vla_rl/toy_reach-v0"):
                await env.step(action)
        with pytest.raises(ValueError, match="action chunk"):
            await env.step_chunk(np.zeros((0, 7)))
        assert np.array_equal((await env.step(STILL))[0]["state"], before["state"])


async def test_an_unknown_environment_is_refused_and_leaves_no_process(runtime: Runtime) -> None:
    with pytest.raises(EnvError, match="vla_rl/no_such_env-v0 could not be made"):
        async with asyncio.timeout(30), open_env(runtime, "vla_rl/no_such_env-v0"):
            pass


async def test_a_closed_handle_says_so_and_its_process_is_gone(runtime: Runtime) -> None:
    async with asyncio.timeout(30), open_env(runtime, TOY) as env:
        await env.close()
        await env.close()
        with pytest.raises(RuntimeError, match="was closed here"):
            await env.reset(seed=0)
        with pytest.raises(ProcessLookupError):
            os.kill(env.process.pid, 0)


async def test_a_death_between_calls_is_noticed(runtime: Runtime) -> None:
    async with asyncio.timeout(30), open_env(runtime, TOY) as env:
        await env.reset(seed=0)
        os.kill(env.process.pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            await env.step(STILL)


async def test_a_tuple_goes_there_and_comes_back_as_a_tuple(runtime: Runtime) -> None:
    local = gymnasium.make("Blackjack-v1")
    async with asyncio.timeout(30), open_env(runtime, "Blackjack-v1") as env:
        expected, _ = local.reset(seed=3)
        observation, _ = await env.reset(seed=3)
        assert observation == expected
        assert (await env.step(1))[0] == local.step(1)[0]
        assert env.observation_space.contains(observation)


async def test_a_simulator_process_has_the_configured_environment_and_no_torch(
    runtime: Runtime,
) -> None:
    config = SimulatorConfig(environment={"MUJOCO_GL": "osmesa"}, render_devices=(2, 5))
    assert config.get_environment(3) == {
        "MUJOCO_GL": "osmesa",
        "MUJOCO_EGL_DEVICE_ID": "5",
        "VLA_RL_PROCESS_INDEX": "3",
    }
    async with asyncio.timeout(30), open_env(runtime, TOY, config) as env:
        process = Path(f"/proc/{env.process.pid}")
        assert b"MUJOCO_GL=osmesa" in (process / "environ").read_bytes().split(b"\0")
        assert "torch" not in (process / "maps").read_text()
        assert 1.0 < env.process.private_mb() < 200.0
