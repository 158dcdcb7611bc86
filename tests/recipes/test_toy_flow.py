"""The reaching task with images, as small as it goes: demonstrations, a base, reinforcement learning."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.recipes import sft_toy, train_toy
from vla_rl.recipes.sft_toy import SftToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig

SMALL = ("--updates", "2", "--episodes", "3", "--batch", "4", "--width", "16", "--draws", "1")


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
