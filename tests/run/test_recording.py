"""Episodes of an evaluation and of a training run are recorded as they are, and nothing else changes."""

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_runs import (
    SHARES_SERVERS,
    STILL,
    TOY,
    FixedAnswer,
    get_servers,
    run_toys,
    small_run,
    toy_episodes,
)

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.datasets import LeRobotWriter, read_lerobot
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError, DataError
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.recipes import train_toy
from vla_rl.recipes.srpo_toy import main
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.rollout import SchedulerConfig, TaskStart, embodied_agent
from vla_rl.run.recording import EpisodeRecorder, common_metadata, record_agent
from vla_rl.run.train import train
from vla_rl.types import (
    Agent,
    Env,
    EnvSpec,
    EpisodeSpec,
    Policy,
    Trajectory,
)

pytestmark = SHARES_SERVERS


async def run_locally(
    agent: Agent, episodes: Sequence[EpisodeSpec], **options: Any
) -> list[Trajectory]:
    return await run_toys(agent, episodes, servers=get_servers(), **options)


async def test_recording_looks_more_often_and_changes_nothing(tmp_path: Path) -> None:
    plain = await run_locally(embodied_agent, toy_episodes(3))
    recorded = await run_locally(EpisodeRecorder(LeRobotWriter(tmp_path)).record(), toy_episodes(3))
    for one, other in zip(plain, recorded, strict=True):
        assert (one.num_env_steps, one.stop_reason) == (other.num_env_steps, other.stop_reason)
        assert np.array_equal(one.final_observation["image"], other.final_observation["image"])
        assert all(
            np.array_equal(a.rewards, b.rewards)
            for a, b in zip(one.steps, other.steps, strict=True)
        )
    on_disk = {int(episode.about["policy_seed"]): episode for episode in read_lerobot(tmp_path)}
    assert sorted(on_disk) == [0, 1, 2]
    for trajectory in plain:
        episode = on_disk[trajectory.episode.policy_seed]
        # random actions are chunks of one step, so the plain trajectory has every observation
        for step, decision in enumerate(trajectory.steps):
            assert np.array_equal(episode.frames["image"](step), decision.observation["image"])
            assert np.array_equal(episode.vectors["state"][step], decision.observation["state"])
            assert np.array_equal(episode.actions[step], decision.chunk.actions[0])
        assert episode.is_success == trajectory.is_success
        assert episode.instruction == trajectory.final_observation["instruction"]


async def test_an_agent_of_one_s_own_is_recorded_as_it_runs_by_chunks_and_images(
    tmp_path: Path,
) -> None:
    toy = EnvSpec(id=TOY.id, kwargs={**TOY.kwargs, "render_mode": "rgb_array"})
    looking = functools.partial(embodied_agent, frames_every=2)
    (plain,) = await run_locally(looking, toy_episodes(1, toy), engine=FixedAnswer(STILL, rows=4))
    agent = EpisodeRecorder(LeRobotWriter(tmp_path)).record(looking)
    (recorded,) = await run_locally(agent, toy_episodes(1, toy), engine=FixedAnswer(STILL, rows=4))
    assert [len(step.rewards) for step in recorded.steps] == [4, 2]
    for one, other in zip(plain.steps, recorded.steps, strict=True):
        assert one.frames is not None
        assert other.frames is not None
        assert np.array_equal(one.frames, other.frames)
        assert np.array_equal(one.rewards, other.rewards)
    (episode,) = read_lerobot(tmp_path)
    assert episode.actions.tolist() == [STILL] * 6


async def test_a_recording_says_which_actions_an_expert_chose(tmp_path: Path) -> None:
    async def helped_at_first(env: Env, policy: Policy) -> Trajectory:
        alone = await embodied_agent(env, policy)
        first, *others = alone.steps
        helped = msgspec.structs.replace(first, intervened=np.ones(first.num_executed, bool))
        return msgspec.structs.replace(alone, steps=(helped, *others))

    await run_locally(
        EpisodeRecorder(LeRobotWriter(tmp_path)).record(helped_at_first),
        toy_episodes(1),
        engine=FixedAnswer(STILL, rows=4),
    )
    (episode,) = read_lerobot(tmp_path)
    assert episode.intervened is not None
    assert episode.intervened.tolist() == [True] * 4 + [False] * 2


async def test_an_episode_that_is_recorded_already_is_not_recorded_twice_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num in (1, 3):
        recorder = EpisodeRecorder(LeRobotWriter(tmp_path), "mine")
        await run_locally(recorder.record(), toy_episodes(num))
    assert len(read_lerobot(tmp_path)) == 3
    assert recorder.num_left_out == 1
    assert (
        "holds 'toy/0 init_state_id 0 seed 0 weights 0 run mine' already; 1 episodes of this "
        "run" in caplog.text
    )


async def test_an_episode_that_a_full_disk_does_not_take_is_left_out_and_the_next_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replaced, numbers = os.replace, itertools.count(1)

    def full_at_the_second_episode(part: Path, path: Path) -> None:
        # an episode is five files: its rows, what it is about, the tasks, the statistics and
        # info.json
        if next(numbers) in (9, 10):
            raise OSError(28, "No space left on device", str(path))
        replaced(part, path)

    monkeypatch.setattr("os.replace", full_at_the_second_episode)
    recorder = EpisodeRecorder(LeRobotWriter(tmp_path))
    await run_locally(recorder.record(), toy_episodes(4), num_envs=1)
    assert recorder.num_failed == 2
    assert [int(episode.about["policy_seed"]) for episode in read_lerobot(tmp_path)] == [0, 3]
    assert caplog.text.count("No space left on device") == 1
    assert [
        name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".part")
    ] == []


