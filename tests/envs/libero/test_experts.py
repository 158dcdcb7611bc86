"""Representative episodes that the scripted experts must solve, without pictures."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

import vla_rl.envs
from benchmarks.libero_experts import expert_lengths
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.experts import ExpertPolicy
from vla_rl.envs.libero.tasks import find_task

Episode = tuple[str, int, int]


def proofs(*episodes: Episode) -> list[Any]:
    """Episodes of the long form: the suite has one of each of LIBERO's suites but libero_spatial.

    Of libero_object it has the one with real assets, and that of a policy, with stand-ins.
    """
    return [pytest.param(*episode, marks=pytest.mark.proof) for episode in episodes]


EPISODES = [
    ("libero_goal", 7, 0),
    ("libero_90", 33, 2),
    *proofs(
        ("libero_object", 3, 0),
        ("libero_spatial", 5, 1),
        ("libero_goal", 0, 0),
        ("libero_goal", 9, 0),
    ),
]
SLOW_EPISODES = [
    ("libero_10", 2, 0),
    *proofs(("libero_spatial", 4, 0), ("libero_goal", 8, 0)),
]
REAL_EPISODES = [
    ("libero_object", 3, 0),
    *proofs(
        ("libero_10", 9, 0),  # a mug into the microwave, which is then shut
        ("libero_90", 35, 0),  # opens the microwave
        ("libero_spatial", 5, 1),
        ("libero_goal", 0, 0),
        ("libero_goal", 3, 0),
    ),
]


def solve(suite: str, task_id: int, init_state_id: int, assets: str) -> None:
    (length,) = expert_lengths(find_task(suite, task_id), find_assets(assets), [init_state_id])
    assert length is not None
    assert 30 < length < 300


@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), EPISODES)
def test_the_expert_solves_a_task_with_stand_ins(
    suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, "stand-ins")


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), SLOW_EPISODES)
def test_the_expert_solves_a_harder_task_with_stand_ins(
    suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, "stand-ins")


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), REAL_EPISODES)
def test_the_expert_solves_a_task_with_real_assets(
    real_assets: str, suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, real_assets)


@pytest.fixture
def suggesting_env() -> Iterator[gymnasium.Env[dict[str, object], np.ndarray]]:
    assert vla_rl.envs.LIBERO_SUITES
    env = gymnasium.make(
        "vla_rl/libero_object-expert-v0",
        task_id=3,
        assets="stand-ins",
        image_size=16,
        wrist_image=False,
        physics="fast",
        quality="fast",
        disable_env_checker=True,
    )
    yield env
    env.close()


async def test_the_expert_is_a_policy_like_any_other(
    suggesting_env: gymnasium.Env[dict[str, object], np.ndarray],
) -> None:
    observation, _ = suggesting_env.reset(options={"init_state_id": 0})
    suggesting_env.unwrapped.render_every_step = False  # type: ignore[attr-defined] # it reads no picture
    policy, is_over = ExpertPolicy(), False
    info: dict[str, object] = {}
    while not is_over:
        chunk = await policy.act(observation)
        assert chunk.actions.shape == (1, 7)
        observation, _, terminated, truncated, info = suggesting_env.step(chunk.actions[0])
        is_over = terminated or truncated
    assert info["is_success"]


async def test_an_observation_without_suggestion_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the observation has \['state'\], expected expert_action"
    ):
        await ExpertPolicy().act({"state": np.zeros(8, np.float32)})
