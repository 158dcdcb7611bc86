"""The driving world behind the asynchronous interfaces of other frameworks."""

import asyncio

import numpy as np
import pytest

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.envs.driving.interfaces import SteppedDriving, ToolDriving

ID = "vla_rl/driving_waypoints-v0"
ACTION = np.full((8, 3), -0.1, np.float32)


async def test_an_episode_goes_on_alike_from_a_state_that_is_loaded_elsewhere() -> None:
    async with (
        asyncio.timeout(60),
        SteppedDriving(ID, image_size=32) as one,
        SteppedDriving(ID, image_size=32) as other,
    ):
        await one.reset(seed=4)
        await one.step(ACTION)
        state = await one.get_state()
        stayed = await one.step(ACTION)
        await other.load_state(state)
        moved = await other.step(ACTION)
    assert stayed[1:] == moved[1:]
    np.testing.assert_array_equal(stayed[0]["image"], moved[0]["image"])


async def test_a_step_before_the_first_reset_is_refused() -> None:
    async with asyncio.timeout(60), SteppedDriving(ID) as driving:
        with pytest.raises(RuntimeError, match="await reset"):
            await driving.step(ACTION)


async def test_an_episode_is_driven_through_the_tool_to_its_end() -> None:
    driving = ToolDriving("vla_rl/driving-v0", image_size=32)
    async with asyncio.timeout(60):
        observation = await driving.ainitialize(options={"init_state_id": 2})
        assert observation["instruction"]
        (tool,) = driving.list_tools()
        name = tool["function"]["name"]
        for _ in range(8):
            answer = await driving.aexecute(name, {"action": [0.0, 0.0, 0.0]})
        assert answer["terminated"] is True
        assert answer["info"]["score"]["total"] == answer["reward"]
        with pytest.raises(ValueError, match="expected 'drive'"):
            await driving.aexecute("fly", {})
        await driving.aclose()
