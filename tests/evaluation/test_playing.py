"""A list of episodes is run, each once, whatever dies meanwhile."""

from pathlib import Path

import numpy as np
import pytest
from played_toys import STILL, Fixed, played, toy_episodes

from vla_rl.errors import EnvError, PolicyError
from vla_rl.evaluation import within_range
from vla_rl.rollout import EpisodeLost, embodied_agent
from vla_rl.types import EnvSpec


async def test_every_episode_is_played_once() -> None:
    trajectories = await played(embodied_agent, toy_episodes(5))
    assert [trajectory.episode.options["init_state_id"] for trajectory in trajectories] == [
        0,
        1,
        2,
        3,
        4,
    ]
    again = await played(embodied_agent, toy_episodes(5)[3:], num_envs=1)
    assert np.array_equal(
        again[0].final_observation["state"], trajectories[3].final_observation["state"]
    )


async def test_an_episode_whose_simulator_died_is_played_again(tmp_path: Path) -> None:
    env = EnvSpec(
        id="vla_rl/faulty-v0", kwargs={"fault": "kill", "times": 1, "ledger": str(tmp_path)}
    )
    (trajectory,) = await played(embodied_agent, toy_episodes(1, env), num_envs=1)
    assert trajectory.episode.attempt == 1


async def test_an_episode_that_is_always_lost_ends_it(tmp_path: Path) -> None:
    env = EnvSpec(
        id="vla_rl/faulty-v0", kwargs={"fault": "kill", "times": 9, "ledger": str(tmp_path)}
    )
    with pytest.raises(EpisodeLost) as caught:
        await played(embodied_agent, toy_episodes(1, env), num_envs=1, max_attempts=2)
    assert caught.value.__notes__ == ["that was the last of max_attempts=2"]


async def test_an_environment_that_breaks_its_contract_ends_it_with_its_own_error() -> None:
    env = EnvSpec(id="vla_rl/faulty-v0", kwargs={"fault": "raise"})
    with pytest.raises(EnvError):
        await played(embodied_agent, toy_episodes(4, env))


TOO_FAR = [1.5, -2.0, 0.25, 0.0, 0.0, 0.0, 0.0]


async def test_actions_are_cut_off_where_libero_s_controller_cuts_them_off() -> None:
    (trajectory,) = await played(
        within_range(embodied_agent), toy_episodes(1), engine=Fixed(TOO_FAR)
    )
    chunk = trajectory.steps[0].chunk
    assert chunk.actions[0, :3].tolist() == [1.0, -1.0, 0.25]
    assert chunk.tokens.tolist() == TOO_FAR
    with pytest.raises(ValueError, match=r"holds 1\.5 at"):
        await played(embodied_agent, toy_episodes(1), engine=Fixed(TOO_FAR))


async def test_a_policy_whose_numbers_are_none_is_named_at_once() -> None:
    with pytest.raises(PolicyError, match=r"\('toy/0'\) is nan, with the weights after 4 updates"):
        await played(embodied_agent, toy_episodes(1), engine=Fixed(STILL, float("nan")))
