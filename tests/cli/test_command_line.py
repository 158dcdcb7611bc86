"""A configuration comes from a file and the command line; what is wrong in either is refused by a sentence."""

import contextlib
import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vla_rl.cli import main
from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command, read_config
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.types import Config, PositiveInt


class RolloutSettings(Config):
    """How episodes run."""

    num_envs: PositiveInt = 4
    """Environments run at the same time."""


class RunSettings(Config):
    """A run."""

    updates: int = 10
    """Updates to make."""

    tasks: tuple[int, ...] = (0,)
    """Tasks to train on."""

    rollout: RolloutSettings = RolloutSettings()

    run: RunConfig = RunConfig()


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("tasks = [1, 2]\n[rollout]\nnum_envs = 2\n")
    assert read_config(path, RunSettings) == RunSettings(
        tasks=(1, 2), rollout=RolloutSettings(num_envs=2)
    )


def test_a_file_may_begin_with_the_mark_that_editors_of_windows_write(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("updates = 3\n", encoding="utf-8-sig")
    assert read_config(path, RunSettings).updates == 3


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("updates = 3\n[rollout]\nnum_envs = 2\n")
    command = parse_command(
        TrainingLaunch,
        RunSettings,
        "A run.",
        ["--config", str(path), "--updates", "5", "--dry-run"],
    )
    assert command.config == RunSettings(updates=5, rollout=RolloutSettings(num_envs=2))
    assert command.launch.dry_run


def test_a_file_and_a_run_to_go_on_with_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--config my\.toml and --resume runs/one were both given, expected one of them",
    ):
        parse_command(
            TrainingLaunch, RunSettings, "A run.", ["--config", "my.toml", "--resume", "runs/one"]
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("updats = 3", "unknown key 'updats' of RunSettings; did you mean 'updates'"),
        (
            "[rollout]\nnum_env = 3",
            "unknown key 'num_env' of RolloutSettings; did you mean 'num_envs'",
        ),
        ("zzz = 3", "known keys: rollout, run, tasks, updates"),
        ("updates = 'three'", "RunSettings.updates is 'three', expected int"),
        ("rollout = 3", "got 3, expected a table of RolloutSettings"),
        (
            "[rollout]\nnum_envs = 0",
            "RolloutSettings.num_envs is 0, expected at least 1",
        ),
        (
            "[run]\nname = 'a/b'",  # a table's own rule, which no type says
            "RunConfig.name is 'a/b', expected letters, digits,",
        ),
        ("updates = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_file_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, RunSettings)
    assert message in str(caught.value)
    assert "run.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[advantage]\nname = "rlo"',
            "AdvantageConfig.name 'rlo' is unknown; did you mean 'rloo'?",
        ),
        ('[learner.loss]\nname = "sapo"\nclip_low = 0.1', "policy loss 'sapo' has no clip_low"),
        (
            "[learner.optimizer]\nwarmup_steps = 9\ndecay_steps = 5",
            "expected more than warmup_steps = 9",
        ),
    ],
)
def test_values_of_a_table_that_do_not_fit_each_other_are_refused_with_the_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, SrpoToyConfig)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        read_config(tmp_path / "none.toml", RunSettings)


def test_an_unknown_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse_command(TrainingLaunch, RunSettings, "A run.", ["--updats", "3"])
    assert done.value.code == 2
    assert "--updates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("--run.save-every", "--run.checkpoint-every"),
        ("--kl-coef", "--learner.loss.kl.coef"),
        ("--learner.lr=3", "--learner.optimizer.lr"),
        ("--num-episodes", "--simulators.num-envs"),
    ],
)
def test_an_unknown_option_that_only_resembles_others_is_refused_with_them(
    argument: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        parse_command(TrainingLaunch, SrpoToyConfig, "A run.", [argument, "3"])
    assert done.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"nearest to {argument.removesuffix('=3')}: ")
    assert nearest in last_line


def test_a_recipe_without_a_graph_has_no_option_to_draw_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_command(Launch, RunSettings, "A run.", ["--draw", "graph.svg"])
    assert "--draw" in capsys.readouterr().err


NUM = int(os.environ.get("MUTATIONS", "40"))
LONG = "a" * 300