async def test_the_same_episodes_of_another_run_or_other_weights_are_recorded_too(
    tmp_path: Path,
) -> None:
    for run, engine in (("one", None), ("other", None), ("other", FixedAnswer(STILL))):
        await run_locally(
            EpisodeRecorder(LeRobotWriter(tmp_path), run).record(), toy_episodes(1), engine=engine
        )
    about = [episode.about for episode in read_lerobot(tmp_path)]
    assert [(each["run"], each["weight_version"]) for each in about] == [
        ("one", 0),
        ("other", 0),
        ("other", 4),
    ]


@pytest.mark.parametrize(
    ("env", "fps", "robot"),
    [
        (TOY, 10, None),
        (EnvSpec(id="CartPole-v1"), 50, None),
        (EnvSpec(id="vla_rl/control-v0", kwargs={"env_id": "Pendulum-v1"}), 30, None),
        (EnvSpec(id="vla_rl/libero_goal-v0", kwargs={"task_id": 2}), 20, "panda"),
    ],
)
async def test_a_recording_has_the_rate_and_the_robot_of_its_environment(
    env: EnvSpec, fps: float, robot: str | None, tmp_path: Path
) -> None:
    agent = await record_agent(
        embodied_agent, str(tmp_path), [env, EnvSpec(id="text/arithmetic")], "mine"
    )
    assert agent is not embodied_agent
    assert (common_metadata([env], "render_fps"), common_metadata([env], "robot_type")) == (
        fps,
        robot,
    )


async def test_a_run_without_images_is_recorded_at_its_own_rate_and_can_be_gone_on_with(
    tmp_path: Path,
) -> None:
    config = TrainToyConfig(
        run=RunConfig(
            root=str(tmp_path / "runs"), updates=1, device="cpu", record_to=str(tmp_path / "data")
        ),
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        step_limit=8,
    )
    for num_runs in (1, 2):
        assert (
            await train_toy.main(
                Command(TrainingLaunch(), msgspec.structs.replace(config, hidden=(8 * num_runs,)))
            )
            == 0
        )
        episodes = read_lerobot(tmp_path / "data")
        assert len({episode.about["run"] for episode in episodes}) == num_runs
    assert not episodes[0].frames
    info = msgspec.json.decode((tmp_path / "data/meta/info.json").read_bytes())
    assert (info["fps"], info["robot_type"]) == (50, None)


async def test_environments_of_two_rates_do_not_fit_into_one_recording(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"render_fps differs: .*, but a data set has only one"):
        await record_agent(embodied_agent, str(tmp_path), [TOY, EnvSpec(id="CartPole-v1")], "mine")
    await run_locally(EpisodeRecorder(LeRobotWriter(tmp_path, fps=20)).record(), toy_episodes(1))
    with pytest.raises(DataError, match=r"fps is 10, .* says 20"):
        await record_agent(embodied_agent, str(tmp_path), [TOY], "mine")


# the test above has a recipe without images, the first of this file images without a recipe
@pytest.mark.proof
async def test_a_training_recipe_records_its_episodes(tmp_path: Path) -> None:
    small = small_run(tmp_path / "runs")
    one = msgspec.structs.replace(small.run, updates=1, record_to=str(tmp_path / "data"))
    config = msgspec.structs.replace(small, run=one)
    assert await main(Command(TrainingLaunch(), config)) == 0
    episodes = read_lerobot(tmp_path / "data")
    assert len(episodes) >= 4  # an update of two groups of two, and what was begun beyond it
    assert {episode.about["weight_version"] for episode in episodes} <= {0, 1}
    assert all(episode.frames["image"](0).shape == (32, 32, 3) for episode in episodes)


# the recipes above have the run, and the second test of this file such an agent
@pytest.mark.proof
async def test_a_run_from_python_records_the_episodes_of_its_own_agent(tmp_path: Path) -> None:
    small = small_run(tmp_path / "runs")
    one = msgspec.structs.replace(small.run, updates=1, record_to=str(tmp_path / "data"))
    starts = [TaskStart(env=TOY, task="toy/0", options={"init_state_id": 1})]
    policy = OpenVlaOft.create(
        tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=4), seed=0
    )
    seen: list[EpisodeSpec] = []

    async def agent(env: Env, policy: Policy) -> Trajectory:
        seen.append(env.episode)
        return await embodied_agent(env, policy)

    await train(msgspec.structs.replace(small, run=one), starts, policy, agent=agent)
    assert 4 <= len(read_lerobot(tmp_path / "data")) <= len(seen)


def test_conversations_are_not_recorded_and_that_is_said() -> None:
    with pytest.raises(
        ConfigError, match="record_to is 'data', expected none: conversations have no control steps"
    ):
        TextTrainingConfig(run=RunConfig(record_to="data"), text=TextPoolConfig(num_envs=4))
