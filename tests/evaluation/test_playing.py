"""Playing a list of episodes, the results file, the intervals and the plan."""

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from disks import SmallDisk
from toy_runs import small_run

from vla_rl.actors import Runtime
from vla_rl.commands import plan
from vla_rl.commands.command_line import Command, TrainingLaunch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.data import LeRobotWriter, read_lerobot
from vla_rl.envs.libero import tasks as libero_tasks
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError, DataError, EnvError, PolicyError
from vla_rl.evaluation import (
    EpisodeResult,
    ResultFile,
    libero,
    parse_numbers,
    play_each,
    wilson_interval,
    within_range,
)
from vla_rl.evaluation.conditions import conditions_of_play
from vla_rl.evaluation.plan import planned_episodes
from vla_rl.evaluation.results import by_task, summary_of
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.recipes import train_toy
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.srpo_toy import main
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.recipes.watch_libero import RandomActions
from vla_rl.rollout import EpisodeLost, SchedulerConfig, TaskStart, embodied_agent
from vla_rl.simulation import SimulatorConfig, SimulatorPool
from vla_rl.training.agents import common_metadata, recorded
from vla_rl.training.recording import EpisodeRecorder
from vla_rl.training.run import train
from vla_rl.types import (
    ActionChunk,
    Agent,
    Env,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Policy,
    Sampling,
    Trajectory,
)

TOY = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"action_dim": 7, "step_limit": 6})


def toy_episodes(num: int, env: EnvSpec = TOY) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=k,
            group_id=k,
            member=0,
            env=env,
            task="toy/0",
            seed=0,
            policy_seed=k,
            options={"init_state_id": k},
        )
        for k in range(num)
    ]


async def played(
    agent: Agent,
    episodes: Sequence[EpisodeSpec],
    num_envs: int = 2,
    engine: Any = None,
    **changed: Any,
) -> list[Trajectory]:
    trajectories: list[Trajectory] = []

    async def done(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)

    async with (
        Runtime("test") as runtime,
        SimulatorPool(runtime, SimulatorConfig(num_envs=num_envs)) as pool,
    ):
        await play_each(pool, engine or RandomActions(), agent, episodes, done, **changed)
    return sorted(trajectories, key=lambda trajectory: trajectory.episode.episode_id)


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


async def test_recording_looks_more_often_and_changes_nothing(tmp_path: Path) -> None:
    plain = await played(embodied_agent, toy_episodes(3))
    recorded = await played(EpisodeRecorder(LeRobotWriter(tmp_path)).record(), toy_episodes(3))
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


async def test_an_agent_of_one_s_own_is_recorded_as_it_plays_by_chunks_and_pictures(
    tmp_path: Path,
) -> None:
    toy = EnvSpec(id=TOY.id, kwargs={**TOY.kwargs, "render_mode": "rgb_array"})
    looking = functools.partial(embodied_agent, frames_every=2)
    (plain,) = await played(looking, toy_episodes(1, toy), engine=Fixed(STILL, rows=4))
    agent = EpisodeRecorder(LeRobotWriter(tmp_path)).record(looking)
    (recorded,) = await played(agent, toy_episodes(1, toy), engine=Fixed(STILL, rows=4))
    assert [len(step.rewards) for step in recorded.steps] == [4, 2]
    for one, other in zip(plain.steps, recorded.steps, strict=True):
        assert one.frames is not None
        assert np.array_equal(one.frames, other.frames)
        assert np.array_equal(one.rewards, other.rewards)
    (episode,) = read_lerobot(tmp_path)
    assert episode.actions.tolist() == [STILL] * 6


async def test_an_episode_that_is_recorded_already_is_not_recorded_twice_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num in (1, 3):
        recorder = EpisodeRecorder(LeRobotWriter(tmp_path), "mine")
        await played(recorder.record(), toy_episodes(num))
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

    monkeypatch.setattr("vla_rl.data.lerobot.writing.os.replace", full_at_the_second_episode)
    recorder = EpisodeRecorder(LeRobotWriter(tmp_path))
    await played(recorder.record(), toy_episodes(4), num_envs=1)
    assert recorder.num_failed == 2
    assert [int(episode.about["policy_seed"]) for episode in read_lerobot(tmp_path)] == [0, 3]
    assert caplog.text.count("No space left on device") == 1
    assert [
        name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".part")
    ] == []


