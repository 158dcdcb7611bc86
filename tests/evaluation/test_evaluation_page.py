"""docs/evaluation.md does what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from vla_rl.recipes.driving_training import HeldOutScenesConfig
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, LiberoConfig
from vla_rl.recipes.train_toy import HeldOutSeeds, TrainToyConfig
from vla_rl.types import EnvSpec

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


async def test_its_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
    ):
        exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    assert "between 95.1 and 98.2 %" in capsys.readouterr().out
    env = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"action_dim": 7, "step_limit": 4})
    assert 0.0 <= await names["success_rate"](env, 3) <= 1.0


def test_every_option_of_held_out_starts_that_it_names_exists() -> None:
    named = set(re.findall(r"--held-out\.([a-z][a-z-]+)", PAGE.read_text()))
    shown = (HeldOutConfig, HeldOutSeeds, HeldOutScenesConfig)
    known = {name for config in shown for name in config.__struct_fields__}
    assert len(named) > 6
    assert {name.replace("-", "_") for name in named} <= known


def test_every_option_it_names_exists() -> None:
    named = set(re.findall(r"`?--([a-z][a-z-]+)", PAGE.read_text())) - {
        *("help", "dry-run", "resume", "resume-from"),
    }
    shown = (EvalLiberoConfig, LiberoConfig, TrainToyConfig, GrpoTextConfig)
    known = {name for config in shown for name in config.__struct_fields__}
    assert {name.replace("-", "_") for name in named} <= known
