"""Recipes of flow policies: training starts from a folder, with a chain and a part to train.

The shipped policy in LIBERO by its settings of four pipelines, the reaching task with images from
demonstrations over a base to reinforcement learning: both as small as they go.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow, load_small_flow
from vla_rl.models.loading import CheckpointFormat
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.prismatic.action_tokens import ActionBounds
from vla_rl.recipes import grpo_libero, ppo_libero, sft_toy, srpo_libero, train_toy
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.sft_toy import SftToyConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.suite_training import starting_policy
from vla_rl.recipes.train_toy import REACH, TrainToyConfig
from vla_rl.reporting import read_metrics

SHAPE = SmallFlowConfig(
    actions=ActionBounds(low=(-1.0,) * 7, high=(1.0,) * 7, is_scaled=(True,) * 7),
    state=StateConfig(mean=(0.0,) * 8, std=(1.0,) * 8),
    cameras=("image", "wrist_image"),
    image_size=16,
    depth=2,
    num_heads=2,
    width=32,
    expert_width=24,
)
NFT = LearnerConfig(loss=PolicyLossConfig(name="nft"))

CONFIGS = {
    "ppo": ppo_libero.PpoLiberoConfig,
    "grpo": grpo_libero.GrpoLiberoConfig,
    "nft": grpo_libero.GrpoLiberoConfig,
    "srpo": SrpoLiberoConfig,
}

SMALL = ("--updates", "2", "--episodes", "3", "--batch", "4", "--width", "16", "--draws", "1")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    create_small_flow(SHAPE, seed=0).save(tmp_path / "flow")
    return str(tmp_path / "flow")


def start(
    folder: str,
    learner: LearnerConfig | None = None,
    train: Any = "all",
    lora_rank: int | None = None,
    **options: Any,
) -> Any:
    config = SrpoLiberoConfig(
        policy=folder,
        policy_format=CheckpointFormat(**options),
        train=train,
        lora_rank=lora_rank,
        learner=learner or LearnerConfig(),
    )
    return starting_policy(config)


def test_a_flow_policy_is_trained_whole_with_the_folders_chain(folder: str) -> None:
    policy = start(folder)
    assert isinstance(policy, FlowPolicy)
    assert policy.config.sampling == load_small_flow(Path(folder)).config.sampling
    assert all(parameter.requires_grad for parameter in policy.network.parameters())


def test_images_are_drawn_at_the_size_that_the_folder_sees(folder: str) -> None:
    assert EvalLiberoConfig(checkpoint=folder).scene.image_size == SHAPE.image_size
    other = SrpoLiberoConfig(policy=folder, image_size=84)
    with pytest.raises(ConfigError, match=r"sees images of 16 pixels .* but 84 are to be drawn"):
        starting_policy(other)


def test_a_chain_that_was_chosen_is_saved_with_the_policy(folder: str, tmp_path: Path) -> None:
    policy = start(folder, flow_steps=3, noise_level=0.2)
    policy.save(tmp_path / "again")
    sampling = load_small_flow(tmp_path / "again").config.sampling
    assert (sampling.num_steps, sampling.noise_level) == (3, 0.2)


def test_the_expert_alone_may_be_trained(folder: str) -> None:
    policy = start(folder, train="expert")
    trained = {name for name, each in policy.network.named_parameters() if each.requires_grad}
    frozen = {name for name, each in policy.network.named_parameters() if not each.requires_grad}
    assert any(name.startswith("stem.") for name in frozen)
    assert any(name.startswith("action_out.") for name in trained)
    assert not any(name.startswith(("stem.", "reader")) for name in trained)


def test_adapters_may_be_trained_instead_of_the_weights(folder: str) -> None:
    policy = start(folder, train="expert", lora_rank=2)
    trained = {name for name, each in policy.network.named_parameters() if each.requires_grad}
    assert any(".lora_A." in name for name in trained)
    assert all(".lora_" in name or name.startswith(("action_", "time_")) for name in trained)
    assert policy.has_frozen_prefix


def test_without_noise_a_ratio_is_refused_before_anything_starts(folder: str) -> None:
    with pytest.raises(ConfigError, match="noise level is 0"):
        start(folder, noise_level=0.0)
    assert start(folder, NFT, noise_level=0.0).config.sampling.noise_level == 0.0
    exact = PolicyLossConfig(kl=KlLossConfig(coef=0.1, estimator="exact"))
    assert start(folder, LearnerConfig(loss=exact)).has_likelihood


def test_the_expert_of_a_policy_without_one_is_refused(tmp_path: Path) -> None:
    shape = MlpConfig(state_size=8, action_low=(-1.0,) * 7, action_high=(1.0,) * 7, num_bins=3)
    MlpPolicy.create(shape, seed=0).save(tmp_path / "mlp")
    assert isinstance(start(str(tmp_path / "mlp")), MlpPolicy)
    with pytest.raises(
        ConfigError, match="--train expert is set, but a MlpPolicy has no method `train_expert`"
    ):
        start(str(tmp_path / "mlp"), train="expert")
    with pytest.raises(ConfigError, match="compares predictions of a flow policy"):
        start(str(tmp_path / "mlp"), NFT)


def test_a_camera_that_libero_lacks_is_named(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SHAPE, cameras=("image", "left"))
    create_small_flow(shape, seed=0).save(tmp_path / "flow")
    with pytest.raises(ConfigError, match="needs the camera 'left'"):
        start(str(tmp_path / "flow"))


def read(name: str, *options: str) -> Command[TrainingLaunch, SrpoLiberoConfig]:
    return parse_command(
        TrainingLaunch, CONFIGS[name], "", ["--config", f"libero_flow_{name}", *options]
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_of_settings_trains_the_shipped_flow_on_equally_many_episodes(name: str) -> None:
    config = read(name).config
    policy = starting_policy(config)
    assert isinstance(policy, FlowPolicy)
    assert policy.has_likelihood
    assert config.temperature == 1.0
    episodes = config.group_size * config.scheduler.groups_per_update
    assert (episodes, config.run.updates) == (32, read("ppo").config.run.updates)
    assert config.held_out == read("ppo").config.held_out


@pytest.mark.timeout(300)
def test_ppo_trains_the_shipped_flow_in_real_libero(tmp_path: Path) -> None:
    short = (
        *("--run.root", str(tmp_path), "--run.updates", "1", "--tasks", "libero_goal/8"),
        *("--assets", "stand-ins", "--step-limit", "16", "--scheduler.groups-per-update", "1"),
        *("--scheduler.max-staleness", "0", "--simulators.num-envs", "1"),
        # without a success there is no advantage, and an update without signal would stand still
        *("--held-out.init-states", "None", "--learner.entropy-coef", "0.01"),
    )
    assert asyncio.run(srpo_libero.main(read("ppo", *short))) == 0
    (run,) = tmp_path.iterdir()
    (metrics,) = read_metrics(run / "metrics.jsonl")
    assert metrics["update/decisions"] == 2
    assert metrics["update/log_prob_gap_max"] <= 1e-5
    trained = load_small_flow(run / "checkpoints/update-000001/policy")
    start = starting_policy(read("ppo").config)
    assert isinstance(start, FlowPolicy)
    assert trained.config.sampling == start.config.sampling
    # an evaluation shows it the images of its training
    evaluation = EvalLiberoConfig(checkpoint=str(run / "checkpoints/update-000001/policy"))
    assert (evaluation.scene.image_size, evaluation.scene.quality) == (84, "fast")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "reach_base"
    options = [*SMALL, "--out", str(out), "--noise-level", "0.3"]
    command = parse_command(Launch, SftToyConfig, "", options)
    assert asyncio.run(sft_toy.main(command)) == 0
    return out


def test_the_base_keeps_its_chain(base: Path) -> None:
    sampling = load_small_flow(base).config.sampling
    assert (sampling.num_steps, sampling.noise_level) == (4, 0.3)


@pytest.mark.parametrize("name", ["reach_ppo", "reach_grpo", "reach_nft"])
def test_every_file_of_settings_trains_the_base(name: str, base: Path, tmp_path: Path) -> None:
    short = (
        *("--run.root", str(tmp_path), "--run.updates", "2", "--held-out.starts", "2"),
        *("--scheduler.groups-per-update", "2", "--simulators.num-envs", "1", "--step-limit", "4"),
    )
    options = ["--config", name, "--policy", str(base), *short]
    command = parse_command(TrainingLaunch, TrainToyConfig, "", options)
    assert asyncio.run(train_toy.main(command)) == 0
    (run,) = tmp_path.iterdir()
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    before, after = (
        load_small_flow(each) for each in (base, run / "checkpoints/update-000002/policy")
    )
    assert before.config == after.config


def test_demonstrated_chunks_reach_the_square() -> None:
    demonstrations = sft_toy.demonstrate(SftToyConfig(episodes=5))
    first = demonstrations[0]
    assert first.observation["instruction"] == "reach the red square"
    assert first.actions.shape == (4, 2)
    assert np.abs(first.actions).max() <= 1.0
    # the last chunk of an episode has one row left
    assert {each.num_valid for each in demonstrations} >= {1, 2}


def test_a_flow_policy_is_refused_where_it_would_see_no_images() -> None:
    with pytest.raises(ConfigError, match=f"policy is 'base', expected none, or --env-id {REACH}"):
        TrainToyConfig(policy="base")
