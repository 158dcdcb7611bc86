"""A run from its first update to its last: its files, its end, what it refuses before it starts."""

import asyncio
import json
import math
import os
import shutil
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from toy_runs import (
    SHARES_SERVERS,
    deterministic,
    get_servers,
    of_updates,
    small_mlp_run,
    small_run as small_reach_run,
)

import vla_rl
from vla_rl.actors import LastingForkServers
from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.command_line import read_config
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import CheckpointError, ConfigError, EnvError
from vla_rl.graph import Pipeline
from vla_rl.learner import CriticConfig, OptimizerConfig, latest_checkpoint
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.pipelines.config import FilterConfig, RunConfig, TrainingConfig
from vla_rl.pipelines.registry import customise_pipeline, refuse_unused_settings
from vla_rl.recipes import srpo_toy
from vla_rl.recipes.srpo_toy import (
    SrpoToyConfig,
    new_policy as reach_policy,
    training_starts as reach_starts,
)
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import TaskStart, embodied_agent
from vla_rl.run.parts import TrainingParts, group_filter
from vla_rl.run.train import Outcome, TrainingRun, check_arguments, train
from vla_rl.team.members import Member, Team
from vla_rl.types import Env, EnvSpec, Policy, Trajectory

PACKAGE = Path(vla_rl.__file__).parent

pytestmark = SHARES_SERVERS


def small_run(root: Path) -> TrainToyConfig:
    """SRPO, and a video of each update."""
    return small_mlp_run(root, "embodied_srpo", videos_every=1)


async def train_toy(config: TrainToyConfig, **options: Any) -> Outcome:
    async with asyncio.timeout(100):
        return await train(
            config,
            training_starts(config),
            new_policy(config),
            fork_servers=get_servers(),
            **options,
        )


def metrics_of(run: RunDirectory) -> dict[int, dict[str, float]]:
    return {int(line["update"]): line for line in read_metrics(run.metrics)}


def weights_of(run: RunDirectory) -> dict[str, torch.Tensor]:
    folder = latest_checkpoint(run.checkpoints)
    assert folder is not None
    return load_file(folder / "policy" / "model.safetensors")


def with_updates(config: TrainToyConfig, updates: int) -> TrainToyConfig:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, updates=updates))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, servers: LastingForkServers) -> Outcome:
    """A deterministic run of two updates, on two simulators."""
    root = tmp_path_factory.mktemp("whole")
    config = deterministic(small_run(root), num_envs=2)
    async with asyncio.timeout(100):
        return await train(
            config, training_starts(config), new_policy(config), fork_servers=servers
        )


def test_a_run_leaves_everything_that_the_readme_lists(whole: Outcome) -> None:
    run = whole.run
    assert whole.progress.update == 2
    assert whole.progress.num_episodes == 8
    config = deterministic(small_run(run.path.parent), num_envs=2)
    assert read_config(run.config, TrainToyConfig) == config
    assert sorted(metrics_of(run)) == [1, 2]
    assert json.loads(run.trace().read_text())
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [
        "update-000001",
        "update-000002",
    ]
    assert list(run.tensorboard.iterdir())
    assert list(run.videos.glob("*.mp4"))


async def test_episodes_are_conserved_and_the_first_ratio_is_one(tmp_path: Path) -> None:
    outcome = await train_toy(small_run(tmp_path))
    metrics = metrics_of(outcome.run)
    assert metrics[1]["update/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics[2]["rollout/staleness/max"] == 0
    assert metrics[2]["simulation/leases"] == 8


async def test_the_learning_rate_decays_until_the_last_step_of_the_run(tmp_path: Path) -> None:
    small = small_run(tmp_path)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0, decay_steps="run", final_lr_share=0.0)
    # two updates of four episodes, in steps of two
    learner = msgspec.structs.replace(small.learner, optimizer=optimizer, minibatch_trajectories=2)
    outcome = await train_toy(msgspec.structs.replace(small, learner=learner))
    rates = [line["update/lr"] for line in metrics_of(outcome.run).values()]
    # the last steps of the updates are steps 1 and 3 of 0 to 3
    assert rates == pytest.approx([1e-3 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 3)])


async def test_a_resumed_run_goes_on_where_it_was(whole: Outcome, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole.run.path, tmp_path / "run"))
    config = with_updates(deterministic(small_run(tmp_path), num_envs=2), 3)
    again = await train_toy(config, resume=RunDirectory.resume(path))
    assert again.run.path == path
    assert sorted(metrics_of(again.run)) == [1, 2, 3]
    assert again.progress.num_episodes == 4
    assert again.run.trace(2).exists()


async def test_a_deterministic_run_does_not_depend_on_the_number_of_simulators(
    whole: Outcome, tmp_path: Path
) -> None:
    three = await train_toy(deterministic(small_run(tmp_path / "three"), num_envs=3))
    weights, others = weights_of(whole.run), weights_of(three.run)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    untrained = new_policy(small_run(tmp_path)).checkpoint_tensors()
    assert any(not torch.equal(weights[name], untrained[name]) for name in weights)


