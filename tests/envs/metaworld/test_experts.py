"""Meta-World's scripted policies, in this process and as suggestions."""

import gymnasium
import numpy as np
import pytest

from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.envs.metaworld.env import MetaWorldExpert


@pytest.mark.parametrize(
    "task",
    [
        "drawer-open",
        "button-press-topdown",
        pytest.param("window-close", marks=pytest.mark.proof),
    ],
)
def test_an_expert_solves_its_task(task: str) -> None:
    env = MetaWorldEnv("metaworld_mt10", task, image_size=16, quality="fast", wrist_image=False)
    env.reset(options={"init_state_id": 0})
    env.render_every_step = False
    expert = MetaWorldExpert(env.scene)
    terminated = truncated = False
    while not (terminated or truncated):
        _, reward, terminated, truncated, info = env.step(expert.act())
    assert (terminated, reward, info["is_success"]) == (True, 1.0, True)
    env.close()


def test_suggestions_are_the_experts_actions(drawer_env: MetaWorldEnv) -> None:
    env = gymnasium.make(
        "vla_rl/metaworld_mt10-expert-v0", task_id="drawer-open", image_size=64, quality="fast"
    )
    drawer_env.reset(options={"init_state_id": 2})
    seen, _ = env.reset(options={"init_state_id": 2})
    expert = MetaWorldExpert(drawer_env.scene)
    for _ in range(3):
        np.testing.assert_array_equal(seen["expert_action"], expert.act())
        drawer_env.step(seen["expert_action"])
        seen = env.step(seen["expert_action"])[0]
    env.close()
