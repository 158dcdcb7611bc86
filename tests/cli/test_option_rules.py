"""Rules between options: defaults follow, options that nothing reads or that do not exist are refused."""

import contextlib
import importlib
import io
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import vla_rl.recipes
from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command, read_config
from vla_rl.cli.option_rules import FOLLOWING, follow, unused_options
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig, RunConfig
from vla_rl.pipelines.registry import (
    OF_BUFFERS,
    OPTIONAL,
    PIPELINES,
    pipeline_settings,
    unused_by_pipeline,
    with_pipeline,
)
from vla_rl.recipes.dagger_libero import DaggerLiberoConfig
from vla_rl.recipes.grpo_pair import GrpoPairConfig
from vla_rl.recipes.grpo_planner import GrpoPlannerConfig
from vla_rl.recipes.grpo_prompts import GrpoPromptsConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.recipes.off_policy_toy import OffPolicyToyConfig
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.recipes.sft_text import SftTextConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.recipes.watch_libero import WatchConfig
from vla_rl.reporting import RunDirectory
from vla_rl.run.train import TrainingRun
from vla_rl.types import Config

SWEPT = {
    "group-size": (2, 3),
    "scheduler.groups-per-update": (1, 3),
    "scheduler.max-staleness": (0,),
    "scheduler.max-outstanding-groups": (1, 2),
    "simulators.num-envs": (1, 3),
    "simulators.envs-per-process": (2,),
    "text.num-envs": (1, 3),
    "learner.ranks": (2, 3),
    "learner.tensor-parallel": (2,),
    "learner.minibatch-trajectories": (1, 3),
    "learner.micro-batch": (1, 3),
    "learner.epochs": (2,),
    "learner.optimizer.warmup-steps": (0, 1000),
    "learner.optimizer.decay-steps": (1, 10),
    "critic.minibatch-trajectories": (1,),
    "critic.optimizer.decay-steps": (1,),
    "engine.max-batch": (1, 4),
    "run.updates": (1,),
    "run.checkpoint-every": (1,),
    "held-out.every": (1,),
}
"""Options, and small values of each."""

PAIRS = (
    ("--group-size", "8", "--scheduler.groups-per-update", "2"),
    ("--group-size", "2", "--scheduler.groups-per-update", "1", "--scheduler.max-staleness", "0"),
)


def training_recipes() -> list[Any]:
    """The configurations of the recipes that train by reinforcement learning."""
    kinds = []
    for found in pkgutil.iter_modules(vla_rl.recipes.__path__):
        module = importlib.import_module(f"vla_rl.recipes.{found.name}")
        name = f"{found.name.replace('_', '')}config"
        kinds += [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, LearningConfig)
            and kind.__module__ == module.__name__
            and kind.__name__.lower() == name
            and not found.name.endswith("_training")
        ]
    return kinds


def parse_options(kind: Any, *arguments: str) -> Any:
    return parse_command(TrainingLaunch, kind, "", list(arguments)).config


