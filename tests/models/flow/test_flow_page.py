"""The page for users of openpi and LeRobot does what it says."""

import json
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pi_folders
import pytest
from broken_folders import BROKEN, load_for_robot

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.loading import FLOW_FILE
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.loading import compute_digest_as_read, load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.ppo_libero import PpoLiberoConfig

TRAINING: dict[str, Any] = {"ppo_libero": PpoLiberoConfig, "grpo_libero": GrpoLiberoConfig}
PAGE = (Path(__file__).parents[3] / "docs" / "flow_policies.md").read_text(encoding="utf-8")


def read_commands() -> list[list[str]]:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
    lines = [line.partition("  #")[0] for line in blocks.splitlines()]
    return [shlex.split(line)[1:] for line in lines]


def test_every_command_names_a_recipe_and_options_that_exist() -> None:
    commands = read_commands()
    assert [name for name, *_ in commands] == [
        "eval_libero",
        "sft_flow",
        "ppo_libero",
        "grpo_libero",
        "eval_libero",
        "eval_libero",
    ]
    delays = []
    for name, *arguments in commands:
        assert import_module(f"vla_rl.recipes.{name}").main
        if name in TRAINING:
            config: Any = parse_command(TrainingLaunch, TRAINING[name], "", arguments).config
            assert config.policy_format.flow_steps == 4
            assert config.temperature == 1.0
        if name == "eval_libero":
            delays.append(parse_command(EvalLaunch, EvalLiberoConfig, "", arguments).config)
    assert [each.real_time.delay for each in delays] == [0, 2, 2]
    assert [each.real_time.continues_plan for each in delays] == [True, True, False]


def test_every_option_of_the_table_is_taken() -> None:
    (table,) = re.findall(r"## Options\n(.*?)\n## ", PAGE, re.DOTALL)
    options = re.findall(r"^\| `(--.*?)` \|", table, re.MULTILINE)
    assert len(options) == 9
    for option in options:
        found = parse_command(EvalLaunch, EvalLiberoConfig, "", ["my_policy", *shlex.split(option)])
        assert found.config.checkpoint == "my_policy"


def test_the_program_loads_describes_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    pi_folders.write_lerobot(tmp_path / "my_policy", "pi0")
    (tmp_path / "program.py").write_text(f"from pathlib import Path\n{program}")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py")
    assert "in 4 steps" in capsys.readouterr().out
    stored = json.loads((tmp_path / "saved" / FLOW_FILE).read_text())
    assert stored["sampling"]["noise_level"] == 0.3


def test_the_words_of_every_refusal_are_those_of_the_page(tmp_path: Path) -> None:
    (table,) = re.findall(r"## Refused by name\n(.*?)\n`vla_rl", PAGE, re.DOTALL)
    words = [row.split("|")[2].strip() for row in table.splitlines() if row.startswith("| ")][1:]
    listed = {word for row in words for word in row.split(", ")}
    unseen = set(listed)
    for number, (change, _) in enumerate(BROKEN.values()):
        folder = pi_folders.write_lerobot(tmp_path / str(number), "pi05")
        change(folder)
        with pytest.raises(CheckpointError) as caught:
            load_for_robot(folder)
        said = {word for word in listed if word in str(caught.value)}
        assert said, caught.value
        unseen -= said
    # tests of their own: test_pi_folders, test_families
    assert unseen == {"is not named", "no policy is known by its tensors"}


@pytest.mark.parametrize(
    ("kind", "format", "expected"),
    [
        ("pi05", {}, "pi05"),
        ("pi05", {"state_in_prompt": False}, "pi0"),
        ("pi0", {}, "pi0"),
    ],
)
def test_the_state_stands_in_the_prompt_unless_it_is_said_otherwise(
    kind: Any, format: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", kind)
    policy = load_policy(str(folder), CheckpointFormat(**format), "cpu")
    assert isinstance(policy, FlowPolicy)
    policy.save(tmp_path / "saved")
    for each in (policy, FlowPolicy.load(tmp_path / "saved")):
        processor: Any = each._processor
        assert processor.prompt == expected


def test_pi0_does_not_read_its_state_in_the_prompt(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    with pytest.raises(ConfigError, match="the policy is pi0, which has a token for the state"):
        load_policy(str(folder), CheckpointFormat(state_in_prompt=True), "cpu")


def test_new_options_leave_fingerprints_of_earlier_runs_as_they_were(tmp_path: Path) -> None:
    folder = str(pi_folders.write_openpi(tmp_path / "policy", "pi0"))
    first, second = (
        compute_digest_as_read(folder, CheckpointFormat(flow_steps=steps)) for steps in (None, 4)
    )
    assert first != second
