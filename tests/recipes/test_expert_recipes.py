"""Recipes whose actions are an expert's: the recorder of demonstrations, DAgger.

What cannot be recorded is refused before anything is simulated; another policy is an expert too.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import DeviceLane, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import Assets
from vla_rl.errors import ConfigError, EnvError
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.models.example_inputs import example_observation
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.shipped import PLACEHOLDER_BASE_POLICY, SHIPPED
from vla_rl.models.steered import SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import record_demonstrations
from vla_rl.recipes.dagger_libero import DaggerLiberoConfig, open_agent
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.recipes.record_demonstrations import RecordConfig, task_folder, write_settings
from vla_rl.recipes.srpo_libero import HeldOutConfig
from vla_rl.recipes.suite_training import training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import EpisodePolicy, SchedulerConfig
from vla_rl.rollout.expert_agent import InterventionConfig
from vla_rl.run.train import train
from vla_rl.types import ChunkOutcome, EnvSpec, EpisodeSpec, Info, Observation, Sampling


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"suite": "libero_91"},
            "suite is 'libero_91', expected one of libero_spatial, libero_object",
        ),
        ({"init_state_ids": (-1,)}, "expected numbers from 0 to 2147483647, at least one, or none"),
        ({"task_ids": (1, 99)}, "task_id is 99, expected 0 to 9: libero_object has 10 tasks"),
    ],
)
def test_a_configuration_that_cannot_be_recorded_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordConfig(**changed)


def test_a_folder_of_demonstrations_is_gone_on_with_only_as_it_was_recorded(tmp_path: Path) -> None:
    assets = Assets(tmp_path / "assets", "configured")
    config = RecordConfig(out=str(tmp_path / "demos"))
    write_settings(config, assets)
    write_settings(msgspec.structs.replace(config, num=40, workers=2, task_ids=(1, 2)), assets)
    with pytest.raises(ConfigError, match=r"noise is 0\.0 now, but .*1\.settings\.json says 0\.25"):
        write_settings(msgspec.structs.replace(config, noise=0.0), assets)
    with pytest.raises(ConfigError, match=r"assets is .*others"):
        write_settings(config, Assets(tmp_path / "others", "configured"))


def test_demonstrations_of_unknown_settings_are_left_alone(tmp_path: Path) -> None:
    config = RecordConfig(out=str(tmp_path))
    folder = task_folder(config, 1)
    folder.mkdir(parents=True)
    (folder / "0000.npz").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"holds demonstrations, but .*1\.settings\.json, their settings, is missing",
    ):
        write_settings(config, Assets(tmp_path, "configured"))


def test_an_environments_own_error_ends_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(command: object) -> int:
        raise EnvError("mujoco is 3.9")

    monkeypatch.setattr(record_demonstrations, "main", broken)
    monkeypatch.setattr(sys, "argv", ["record_demonstrations"])
    assert record_demonstrations.cli() == 2
    assert capsys.readouterr().err == "error: mujoco is 3.9\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "task_ids",
    # in the suite, one worker of two has a task: the other one solves it as well, at the same cost
    [pytest.param(("7", "8"), marks=pytest.mark.proof), ("7",)],
    ids=["both record", "one records"],
)
def test_what_two_workers_record_replays_to_success(
    task_ids: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["record_demonstrations", "--suite", "libero_goal", "--out", str(tmp_path)]
    tasks = [
        "--task-ids",
        *task_ids,
        "--num",
        "1",
        "--scene-seeds",
        "5",
        "--workers",
        "2",
        "--noise",
        "0.25",
    ]
    looks = ["--assets", "stand-ins", "--image-size", "32", "--no-wrist-image", "--quality", "fast"]
    monkeypatch.setattr(sys, "argv", [*command, *tasks, *looks])
    assert record_demonstrations.cli() == 0
    for task_id in map(int, task_ids):
        files = sorted((tmp_path / "libero_goal" / str(task_id)).iterdir())
        assert [file.name for file in files] == ["0000.npz"]
        with np.load(files[0], allow_pickle=False) as saved:
            recorded = dict(saved)
        assert recorded["scene_seed"] == 5
        assert str(recorded["task"]) == f"libero_goal/{task_id}"
        assert (recorded["executed_action"] != recorded["action"]).any(axis=1).all()
        _replay(recorded, task_id)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_end_with_a_recorder_that_is_killed(tmp_path: Path) -> None:
    recording = (sys.executable, "-m", "vla_rl.recipes.record_demonstrations", "--workers", "1")
    options = ("--out", str(tmp_path), "--task-ids", "1", "--assets", "stand-ins", "--num", "30")
    with subprocess.Popen([*recording, *options, "--image-size", "16"]) as recorder:
        # killed in the middle of a task, which lasts for minutes
        while not (first := list(tmp_path.glob("*/1/0000.npz"))) and recorder.poll() is None:
            time.sleep(0.1)
        workers = psutil.Process(recorder.pid).children(recursive=True)
        recorder.kill()
    assert first
    assert len(workers) >= 1
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def _replay(recorded: dict[str, np.ndarray], task_id: int) -> None:
    """The executed actions, run again from the same start, give the same states, and succeed
    with the last one.

    The first image is the same too: in the quality that was asked for.
    """
    env = LiberoEnv(
        "libero_goal",
        task_id,
        "stand-ins",
        image_size=32,
        wrist_image=False,
        scene_seed=int(recorded["scene_seed"]),
        physics="fast",
        quality="fast",
    )
    env.render_every_step = False
    try:
        observation, _ = env.reset(options={"init_state_id": int(recorded["init_state_id"])})
        np.testing.assert_array_equal(observation["image"], recorded["image"][0])
        ends = []
        for state, action in zip(recorded["state"], recorded["executed_action"], strict=True):
            np.testing.assert_array_equal(observation["state"], state)
            observation, _, terminated, _, _ = env.step(action)
            ends.append(terminated)
    finally:
        env.close()
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    OpenVlaOft.create(tiny(), seed=0).save(folder)
    return folder


def small(tmp_path: Path, base: Path, **changed: Any) -> DaggerLiberoConfig:
    return DaggerLiberoConfig(
        run=RunConfig(name="dagger", root=str(tmp_path), updates=1),
        tasks=("libero_goal/8",),
        assets="stand-ins",
        step_limit=16,
        image_size=64,
        policy=str(base),
        simulators=SimulatorConfig(num_envs=1),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        off_policy=OffPolicyConfig(algorithm="dagger", first_rows=1, batch=8),
        held_out=HeldOutConfig(init_states=None),
        **changed,
    )


@pytest.mark.timeout(300)
async def test_a_head_is_trained_on_what_the_scripted_expert_of_libero_does(
    tmp_path: Path, base: Path
) -> None:
    config = small(tmp_path, base, intervention=InterventionConfig(beta=0.5))
    model = config.load_starting_policy()
    before = {name: each.clone() for name, each in model.network.state_dict().items()}
    async with open_agent(config) as agent:
        outcome = await train(config, training_starts(config), model, agent=agent)
    assert any(not before[name].equal(each) for name, each in model.network.state_dict().items())
    (line,) = read_metrics(outcome.run.path / "metrics.jsonl")
    assert 0.0 < line["replay/intervened_share"] < 1.0
    assert line["off_policy/steps"] > 0


class Still:
    """An environment in which nothing happens, with the observations that the base reads."""

    def __init__(self, seen: Observation) -> None:
        self.episode = EpisodeSpec(
            episode_id=0, group_id=0, member=0, env=EnvSpec(id="still"), task="t", seed=0, policy_seed=0
        )  # fmt: skip
        self._seen = seen

    async def reset(self) -> tuple[Observation, Info]:
        return self._seen, {}

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        rewards = np.zeros(len(actions), np.float32)
        return ChunkOutcome(
            observation=self._seen, rewards=rewards, terminated=False, truncated=True, info={}
        )


@pytest.mark.parametrize("named", [False, True])
async def test_the_expert_may_be_another_policy_in_this_process(
    tmp_path: Path, base: Path, named: bool
) -> None:
    expert = str(tmp_path / "expert")
    other = OpenVlaOft.create(tiny(), seed=1)
    other.save(Path(expert))
    if named:
        expert, other = SHIPPED, OpenVlaOft.load(PLACEHOLDER_BASE_POLICY)
    config = small(tmp_path, base, expert=expert, intervention=InterventionConfig(beta=0.0))
    assert training_starts(config)[0].env.id == "vla_rl/libero_goal-v0"
    seen = example_observation(other, 0)
    assert seen is not None
    env = Still(seen)
    model = config.load_starting_policy()
    async with (
        open_agent(config) as agent,
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, config.engine) as engine,
        TorchActionEngine(other, lane, config.engine) as asked,
    ):
        trajectory = await agent(env, EpisodePolicy(engine, env.episode))
        expected = await asked.act(seen, Sampling(greedy=True))
    (step,) = trajectory.steps
    assert step.expert_actions is not None
    assert np.array_equal(step.expert_actions, expected.actions)
    assert not np.array_equal(step.chunk.actions, expected.actions)


def test_without_another_expert_the_environments_suggest(tmp_path: Path, base: Path) -> None:
    env = training_starts(small(tmp_path, base))[0].env
    assert (env.id, env.kwargs["expert_rows"]) == ("vla_rl/libero_goal-expert-v0", 8)


def test_a_head_that_steers_and_reads_beyond_the_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind is 'noise', expected residual: an expert's chunk"):
        DaggerLiberoConfig(steering=SteeringConfig(kind="noise"))
    with pytest.raises(ConfigError, match="proprio_size is 9, expected at most 8"):
        OffPolicyLiberoConfig(steering=SteeringConfig(proprio_size=9))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--expert", "x", "--expert-rows", "4"], "expert_rows is 4"),
        (["--replay.from", "x", "--expert", "ws://h:1"], "expert is 'ws://h:1'"),
        (["--replay.from", "x", "--intervention.beta", "0.1"], "intervention.beta is 0.1"),
    ],
)
def test_options_of_an_expert_that_is_not_asked_are_refused(
    arguments: list[str], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"{option}, but nothing would read it"):
        parse_command(TrainingLaunch, DaggerLiberoConfig, "", arguments)


def test_options_of_a_policy_server_are_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="no policy server"):
        parse_command(TrainingLaunch, DaggerLiberoConfig, "", ["--server.replan", "4"])