async def test_the_same_episodes_of_another_run_or_other_weights_are_recorded_too(
    tmp_path: Path,
) -> None:
    for run, engine in (("one", None), ("other", None), ("other", Fixed(STILL))):
        await played(
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
    agent = await recorded(
        embodied_agent, str(tmp_path), [env, EnvSpec(id="text/arithmetic")], "mine"
    )
    assert agent is not embodied_agent
    assert (common_metadata([env], "render_fps"), common_metadata([env], "robot_type")) == (
        fps,
        robot,
    )


async def test_a_run_without_pictures_is_recorded_at_its_own_rate_and_can_be_gone_on_with(
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
        await recorded(embodied_agent, str(tmp_path), [TOY, EnvSpec(id="CartPole-v1")], "mine")
    await played(EpisodeRecorder(LeRobotWriter(tmp_path, fps=20)).record(), toy_episodes(1))
    with pytest.raises(DataError, match=r"fps is 10, .* says 20"):
        await recorded(embodied_agent, str(tmp_path), [TOY], "mine")


class Fixed:
    """An engine that always gives the same answer."""

    weight_version = 4

    def __init__(self, action: list[float], log_prob: float = -1.0, rows: int = 1) -> None:
        self._chunk = ActionChunk(
            actions=np.array([action] * rows, np.float32),
            tokens=np.array(action, np.float32),
            log_probs=np.full(len(action), log_prob, np.float32),
            weight_version=4,
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return self._chunk


STILL = [0.0] * 7
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


@pytest.mark.parametrize(
    ("num_successes", "num", "low", "high"),
    # worked out by hand for 0 of 1, where centre and half are both z^2/2 / (1 + z^2); the others
    # from Wilson's equation solved as a quadratic: (p - x)^2 = z^2 x (1 - x) / n
    [
        (0, 1, 0.0, 0.793450),
        (8, 10, 0.490163, 0.943318),
        (485, 500, 0.951096, 0.981737),
        (10, 10, 0.722467, 1.0),
    ],
)
def test_wilson_s_interval(num_successes: int, num: int, low: float, high: float) -> None:
    found = wilson_interval(num_successes, num)
    assert found == pytest.approx((low, high), abs=2e-6)
    z, rate = 1.959963984540054, num_successes / num
    for end in found:
        if 0 < end < 1:
            assert (rate - end) ** 2 == pytest.approx(z * z * end * (1 - end) / num, abs=1e-9)


def test_an_interval_of_no_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 0 episodes"):
        wilson_interval(0, 0)


def result(
    task_id: int, init_state_id: int, is_success: bool = True, num_steps: int = 100
) -> EpisodeResult:
    return EpisodeResult(
        suite="libero_goal",
        task_id=task_id,
        task=f"libero_goal/{task_id}",
        instruction="turn on the stove",
        init_state_id=init_state_id,
        scene_seed=0,
        is_success=is_success,
        num_steps=num_steps,
        attempts=1,
    )


def test_results_are_on_disk_as_they_come_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with ResultFile(path) as file:
        file.add(result(1, 0))
        file.add(result(1, 1, is_success=False))
        assert len(path.read_bytes().splitlines()) == 2
    path.write_bytes(path.read_bytes() + b'{"suite": "libero_go')  # killed while it wrote
    with ResultFile(path) as file:
        assert list(file.results.values()) == [result(1, 0), result(1, 1, is_success=False)]
        file.add(result(2, 0))
    with ResultFile(path) as file:
        assert len(file.results) == 3


def test_results_that_find_no_room_are_kept_and_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "episodes.jsonl", SmallDisk(monkeypatch)
    with ResultFile(path) as file:
        file.add(result(1, 0))
        disk.room = 50  # of a line of 180 bytes
        file.add(result(1, 1))
        file.add(result(1, 2))
        assert len(path.read_bytes().splitlines()) == 1
        assert (len(file.results), file.num_waiting) == (3, 2)
        disk.room = None
        assert file.num_waiting == 0
    assert list(ResultFile(path).results) == [("libero_goal/1", state, 0) for state in (0, 1, 2)]
    assert caplog.text.count("No space left on device") == 1


def test_an_episode_stands_in_the_results_once(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "episodes.jsonl") as file:
        file.add(result(1, 0))
        with pytest.raises(ConfigError, match="twice, expected every episode once"):
            file.add(result(1, 0, is_success=False))


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text('{"suite": 3}\n')
    with pytest.raises(ConfigError, match=r"episodes\.jsonl, line 1 is not a result"):
        ResultFile(tmp_path / "episodes.jsonl")


def test_a_summary_counts_by_task() -> None:
    results = [
        result(10, 0, False, 300),
        result(2, 0, True, 80),
        result(2, 1, True, 120),
        result(2, 2, False, 300),
    ]
    assert list(by_task(results)) == ["libero_goal/2", "libero_goal/10"]
    found = summary_of(by_task(results)["libero_goal/2"])
    assert (found["successes"], found["episodes"], found["mean_steps_of_successes"]) == (2, 3, 100)
    assert summary_of([result(1, 0, False)])["mean_steps_of_successes"] is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", (0, 1, 2, 3, 4)), ("0-2", (0, 1, 2)), ("4,0-1,1", (4, 0, 1)), ("3", (3,))],
)
def test_numbers_are_lists_of_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, 5, "tasks") == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-5", "tasks are '0-5', expected numbers from 0 to 4"),
        ("3-1", "expected ascending ranges, not '3-1'"),
        ("", "expected 'all', or numbers and ranges"),
        ("1;2", "expected 'all', or numbers and ranges"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_numbers(text, 5, "tasks")


def test_the_plan_holds_every_task_state_and_scene_once_with_seeds_of_its_own() -> None:
    config = EvalLiberoConfig(
        suites=("libero_goal", "libero_object"), tasks="1,3", init_states="40-42", scene_seeds="0,7"
    )
    episodes = planned_episodes(config)
    assert len(episodes) == len({episode.policy_seed for episode in episodes}) == 2 * 2 * 3 * 2
    assert {episode.options["init_state_id"] for episode in episodes} == {40, 41, 42}
    assert {episode.env.kwargs["scene_seed"] for episode in episodes} == {0, 7}
    assert all(episode.sampling.greedy for episode in episodes)
    # a narrower plan plays the same episodes in the same way
    narrow = planned_episodes(
        msgspec.structs.replace(
            config, suites=("libero_object",), init_states="42", temperature=1.6
        )
    )
    seeds = {
        (e.task, e.options["init_state_id"], e.env.kwargs["scene_seed"]): e.policy_seed
        for e in episodes
    }
    for episode in narrow:
        key = (episode.task, 42, episode.env.kwargs["scene_seed"])
        assert seeds[key] == episode.policy_seed
        assert (episode.sampling.greedy, episode.sampling.temperature) == (False, 1.6)


def test_a_whole_suite_has_its_500_episodes() -> None:
    assert len(planned_episodes(EvalLiberoConfig(suites=("libero_spatial",)))) == 500


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": "10"}, "tasks of libero_object are '10', expected numbers from 0 to 9"),
        (
            {"init_states": "40-2147483648"},
            "init_states of libero_object/0 are '40-2147483648', expected numbers from 0 to",
        ),
        ({"suites": ("libero_goal", "libero_goal")}, "expected each once"),
        ({"suites": ()}, "expected at least one suite"),
        ({"temperature": 0.0}, "temperature is 0.0, expected above 0, or none for greedy"),
        ({"num_envs": 0}, "num_envs is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalLiberoConfig(**changed)


async def test_a_training_recipe_records_its_episodes(tmp_path: Path) -> None:
    small = small_run(tmp_path / "runs")
    one = msgspec.structs.replace(small.run, updates=1, record_to=str(tmp_path / "data"))
    config = msgspec.structs.replace(small, run=one)
    assert await main(Command(TrainingLaunch(), config)) == 0
    episodes = read_lerobot(tmp_path / "data")
    assert len(episodes) >= 4  # an update of two groups of two, and what was begun beyond it
    assert {episode.about["weight_version"] for episode in episodes} <= {0, 1}
    assert all(episode.frames["image"](0).shape == (32, 32, 3) for episode in episodes)


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


def without_libero(package: str) -> Any:
    raise ImportError("LIBERO is not installed; run `pip install it`.")


def test_without_libero_an_evaluation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero_tasks, "package_root", without_libero)
    with pytest.raises(ConfigError, match="suites: LIBERO is not installed; run `pip install it`"):
        EvalLiberoConfig()
    with pytest.raises(ConfigError, match="tasks: LIBERO is not installed"):
        libero.parse_tasks(("libero_goal",), "tasks")


def test_conditions_are_how_episodes_are_played_and_not_which() -> None:
    episodes = planned_episodes(
        EvalLiberoConfig(
            checkpoint="theirs",
            init_states="0-1",
            tasks="0-1",
            scene_seeds="0-1",
            scenes="same",
            temperature=0.5,
        )
    )
    assert len(episodes) == 8
    assert conditions_of_play(episodes) == {
        "assets": None,
        "image_size": 256,
        "physics": "exact",
        "quality": "exact",
        "step_limit": None,
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EvalLiberoConfig(tasks="0", init_states="0"), (84, "fast")),
        (EvalLiberoConfig(checkpoint="theirs", tasks="0", init_states="0"), (256, "exact")),
        (
            EvalLiberoConfig(tasks="0", init_states="0", image_size=64, quality="exact"),
            (64, "exact"),
        ),
    ],
)
def test_pictures_are_those_that_a_policy_was_taught_with_unless_others_are_asked_for(
    config: EvalLiberoConfig, expected: tuple[int, str]
) -> None:
    (episode,) = planned_episodes(config)
    assert (episode.env.kwargs["image_size"], episode.env.kwargs["quality"]) == expected


def test_a_plan_names_the_gpu_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "gpu_memory", lambda: [SimpleNamespace(name="H100")])
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    for device, computes in (("cpu", "(CPU)"), ("auto", "(H100)")):
        on_device = msgspec.structs.replace(
            config, run=msgspec.structs.replace(config.run, device=device)
        )
        plan.print_plan(on_device, footprint, 1, 1)
        assert computes in capsys.readouterr().out