async def test_a_deterministic_run_that_was_interrupted_ends_with_the_same_weights(
    whole: Outcome, tmp_path: Path
) -> None:
    config = deterministic(small_run(tmp_path), num_envs=2)
    half = await train_toy(with_updates(config, 1))
    rest = await train_toy(config, resume=RunDirectory.resume(half.run.path))
    weights, others = weights_of(whole.run), weights_of(rest.run)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


async def test_a_simulator_that_is_killed_changes_nothing_but_one_counter(tmp_path: Path) -> None:
    run: list[TrainingRun] = []
    killed: list[int] = []

    async def agent(env: Env, policy: Policy) -> Trajectory:
        if env.episode.episode_id == 2 and not killed:
            await env.reset()
            killed.extend(run[0].simulator_pids)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return await embodied_agent(env, policy)

    config = msgspec.structs.replace(small_run(tmp_path), simulators=SimulatorConfig(num_envs=1))
    run.append(
        TrainingRun(
            config,
            training_starts(config),
            new_policy(config),
            agent=agent,
            fork_servers=get_servers(),
        )
    )
    async with asyncio.timeout(100):
        outcome = await run[0].execute(RunDirectory.create(tmp_path, "killed", config))
    metrics = metrics_of(outcome.run)
    assert outcome.progress.update == 2
    assert outcome.progress.num_episodes == 8
    assert metrics[2]["rollout/lost/died"] == 1
    assert metrics[2]["simulation/replaced/died"] == 1


async def test_an_environment_that_raises_ends_the_run_with_its_own_traceback(
    tmp_path: Path,
) -> None:
    spec = EnvSpec(id="vla_rl/faulty-v0", kwargs={"fault": "raise", "at_step": 3})
    policy = OpenVlaOft.create(
        tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=4), seed=0
    )
    with pytest.raises(EnvError) as caught:
        async with asyncio.timeout(60):
            await train(small_run(tmp_path), [TaskStart(env=spec, task="faulty")], policy)
    assert "vla_rl/faulty-v0" in str(caught.value)
    assert "toy.py" in "".join(caught.value.__notes__)
    assert any(note.startswith("while running episode") for note in caught.value.__notes__)