RECIPES: dict[str, tuple[type[Launch], type[Config], tuple[str, ...]]] = {
    "train_toy": (
        TrainingLaunch,
        TrainToyConfig,
        ("--run.updates", "3", "--pipeline", "ppo", "--dry-run", "--num-starts", "8"),
    ),
    "srpo_libero": (
        TrainingLaunch,
        SrpoLiberoConfig,
        ("--group-size", "4", "--suite", "libero_goal", "--learner.optimizer.lr", "1e-5"),
    ),
    "eval_libero": (Launch, EvalLiberoConfig, ("--num-envs", "2", "--name", "mine", "--dry-run")),
}
OPTIONS = ["--resume", "--config", "--draw", "--resume-from", "--pipeline", "--dry-run", "--help"]
VALUES = [
    *("", " ", ".", "/", "..", "0x10", "-1", "1e999", "nan", "None", "true", "[1, 2]", "{", "'"),
    *("\udcff", "pr\xfcfung", "\n", "\0", "--", "-", "=", "a=b", LONG, f"{LONG}.toml", f"{LONG}/a"),
    *("/dev/null", "/proc/self/mem", "/root", "~", "$HOME", "9" * 400, "vla_rl.types:Config"),
]


def mutated(arguments: Sequence[str], chance: random.Random) -> list[str]:
    """Change a command line in one to three places."""
    line = list(arguments)
    for _ in range(chance.randint(1, 3)):
        offset = chance.randrange(len(line) + 1)
        change = chance.randrange(6)
        if change == 0:
            line.insert(offset, chance.choice(VALUES))
        elif change == 1:
            line[offset:offset] = [chance.choice(OPTIONS), chance.choice(VALUES)]
        elif change == 2 and line:
            line.pop(offset % len(line))
        elif change == 3 and line:
            line[offset % len(line)] = chance.choice(VALUES)
        elif line:
            word = line[offset % len(line)]
            cut = chance.randrange(len(word) + 1)
            middle = chance.choice(["", ".", "-", "=", "\xe9", LONG, "_"])
            line[offset % len(line)] = word[:cut] + middle + word[cut + (change == 5) :]
    return line


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit, ConfigError),
    ):
        yield


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_mutated_command_is_parsed_or_refused(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch, config, arguments = RECIPES[recipe]
    chance = random.Random(recipe)
    for _ in range(NUM // len(RECIPES)):
        line = mutated(arguments, chance)
        try:
            with quietly():
                parse_command(launch, config, "", line)
        except BaseException as error:
            error.add_note(f"the command line was {line}")
            raise


@pytest.mark.parametrize("command", ["why", "report"])
@pytest.mark.parametrize("folder", [value for value in VALUES if "\0" not in value])
def test_a_folder_that_is_no_run_is_refused_by_the_other_commands(
    command: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with quietly():
        assert main.main([command, folder]) in (1, 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--dry-run", "0x10"], "--dry-run is a flag, but was given the value '0x10'"),
        (["--no-dry-run=1"], "--no-dry-run is a flag, but was given the value '1'"),
        (
            ["--learner.no-offload=1"],
            "--learner.offload alone .* or --learner.no-offload to turn it off",
        ),
        (
            ["--hidden=8", "--hidden", "16"],
            "--hidden is given 2 times, expected once, with all its values after it: --hidden A B",
        ),
        (["--resume", "."], ". has no config.json, .* give the folder that the run has printed"),
        (["--config", "."], r". is a folder, expected a .toml or .json file; --resume continues"),
        (["--resume", LONG], r"a{80}\.\.\.a{80} has no config.json, expected the folder"),
        (["--config", LONG], r"a{80}\.\.\.a{80} ends in '', expected a file in one of .toml"),
        (["--config", f"{LONG}.json"], r"a{80}\.\.\.a{75}.json cannot be read: File name too long"),
    ],
)
def test_a_refusal_names_the_option_and_what_to_do(
    line: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"  # a folder beside those of other tests would list them as runs
    alone.mkdir()
    monkeypatch.chdir(alone)
    with pytest.raises(ConfigError, match=said):
        parse_command(TrainingLaunch, TrainToyConfig, "", line)
