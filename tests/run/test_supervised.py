"""Fine-tuning saves weights on the way, at the end, if something ends it early; a trial runs them in episodes
afterwards."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.recipes.sft_flow import SftFlowConfig
from vla_rl.run.fine_tuning import read_demonstrations
from vla_rl.run.supervised import train_supervised
from vla_rl.run.trial import TrialConfig, plan_trial, require_env, run_trial


class Batches:
    """Counts what it is trained on; does `at` an update what a test asks for, and has no room for some
    folders.
    """

    def __init__(self, at: dict[int, Any] | None = None, full: tuple[str, ...] = ()) -> None:
        self.num_learnt = 0
        self.saved: dict[str, int] = {}
        self._at, self._full = at or {}, full

    async def batch(self, number: int) -> int:
        if isinstance(self._at.get(number), Exception):
            raise self._at[number]
        return number

    async def learn(self, number: int, batch: int) -> None:
        assert number == batch == self.num_learnt + 1
        self.num_learnt = number
        if isinstance(self._at.get(number), signal.Signals):
            os.kill(os.getpid(), self._at[number])
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def save(self, folder: Path) -> None:
        if folder.name in self._full:
            raise CheckpointError(f"{folder} could not be written: no room.")
        self.saved[folder.name] = self.num_learnt

    async def train(self, tmp_path: Path, updates: int, save_every: int | None = None) -> int:
        async with asyncio.timeout(10):
            return await train_supervised(
                updates, self.batch, self.learn, self.save, tmp_path / "out", save_every=save_every
            )


async def test_weights_are_saved_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    batches = Batches()
    assert await batches.train(tmp_path, 4, save_every=2) == 0
    assert batches.saved == {"out-000002": 2, "out": 4}


async def test_a_full_disk_is_a_warning_on_the_way_and_an_error_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = Batches(full=("out-000001", "out"))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CheckpointError, match="out could not be written"),
    ):
        await batches.train(tmp_path, 3, save_every=1)
    assert batches.saved == {"out-000002": 2}
    assert "out-000001 could not be written: no room. Training continues" in caplog.text


async def test_a_signal_stops_after_its_update_with_its_weights_and_its_exit_status(
    tmp_path: Path,
) -> None:
    batches = Batches(at={2: signal.SIGTERM})
    status = await batches.train(tmp_path, 1000)
    assert status == 128 + signal.SIGTERM
    assert batches.saved == {f"out-{batches.num_learnt:06d}": batches.num_learnt}
    assert 2 <= batches.num_learnt < 1000


async def test_data_that_cannot_be_read_cost_no_weights(tmp_path: Path) -> None:
    batches = Batches(at={3: DataError("frame 7 is damaged")})
    with pytest.raises(DataError, match="frame 7") as caught:
        await batches.train(tmp_path, 5)
    assert batches.saved == {"out-000002": 2}
    (note,) = caught.value.__notes__
    assert note == f"the weights after 2 updates were saved in {tmp_path / 'out-000002'}"


TOY = "vla_rl/toy_reach-v0"


def demonstration(
    task: str | None, start: int = 0, is_success: bool | None = True
) -> RecordedEpisode:
    about: dict[str, str | int | float | bool] = {"init_state_id": start}
    if task is not None:
        about["task"] = task
    return RecordedEpisode(
        name=f"{task} from {start}",
        instruction="turn on the stove",
        actions=np.zeros((3, 7), np.float32),
        vectors={},
        frames={},
        is_success=is_success,
        about=about,
    )


def new_policy() -> MlpPolicy:
    shape = MlpConfig(state_size=2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2, num_bins=11)
    return MlpPolicy.create(shape, seed=0)


def test_the_tasks_of_the_data_are_run_from_other_starts() -> None:
    data = [demonstration("libero_goal/7", start) for start in range(48)]
    episodes = plan_trial(TrialConfig(episodes=4), data, {"image_size": 84, "quality": "fast"})
    assert [episode.task for episode in episodes] == ["libero_goal/7"] * 4
    starts = [episode.options["init_state_id"] for episode in episodes]
    assert starts == [48, 49, 1000, 1001]
    assert {episode.env.kwargs["image_size"] for episode in episodes} == {84}
    assert {episode.env.kwargs["quality"] for episode in episodes} == {"fast"}
    assert all(episode.sampling.greedy for episode in episodes)


def test_episodes_are_shared_among_tasks() -> None:
    data = [demonstration("libero_goal/7"), demonstration("metaworld_mt10/2")]
    tasks = [episode.task for episode in plan_trial(TrialConfig(episodes=5), data, None)]
    assert tasks.count("libero_goal/7") == 3
    assert len(tasks) == 5
    named = TrialConfig(episodes=5, tasks=("libero_goal/8",))
    assert {episode.task for episode in plan_trial(named, data, None)} == {"libero_goal/8"}


def test_an_environment_is_run_from_seeds() -> None:
    config = TrialConfig(episodes=3, env_id=TOY, env_kwargs={"action_dim": 2})
    episodes = plan_trial(config, [demonstration(None)], None)
    assert len({episode.seed for episode in episodes}) == 3
    assert {episode.env.kwargs["action_dim"] for episode in episodes} == {2}


def test_options_that_contradict_or_name_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="env_id"):
        TrialConfig(env_id=TOY, tasks=("libero_goal/7",))
    with pytest.raises(ConfigError, match="env_kwargs"):
        TrialConfig(env_kwargs={"action_dim": 2})
    with pytest.raises(ConfigError, match=r"trial\.env_id is 'vla_rl/nowhere-v0'"):
        require_env(TrialConfig(env_id="vla_rl/nowhere-v0"))


async def test_data_that_name_no_task_are_said_to_be_untried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = [demonstration("red_square")]
    assert plan_trial(TrialConfig(), data, None) == []
    policy = new_policy()
    async with DeviceLane(1) as lane:
        assert await run_trial(policy, lane, [], data, 1) is None
    assert "no episode is run" in capsys.readouterr().out


async def test_the_share_of_the_policy_stands_beside_that_of_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy = new_policy()
    config = TrialConfig(episodes=6, env_id=TOY, env_kwargs={"action_dim": 2})
    data = [demonstration(None, is_success=number < 3) for number in range(4)]
    async with DeviceLane(1) as lane:
        share = await run_trial(policy, lane, plan_trial(config, data, None), data, 2)
    assert share is not None
    said = capsys.readouterr().out
    assert f"the policy solves {round(share * 6)} of 6 episodes ({share:.0%}" in said
    assert "of the demonstrations 3 of 4 do (75%)" in said


def test_demonstrations_that_failed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*solved: bool) -> str:
        folder = tmp_path / "".join("ny"[each] for each in solved)
        writer = LeRobotWriter(folder, fps=10)
        for number, is_success in enumerate(solved):
            writer.add_episode(
                RecordedEpisode(
                    name=f"episode {number}",
                    instruction="reach",
                    actions=np.full((2, 7), -1.0, np.float32),
                    vectors={"state": np.zeros((2, 2), np.float32)},
                    frames={},
                    is_success=is_success,
                )
            )
        caplog.clear()
        assert len(read_demonstrations(SftFlowConfig(demonstrations=str(folder)))) == len(solved)
        return caplog.text

    assert "1 of the 2 demonstrations did not solve their task, such as episode 1" in read(
        True, False
    )
    assert read(True, True) == ""
