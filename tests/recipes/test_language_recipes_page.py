"""The recipes of docs/language.md: each command is one that is understood, and the run of two kinds
runs.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.recipes import (
    grpo_pair,
    grpo_prompts,
    grpo_squares,
    grpo_text,
    sft_text,
    side_by_side,
    srpo_toy,
)
from vla_rl.recipes.grpo_pair import AGENTS, GrpoPairConfig, policies_of
from vla_rl.types import SOLE_MEMBER

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
COMMANDS = [
    (name, rest.partition("#")[0])
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for name, rest in re.findall(r"^python -m vla_rl\.recipes\.(\w+)(.*)$", block, re.MULTILINE)
]
CONFIGS = {
    "sft_text": (Launch, sft_text.SftTextConfig),
    "grpo_text": (TrainingLaunch, grpo_text.GrpoTextConfig),
    "grpo_pair": (TrainingLaunch, grpo_pair.GrpoPairConfig),
    "grpo_prompts": (TrainingLaunch, grpo_prompts.GrpoPromptsConfig),
    "grpo_squares": (TrainingLaunch, grpo_squares.GrpoSquaresConfig),
    "side_by_side": (TrainingLaunch, side_by_side.SideBySideConfig),
}


def test_all_recipes_for_language_are_on_the_page() -> None:
    assert {name for name, _ in COMMANDS} == CONFIGS.keys()


@pytest.mark.parametrize(("name", "rest"), COMMANDS)
def test_a_command_of_the_page_is_understood(name: str, rest: str) -> None:
    launch, config = CONFIGS[name]
    words = shlex.split(rest)
    said = parse_command(launch, config, "", words).config
    for option, value in zip(words[::2], words[1::2], strict=True):
        found: Any = said
        for field in option.removeprefix("--").replace("-", "_").split("."):
            found = getattr(found, field)
        assert str(found) == value


def test_the_commands_for_a_pair_differ_in_who_learns_when(tmp_path: Path) -> None:
    shape = TinyConfig(
        hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, vocab_size=300
    )
    tiny(shape, ["go"], seed=0).save(tmp_path / "pair_base")
    found = []
    for name, rest in COMMANDS:
        if name == "grpo_pair":
            words = [
                str(tmp_path / word) if word == "pair_base" else word for word in shlex.split(rest)
            ]
            config = parse_command(TrainingLaunch, GrpoPairConfig, "", words).config
            team = policies_of(config)
            found.append((config.advantage.name, list(team.members), team.updates_per_turn))
    assert found == [
        ("grpo", [SOLE_MEMBER], None),
        ("grpo", list(AGENTS), None),
        ("grpo", list(AGENTS), 2),
        ("marft_gae", [SOLE_MEMBER], None),
    ]


async def test_two_kinds_of_policies_train_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = re.findall(r"```python\n# train_both\.py\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "train_both.py", "exec"), names)
    monkeypatch.chdir(tmp_path)
    shape = TinyConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        vocab_size=300,
        context_size=512,
    )
    tiny(shape, ["What is 1+1?"], seed=0).save(tmp_path / "language")
    srpo_toy.policy_of(srpo_toy.SrpoToyConfig()).save(tmp_path / "robot")
    outcome = await names["train_both"](str(tmp_path / "robot"), str(tmp_path / "language"))
    assert outcome.progress.update == 2
    assert outcome.progress.tasks.keys() == {"reach", "sums"}
