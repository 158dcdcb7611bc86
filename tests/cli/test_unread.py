"""Options that nothing would read are left out of the help and refused on the command line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command
from vla_rl.cli.unread import unread_options
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig, RunConfig
from vla_rl.pipelines.registry import (
    OPTIONAL,
    PIPELINES,
    pipeline_settings,
    unused_by_pipeline,
    with_pipeline,
)
from vla_rl.recipes.grpo_pair import GrpoPairConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.recipes.watch_libero import WatchConfig
from vla_rl.reporting import RunDirectory
from vla_rl.run.train import TrainingRun
from vla_rl.types import Config


def parse(config: type[Config], *arguments: str, launch: type[Launch] = TrainingLaunch) -> Config:
    return parse_command(launch, config, "", list(arguments)).config


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (SrpoLiberoConfig, ["--critic.hidden", "3"], r"critic.hidden is 3, but nothing would read"),
        (SrpoLiberoConfig, ["--engine.vllm.num-engines", "2"], "engine.kind is 'torch'"),
        (SrpoLiberoConfig, ["--engine.max-reply", "9"], "it is for language policies only"),
        (SrpoLiberoConfig, ["--lora-alpha", "32"], "lora_rank is none"),
        (SrpoLiberoConfig, ["--srpo.radius-scale", "2"], "srpo.rule is 'aligned'"),
        (SrpoLiberoConfig, ["--embedding.state-key", "x"], "embedding.encoder is 'pixels'"),
        (
            SrpoLiberoConfig,
            ["--held-out.init-states", "None", "--held-out.physics", "fast"],
            "held_out.init_states is none",
        ),
        (SrpoLiberoConfig, ["--learner.optimizer.final-lr-share", "0.5"], "decay_steps is none"),
        (SrpoLiberoConfig, ["--learner.loss.kl.estimator", "k1"], "learner.loss.kl.coef is 0"),
        (
            TrainToyConfig,
            ["--run.videos-every", "2"],
            "run.videos_every is 2, but nothing would read it: it is for other pipelines than",
        ),
        (TrainToyConfig, ["--srpo.alpha", "0.5"], "it is for other pipelines than 'grpo'"),
        (GrpoTextConfig, ["--run.chaos-every-s", "20"], "it is for runs with simulators only"),
        (GrpoTextConfig, ["--overlong.factor", "2"], "it is for other pipelines than 'grpo'"),
        (GrpoTextConfig, ["--num-validation", "0", "--num-tries", "2"], "num_validation is 0"),
        (GrpoPairConfig, ["--agents.updates-per-turn", "3"], "agents.turns is 'joint'"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused_with_the_reason(
    config: type[Config], arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(config, *arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (SftLiberoConfig, ["--lora-alpha", "32"], "lora_rank is none"),
        (SftLiberoConfig, ["--augmentation.hue", "0.1"], "augment is off"),
        (SftLiberoConfig, ["--from", "x", "--tiny-head", "l1"], "the policy comes from a checkpoint"),
        (WatchConfig, ["--norm-key", "libero_goal"], "policy is 'expert'"),
    ],
)  # fmt: skip
def test_commands_without_a_pipeline_refuse_what_they_would_not_read_too(
    config: type[Config], arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(config, *arguments, launch=Launch)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pipeline", "embodied_ppo", "--critic.hidden", "3", "--run.videos-every", "2"],
        ["--engine", "vllm", "--engine.vllm.num-engines", "2"],
        ["--lora-rank", "8", "--lora-alpha", "32"],
        ["--srpo.rule", "paper", "--srpo.radius-scale", "2"],
        ["--pipeline", "own_pipelines:without_checkpoints", "--critic.hidden", "3"],
        ["--critic.hidden", "64"],
    ],
)
def test_an_option_that_is_read_or_keeps_its_value_is_accepted(arguments: list[str]) -> None:
    parse(SrpoLiberoConfig, *arguments)


def test_a_file_is_refused_as_the_command_line_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[critic]\nhidden = 3\n")
    with pytest.raises(ConfigError, match=r"critic.hidden is 3, but nothing would read it"):
        parse(SrpoToyConfig, "--config", str(path))
    parse(SrpoToyConfig, "--config", str(path), "--pipeline", "embodied_ppo")


def test_the_command_line_may_leave_settings_of_a_file_unread(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("lora_rank = 8\nlora_alpha = 32\n")
    parse(SrpoLiberoConfig, "--config", str(path), "--lora-rank", "None")
    with pytest.raises(ConfigError, match=r"lora_targets is 'all-linear', but nothing would read"):
        parse(
            SrpoLiberoConfig, "--config", str(path), "--lora-rank", "None",
            "--lora-targets", "all-linear",
        )  # fmt: skip


def test_a_run_is_resumed_with_what_its_own_configuration_says(tmp_path: Path) -> None:
    config = msgspec.structs.replace(SrpoToyConfig(), run=RunConfig(root=str(tmp_path)))
    unread = msgspec.structs.replace(
        config, critic=msgspec.structs.replace(config.critic, hidden=3)
    )
    run = RunDirectory.create(tmp_path, "a", unread)
    parse(SrpoToyConfig, "--resume", str(run.path))
    with pytest.raises(ConfigError, match=r"critic.epochs is 9, but nothing would read it"):
        parse(SrpoToyConfig, "--resume", str(run.path), "--critic.epochs", "9")


@pytest.mark.parametrize("config", [SrpoLiberoConfig, GrpoTextConfig, SftLiberoConfig, WatchConfig])
def test_the_unread_options_are_options(config: type[Config]) -> None:
    made = config()
    for path in unread_options(made):
        if path in OPTIONAL and isinstance(made, LearningConfig):
            continue  # of pipelines, for every kind of configuration
        table: Any = made
        for name in path.split("."):
            table = getattr(table, name)


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_a_pipeline_reads_the_options_that_it_declares_and_no_others(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`overlong` and `critic` are also read by every run, and `reward` by SRPO, to refuse them."""
    toy = TrainToyConfig(env_id=REACH if pipeline.startswith("embodied") else "Pendulum-v1")
    config = with_pipeline(toy, pipeline)
    starts, policy, seen = training_starts(config), new_policy(config), set[str]()
    read = LearningConfig.__getattribute__

    def record(self: LearningConfig, name: str) -> Any:
        seen.add(name)
        return read(self, name)

    monkeypatch.setattr(TrainToyConfig, "__getattribute__", record, raising=False)
    run = TrainingRun(config, starts, policy)
    monkeypatch.undo()
    if "videos" in run.graph.nodes:
        seen.add("run.videos_every")
    to_refuse = {"overlong", "critic"} | ({"reward"} if pipeline == "embodied_srpo" else set())
    declared = set(OPTIONAL) - set(unused_by_pipeline(pipeline))
    assert (seen & set(OPTIONAL)) - to_refuse == declared - to_refuse
    assert ("overlong" in run.graph.nodes) == ("overlong" in declared)
    assert pipeline_settings(pipeline)