def refusal(kind: Any, *arguments: str) -> str:
    """The error of a command line; empty if there is none."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            parse_options(kind, *arguments)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return " ".join(printed.getvalue().split())
    return ""


LINES = [(f"--{name}", str(value)) for name, values in SWEPT.items() for value in values]
SHARES = 4


def find_refused(kind: Any, lines: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    found = {line: refusal(kind, *line) for line in lines}
    # an option that the recipe has not, or does not read, is the user's own
    return {
        line: words
        for line, words in found.items()
        if words and "nothing would read it" not in words and "nrecognized" not in words
    }


# a command line takes 0.14 s of tyro, so each is tried with every fourth recipe; the proof tries all
@pytest.mark.parametrize(
    ("turn", "kind"),
    [pytest.param(*each, id=each[1].__name__) for each in enumerate(training_recipes())],
)
def test_no_setting_is_refused_because_of_an_option_that_the_user_did_not_set(
    turn: int, kind: Any
) -> None:
    assert find_refused(kind, [*LINES[turn % SHARES :: SHARES], *PAIRS]) == {}


@pytest.mark.proof
@pytest.mark.parametrize("kind", training_recipes(), ids=lambda kind: kind.__name__)
def test_no_setting_is_refused_by_any_recipe(kind: Any) -> None:
    assert find_refused(kind, LINES) == {}


def test_the_number_of_conversations_follows_the_size_of_an_update() -> None:
    arguments = ("--group-size", "8", "--scheduler.groups-per-update", "2")
    assert parse_options(GrpoPromptsConfig, *arguments).text.num_envs == 32
    assert parse_options(GrpoPromptsConfig, "--group-size=16").text.num_envs == 64
    assert parse_options(GrpoPromptsConfig).text.num_envs == 64


def test_the_planner_s_learning_rate_follows_the_planner() -> None:
    def rate(*arguments: str) -> float:
        return float(parse_options(GrpoPlannerConfig, *arguments).planner_optimizer.lr)

    assert rate() == rate("--planner-policy", "new") == 1e-4
    assert rate("--planner-policy", "smollm2") == 1.5e-5
    assert rate("--planner-policy", "smollm2", "--planner-optimizer.lr", "3e-5") == 3e-5


def test_a_loss_that_the_command_line_chooses_has_its_own_defaults(tmp_path: Path) -> None:
    """GSPO's clip range is 1,000 times narrower than that of the recipe's PPO, and SAPO has none."""

    def loss(*arguments: str) -> tuple[str, dict[str, Any]]:
        chosen: Any = parse_options(SrpoToyConfig, *arguments).learner.loss
        return chosen.name, chosen.chosen

    ppo = {"clip_low": 0.2, "clip_high": 0.28}
    assert loss() == loss("--learner.loss.name", "ppo") == ("ppo", ppo)
    assert loss("--learner.loss.name", "gspo") == ("gspo", {})
    assert loss("--learner.loss.name=sapo") == ("sapo", {})
    assert loss("--learner.loss.name", "my_rl:mine") == ("my_rl:mine", {})
    own = ("--learner.loss.name", "cispo", "--learner.loss.clip-high", "3.0")
    assert loss(*own) == ("cispo", {"clip_high": 3.0})
    # of a file, what belongs to its own loss alone
    file = tmp_path / "run.toml"
    file.write_text('[learner.loss]\nname = "sapo"\ntemperature_positive = 2.0\nkl.coef = 0.1\n')
    assert loss("--config", str(file)) == ("sapo", {"temperature_positive": 2.0})
    arguments = ("--config", str(file), "--learner.loss.name", "cpgd")
    assert loss(*arguments) == ("cpgd", {})
    kept: Any = parse_options(SrpoToyConfig, *arguments).learner.loss
    assert kept.kl.coef == 0.1
    file.write_text("[learner.loss]\nclip_low = 0.1\n")
    assert loss("--config", str(file), "--learner.loss.name", "cispo") == (
        "cispo",
        {"clip_low": 0.1},
    )


def test_an_advantage_that_the_command_line_chooses_has_its_own_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[advantage]\nname = "gae"\nlam = 0.9\n')
    found: Any = parse_options(
        SrpoToyConfig, "--config", str(file), "--advantage.name", "rloo"
    ).advantage
    assert (found.name, found.chosen) == ("rloo", {})


def test_dsrl_learns_the_noise_unless_the_user_chose_another_kind() -> None:
    def kind(*arguments: str) -> str:
        return parse_options(OffPolicyToyConfig, *arguments).steering.kind

    assert kind() == kind("--off-policy.algorithm", "sac") == "residual"
    assert kind("--off-policy.algorithm", "dsrl") == "noise"
    assert kind("--off-policy.algorithm", "dsrl", "--steering.kind", "tokens") == "tokens"


def test_a_new_language_model_has_room_for_the_conversations_of_its_task() -> None:
    def sizes(*arguments: str) -> tuple[int, int, int]:
        shape: Any = parse_command(Launch, SftTextConfig, "", list(arguments)).config.shape
        return shape.context_size, shape.vocab_size, shape.hidden_size

    assert sizes() == sizes("--task", "arithmetic_pair") == (256, 512, 64)
    assert sizes("--task", "requests") == (2048, 1024, 128)
    assert sizes("--task", "requests", "--shape.context-size", "900") == (900, 1024, 128)


def test_a_command_without_any_option_takes_the_recipe_s_defaults() -> None:
    assert parse_options(GrpoPromptsConfig) == GrpoPromptsConfig()


def test_what_the_user_set_himself_is_refused() -> None:
    arguments = ("--group-size", "8", "--scheduler.groups-per-update", "2", "--text.num-envs", "64")
    assert "32 < num_envs = 64: 32 environments would never be used" in refusal(
        GrpoPromptsConfig, *arguments
    )


def test_a_default_follows_a_file_and_what_the_file_sets_is_the_user_s(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("group_size = 4\n[scheduler]\ngroups_per_update = 2\n")
    assert parse_options(GrpoPromptsConfig, "--config", str(file)).text.num_envs == 16
    file.write_text("group_size = 4\n[scheduler]\ngroups_per_update = 2\n[text]\nnum_envs = 64\n")
    assert "16 < num_envs = 64" in refusal(GrpoPromptsConfig, "--config", str(file))


def test_each_default_that_follows_is_listed_once_and_keeps_what_fits() -> None:
    assert len({each.option for each in FOLLOWING}) == len(FOLLOWING)
    options: dict[str, Any] = {
        "group_size": 8,
        "scheduler": {"groups_per_update": 4, "max_staleness": 1},
    }
    options |= {"simulators": {"num_envs": 16}}
    options["scheduler"]["max_outstanding_groups"] = None
    assert follow(options, {}, ["--group-size", "4"]) == {"simulators": {"num_envs": 16}}
    assert follow(options, {}, ["--group-size", "1"]) == {"simulators": {"num_envs": 8}}
    assert follow(options, {}, ["--run.updates", "4"]) == {}


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
        (GrpoTextConfig, ["--learner.optimizer.final-lr-share", "0.5"], "decay_steps is none"),
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
        (GrpoPromptsConfig, ["--num-validation", "0", "--num-tries", "2"], "num_validation is 0"),
        (GrpoPairConfig, ["--agents.updates-per-turn", "3"], "agents.turns is 'joint'"),
        (
            OffPolicyLiberoConfig,
            ["--policy-format.base-policy", "shipped"],
            "policy_format.base_policy is 'shipped', but nothing would read it: policy is the frozen base",
        ),
        (
            DaggerLiberoConfig,
            ["--policy-format.base-policy", "shipped"],
            "policy is the frozen base itself",
        ),
        (
            # another policy as the expert is read in the same way, and may be a head over a base
            DaggerLiberoConfig,
            ["--policy-format.base-policy", "shipped", "--expert", "x", "--server.replan", "2"],
            "server.replan is 2, but nothing would read it",
        ),
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
        ["--pipeline", "own_parts:without_checkpoints", "--critic.hidden", "3"],
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
    unused = msgspec.structs.replace(
        config, critic=msgspec.structs.replace(config.critic, hidden=3)
    )
    run = RunDirectory.create(tmp_path, "a", unused)
    parse(SrpoToyConfig, "--resume", str(run.path))
    with pytest.raises(ConfigError, match=r"critic.epochs is 9, but nothing would read it"):
        parse(SrpoToyConfig, "--resume", str(run.path), "--critic.epochs", "9")


@pytest.mark.parametrize("config", [SrpoLiberoConfig, GrpoTextConfig, SftLiberoConfig, WatchConfig])
def test_the_unused_options_are_options(config: type[Config]) -> None:
    made = config()
    for path in unused_options(made):
        if path in (*OPTIONAL, *OF_BUFFERS) and isinstance(made, LearningConfig):
            continue  # of pipelines, for every kind of configuration
        table: Any = made
        for name in path.split("."):
            table = getattr(table, name)


# nft needs a flow policy and off_policy a head, and the toy run makes an MLP
@pytest.mark.parametrize("pipeline", sorted(set(PIPELINES) - {"nft", "off_policy"}))
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


@pytest.mark.parametrize("what", ["pipeline", "context"])
@pytest.mark.parametrize("spelling", ["--learner.{}-parallel", "--learner.{}_parallel=2"])
def test_other_kinds_of_parallelism_are_refused_by_name(what: str, spelling: str) -> None:
    option = f"--learner.{what}-parallel"
    with pytest.raises(ConfigError, match=rf"{option} does not exist: .*{what} parallelism"):
        parse_command(TrainingLaunch, TrainToyConfig, "", [spelling.format(what), "2"])


def test_files_with_earlier_names_of_options_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"cluster": {"hosts": "hosts.toml", "plays_here": true}}')
    assert read_config(path, TrainToyConfig).cluster.local_rollout
