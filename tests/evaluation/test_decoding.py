"""A policy with action tokens can act by their means wherever it does not learn; others refuse that at once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from small_episodes import make_drawing_policy
from small_policies import token_policy

from vla_rl.cli import evaluate
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch, parse_command
from vla_rl.cli.compare import refuse_other_settings
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.cli.serve import ServeConfig, serve_policy
from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutEvaluator
from vla_rl.evaluation.conditions import record_conditions, refuse_other_conditions
from vla_rl.evaluation.config import (
    describe_conditions,
    evaluation_conditions,
    planned_episodes,
    refuse_other_config,
)
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, tiny
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.shipped import BASE_POLICY, SHIPPED_FLOW
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.recipes import srpo_toy, suite_training, train_toy
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.recipes.held_out_starts import HeldOutStarts
from vla_rl.recipes.srpo_libero import HeldOutConfig, SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.srpo_toy import HeldOutReaches, SrpoToyConfig
from vla_rl.recipes.train_toy import HeldOutSeeds, TrainToyConfig
from vla_rl.run.training_run import TrainingRun
from vla_rl.types import Sampling


@pytest.mark.parametrize("config_type", [EvalLiberoConfig, EvalMetaworldConfig])
@pytest.mark.parametrize(
    ("options", "sampling", "words"),
    [
        ({}, Sampling(greedy=True), "actions: greedy;"),
        ({"temperature": 0.5}, Sampling(temperature=0.5), "sampled at temperature 0.5;"),
        (
            {"by_mean": True},
            Sampling(greedy=True, by_mean=True),
            "greedy, by the means of tokens at temperature 1;",
        ),
        (
            {"by_mean": True, "temperature": 0.3},
            Sampling(greedy=True, by_mean=True, temperature=0.3),
            "greedy, by the means of tokens at temperature 0.3;",
        ),
    ],
)
def test_an_evaluation_acts_as_its_options_say(
    config_type: Any, options: dict[str, Any], sampling: Sampling, words: str
) -> None:
    config = config_type(tasks="0", init_states="0", **options)
    assert [each.sampling for each in planned_episodes(config)] == [sampling]
    assert words in describe_conditions(config)


def test_results_by_the_means_are_not_added_to_others_nor_compared_with_them(
    tmp_path: Path,
) -> None:
    plain = EvalLiberoConfig(tasks="0", init_states="0", assets="stand-ins")
    by_mean = msgspec.structs.replace(plain, by_mean=True)
    before, now = (evaluation_conditions(each, "digest") for each in (plain, by_mean))
    # evaluations of earlier versions have no such condition, and stay comparable
    assert not {"by_mean", "by_mean_at"} & set(before)
    assert (now["by_mean_at"], now["temperature"]) == (1.0, None)
    record_conditions(tmp_path / "conditions.json", before)
    with pytest.raises(ConfigError, match=r"^by_mean_at is 1\.0 now, .* says None"):
        refuse_other_conditions(tmp_path / "conditions.json", now)
    with pytest.raises(ConfigError, match=r"by_mean is True, but the episodes in .* with False"):
        refuse_other_config(by_mean, plain, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be compared: by_mean_at is None and 1\.0"):
        refuse_other_settings(before, now, [tmp_path, tmp_path])
    colder = msgspec.structs.replace(by_mean, temperature=0.3)
    assert evaluation_conditions(colder, "digest")["by_mean_at"] == 0.3


def test_a_server_is_not_told_how_to_act() -> None:
    with pytest.raises(ConfigError, match=r"by_mean is True, expected False: the policy at ws://"):
        EvalLiberoConfig(checkpoint="ws://127.0.0.1:9", by_mean=True)


def save_without_means(family: str, folder: Path) -> str:
    """Return the checkpoint of a policy that cannot act by the means of its tokens."""
    if family == "FlowPolicy":
        return SHIPPED_FLOW
    if family == "OpenVla":
        token_policy().save(folder)
    elif family == "ContinuousOpenVlaOft":
        ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0).save(folder)
    else:
        base = load_base(str(BASE_POLICY), AS_STORED, torch.device("cpu"))
        SteeredPolicy.create(base, SteeringConfig(hidden=(16,)), seed=0).save(folder)
    return str(folder)


@pytest.mark.parametrize(
    "family", ["FlowPolicy", "OpenVla", "ContinuousOpenVlaOft", "SteeredPolicy"]
)
async def test_a_policy_without_means_is_refused_before_an_evaluation_or_a_server_starts(
    family: str, tmp_path: Path
) -> None:
    checkpoint = save_without_means(family, tmp_path / "policy")
    words = f"by_mean is True, but a {family} does not choose .* expected False .--no-by-mean."
    config = EvalLiberoConfig(
        checkpoint=checkpoint, by_mean=True, assets="stand-ins", root=str(tmp_path / "runs")
    )
    with pytest.raises(ConfigError, match=words):
        await evaluate.main(Command(EvalLaunch(), config))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=words):
        await serve_policy(Command(Launch(), ServeConfig(checkpoint=checkpoint, by_mean=True)))


def test_the_replies_of_a_language_model_have_no_means() -> None:
    with pytest.raises(ConfigError, match="by_mean is True, expected False with the protocol"):
        ServeConfig(checkpoint="smollm2", protocol="openai", by_mean=True)


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (SrpoLiberoConfig(held_out=HeldOutConfig(by_mean=True, every=5)), suite_training),
        (SrpoMetaworldConfig(held_out=HeldOutStarts(by_mean=True, every=5)), suite_training),
        (
            SrpoToyConfig(held_out=HeldOutReaches(init_states="20-29", by_mean=True, every=5)),
            srpo_toy,
        ),
        (
            TrainToyConfig(
                success_return=1.0, held_out=HeldOutSeeds(starts=2, by_mean=True, every=5)
            ),
            train_toy,
        ),
    ],
    ids=["LIBERO", "Meta-World", "srpo_toy", "train_toy"],
)
@pytest.mark.parametrize(("asked", "used"), [({}, 1.0), ({"mean_temperature": None}, 0.3)])
def test_held_out_episodes_act_by_the_means(
    config: Any, recipe: Any, asked: dict[str, None], used: float
) -> None:
    held_out = msgspec.structs.replace(config.held_out, **asked)
    config = msgspec.structs.replace(config, held_out=held_out, temperature=0.3)
    reported, choosing = recipe.held_out_episodes(config), recipe.choosing_episodes(config)
    expected = Sampling(greedy=True, by_mean=True, temperature=used)
    assert reported
    assert choosing
    assert all(each.sampling == expected for each in (*reported, *choosing))
    evaluator = HeldOutEvaluator(reported, choose=choosing, schedule=config.held_out)
    assert evaluator.conditions["by_mean_at"] == used
    # without it, the temperature is that of the log-probs, which other runs have
    likeliest = msgspec.structs.replace(held_out, by_mean=False)
    assert likeliest.sampling(0.3) == Sampling(greedy=True, temperature=0.3)


def test_a_run_of_a_policy_without_means_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = TrainToyConfig(success_return=1.0, held_out=HeldOutSeeds(starts=2, by_mean=True))
    evaluator = HeldOutEvaluator(train_toy.held_out_episodes(config), schedule=config.held_out)
    starts = train_toy.training_starts(config)
    words = r"held_out\.by_mean is True, but a DrawingPolicy .*--held-out\.no-by-mean"
    with pytest.raises(ConfigError, match=words):
        TrainingRun(config, starts, make_drawing_policy(), evaluator=evaluator)
    TrainingRun(config, starts, train_toy.new_policy(config), evaluator=evaluator)


def test_a_run_that_is_resumed_with_the_other_decoding_is_refused(tmp_path: Path) -> None:
    def run(*options: str) -> int:
        return asyncio.run(
            train_toy.main(parse_command(TrainingLaunch, TrainToyConfig, "", options))
        )

    short = (
        *("--run.root", str(tmp_path), "--success-return", "5", "--step-limit", "8"),
        *("--group-size", "2", "--scheduler.groups-per-update", "1", "--held-out.starts", "2"),
    )
    assert run(*short, "--run.updates", "1", "--held-out.by-mean") == 0
    (folder,) = tmp_path.glob("train_toy-*")
    conditions = json.loads((folder / "held_out_conditions.json").read_text())
    assert conditions["by_mean_at"] == 1.0
    again = ("--resume", str(folder), "--run.updates", "2")
    with pytest.raises(ConfigError, match=r"by_mean_at is None now, but .* says 1\.0"):
        run(*again, "--held-out.no-by-mean")
    assert run(*again) == 0
