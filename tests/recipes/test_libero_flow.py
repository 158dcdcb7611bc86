"""The shipped flow policy in LIBERO: its settings of four pipelines, and a run as short as it goes."""

import asyncio
from pathlib import Path

import pytest

from vla_rl.cli.command_line import Command, TrainingLaunch, parse_command
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.recipes import grpo_libero, ppo_libero, srpo_libero
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.suite_training import starting_policy
from vla_rl.reporting import read_metrics

CONFIGS = {
    "ppo": ppo_libero.PpoLiberoConfig,
    "grpo": grpo_libero.GrpoLiberoConfig,
    "nft": grpo_libero.GrpoLiberoConfig,
    "srpo": SrpoLiberoConfig,
}


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