async def test_a_mistake_in_an_agent_ends_train_with_the_frames_of_the_agent_alone(
    tmp_path: Path,
) -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        observation, _ = await env.reset()
        raise KeyError(f"imag, in {sorted(observation)}")

    with pytest.raises(KeyError) as caught:
        await train_toy(small_run(tmp_path), agent=agent)
    text = "".join(traceback.format_exception(caught.value))
    frames = [
        frame
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    assert [Path(frame.filename).name for frame in frames] == ["terminal.py"]
    assert 'raise KeyError(f"imag, in' in text
    assert "while running episode" in text
    assert "During handling" not in text
    assert len(text.splitlines()) < 25


async def test_what_train_is_given_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    config, policy = small_run(tmp_path), new_policy(small_run(tmp_path))
    starts = training_starts(config)
    for arguments, options, message in (
        ((starts, config, policy), {}, "config is of type list, expected a TrainingConfig"),
        ((config, [], policy), {}, "starts is empty"),
        (
            (config, starts[0], policy),
            {},
            r"starts is of type TaskStart, expected a list .* \[TaskStart",
        ),
        (
            (config, [starts[0].env], policy),
            {},
            r"starts\[0\] is of type EnvSpec, expected a TaskStart",
        ),
        ((config, starts, policy), {"agent": "mine"}, "agent is of type str, expected a function"),
        (
            (config, starts, policy),
            {"agent": lambda env: None},
            r"agent <lambda>\(env\) cannot be called .* expected `async def agent\(env, policy\)`$",
        ),
        (
            (config, starts, policy),
            {"agent": type("Mine", (), {})},
            "; give an object of the class$",
        ),
        (
            (config, starts, policy),
            {"customise": "mine"},
            "customise is 'mine', expected a function that takes the pipeline",
        ),
        (
            (config, starts, policy),
            {"customise": lambda _: None},
            "customise returned None, .* is a `return` missing",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            await train(*arguments, **options)
    assert not await asyncio.to_thread(os.listdir, tmp_path)


async def test_a_run_directory_that_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    in_the_way = tmp_path / "runs"
    in_the_way.write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="cannot be written"):
        await train_toy(small_run(in_the_way))


async def test_a_run_without_a_whole_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    run = RunDirectory.create(tmp_path, "empty", config)
    (run.checkpoints / "update-000001").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        await train_toy(config, resume=run)


async def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    config = with_updates(small_run(tmp_path), 1)
    first = await train_toy(config)
    tensors = first.run.checkpoints / "update-000001" / "policy" / "model.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        await train_toy(with_updates(config, 2), resume=first.run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "group_size is 1, expected at least 2"),
        ({"filter": {"accuracy_bounds": (0.9, 0.1)}}, "two rates, the lower one first"),
        ({"simulators": {"num_envs": 9}}, "8 < num_envs = 9"),
        (
            {"scheduler": {"groups_per_update": 2, "max_staleness": 0, "deterministic": True}},
            "expected both or neither",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    settings = msgspec.to_builtins(
        SrpoToyConfig(
            run=RunConfig(root=str(tmp_path)), group_size=4, scheduler=small_run(tmp_path).scheduler
        )
    )
    with pytest.raises((ConfigError, msgspec.ValidationError)) as caught:
        msgspec.convert({**settings, **change}, SrpoToyConfig)
    assert message in str(caught.value)


# test_pipelines.py trains a pole within fewer updates
@pytest.mark.proof
async def test_srpo_trains_the_toy_task(tmp_path: Path) -> None:
    config = SrpoToyConfig(
        run=RunConfig(name="learns", root=str(tmp_path), updates=12, checkpoint_every=12)
    )
    async with asyncio.timeout(600):
        outcome = await train(config, srpo_toy.training_starts(config), srpo_toy.new_policy(config))
    rates = [
        metrics["reward/success_rate"] for _, metrics in sorted(metrics_of(outcome.run).items())
    ]
    assert float(np.mean(rates[-5:])) > rates[0] + 0.2


def test_a_run_in_a_thread_trains_as_any_other(tmp_path: Path) -> None:
    config = of_updates(tmp_path, 1)
    found: list[Outcome] = []

    def main() -> None:
        found.append(asyncio.run(train(config, training_starts(config), new_policy(config))))

    thread = threading.Thread(target=main)
    thread.start()
    thread.join(100)
    assert [outcome.progress.update for outcome in found] == [1]


START = TaskStart(env=EnvSpec(id="x"), task="x")


async def nothing(update: int) -> None: ...


def pipeline() -> Pipeline:
    return Pipeline("mine", inputs="update").add_node("nothing", nothing, reads="update")


@pytest.mark.parametrize(
    ("config", "starts", "agent", "message"),
    [
        ("fast", [START], None, "config is of type str, expected a TrainingConfig"),
        (TrainingConfig(), START, None, "starts is of type TaskStart, expected a list"),
        (TrainingConfig(), [], None, "starts is empty"),
        (TrainingConfig(), [START, "x"], None, r"starts\[1\] is of type str"),
        (TrainingConfig(), [START], 3, "agent is of type int, expected a function"),
    ],
)
def test_a_wrong_argument_is_named(config: Any, starts: Any, agent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(config, starts, agent)


def test_a_forgotten_return_is_suspected() -> None:
    with pytest.raises(ConfigError, match=r"customise returned None, .* is a `return` missing"):
        customise_pipeline(pipeline(), lambda each: None)
    assert customise_pipeline(pipeline(), lambda each: each).id == "mine"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainingConfig(run=RunConfig(videos_every=2)), "run.videos_every is 2, .* no videos"),
        (TrainingConfig(critic=CriticConfig(epochs=9)), "critic.epochs is 9, .* has no critic"),
    ],
)
def test_a_setting_is_refused_only_if_nothing_reads_it(
    config: TrainingConfig, message: str
) -> None:
    graph = pipeline().build()
    with pytest.raises(ConfigError, match=message):
        refuse_unused_settings(config, graph, has_critic=False, makes_videos=False)
    refuse_unused_settings(config, graph, has_critic=True, makes_videos=True)


@pytest.mark.parametrize("name", ["gae", "marft_gae"])
def test_an_advantage_that_needs_a_critic_is_refused_without_one(name: str, tmp_path: Path) -> None:
    config = msgspec.structs.replace(small_run(tmp_path), advantage=AdvantageConfig(name=name))
    with pytest.raises(ConfigError, match=rf"'{name}', which uses a critic's values, .* use ppo"):
        TrainingRun(config, training_starts(config), new_policy(config))


def parts_of(team: Team, root: Path) -> TrainingParts:
    config = small_reach_run(root)
    return TrainingParts(config, reach_starts(config), team, agent=embodied_agent)


def test_the_only_policy_is_that_of_the_run_under_any_name(tmp_path: Path) -> None:
    policy = reach_policy(small_reach_run(tmp_path))
    assert parts_of(Team.of(policy), tmp_path).model is policy
    assert parts_of(Team({"robot": Member(policy)}), tmp_path).model is policy


def test_a_critic_exists_once_a_pipeline_asks_for_it(tmp_path: Path) -> None:
    parts = parts_of(Team.of(reach_policy(small_reach_run(tmp_path))), tmp_path)
    assert not parts.has_critic
    assert parts.critic is parts.critic
    assert parts.has_critic


def test_without_a_filter_no_group_is_looked_at() -> None:
    assert group_filter(FilterConfig()) is None
    assert group_filter(FilterConfig(drop_equal="return")) is not None
