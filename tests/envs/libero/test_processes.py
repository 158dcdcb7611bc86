"""LIBERO in a pool of processes that are forked from one which has built the scene."""

import asyncio
from typing import Any

import numpy as np
import pytest

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.mujoco.loading import device_order
from vla_rl.types import EnvSpec, EpisodeSpec

SPEC = EnvSpec(
    id="vla_rl/libero_object-v0",
    kwargs={
        "task_id": 1,
        "assets": "stand-ins",
        "quality": "fast",
        "physics": "fast",
        "num_settle_steps": 2,
    },
)
UP = np.array([0, 0, 1, 0, 0, 0, -1], np.float32)


async def play(pool: SimulatorPool, number: int, meet: asyncio.Barrier) -> tuple[int, Any]:
    """One step of the same episode, with the others at the same time."""
    episode = EpisodeSpec(
        episode_id=number, group_id=0, member=number, env=SPEC, task="t", seed=1, policy_seed=number,
        options={"init_state_id": 3},
    )  # fmt: skip
    async with pool.lease(episode) as env:
        await env.reset()
        await meet.wait()
        return env.process.pid, (await env.step(UP))[0]


async def test_two_forks_of_one_scene_draw_the_same_episode_with_little_memory_of_their_own() -> (
    None
):
    async with (
        asyncio.timeout(590),
        Runtime(name="test") as runtime,
        SimulatorPool(runtime, SimulatorConfig(num_envs=2), specs=[SPEC]) as pool,
    ):
        meet = asyncio.Barrier(2)
        (one, seen_by_one), (two, seen_by_two) = await asyncio.gather(
            *(play(pool, k, meet) for k in range(2))
        )
        assert one != two
        for key in ("image", "wrist_image", "state"):
            np.testing.assert_array_equal(seen_by_one[key], seen_by_two[key])
        assert seen_by_one["image"].std() > 10  # a picture, and not a black one
        # with the scene and its simulator in each of them it is 600; Mesa's software renderer is
        # most of what is left
        assert pool.metrics()["simulation/private_mb_max"] < 170


@pytest.mark.parametrize(
    ("is_software", "process_index", "order"),
    [
        ([False, False, False, True], 0, [0, 1, 2, 3]),
        ([False, False, False, True], 1, [1, 2, 0, 3]),
        ([False, False, False, True], 5, [2, 0, 1, 3]),
        ([True, False, False], 1, [2, 1, 0]),
        ([True], 7, [0]),
        ([], 0, []),
    ],
)
def test_processes_take_the_gpus_in_turn_and_the_cpu_last(
    is_software: list[bool], process_index: int, order: list[int]
) -> None:
    assert device_order(is_software, process_index) == order
