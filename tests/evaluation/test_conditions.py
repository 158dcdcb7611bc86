"""Results under other conditions are refused with the value that differs, and nothing else."""

from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import (
    conditions_of_play,
    differences,
    note_conditions,
    refuse_other_conditions,
)
from vla_rl.evaluation.plan import planned_episodes
from vla_rl.recipes.eval_libero import EvalLiberoConfig


def test_each_value_that_differs_has_its_whole_name() -> None:
    now = {"arms": {"grpo": {"lr": 2, "seed": 0}, "srpo": {"lr": 1}}, "updates": 3}
    before = {"arms": {"grpo": {"lr": 1, "seed": 0}, "srpo": {"lr": 1}}, "updates": 3, "tasks": 2}
    assert sorted(differences(now, before)) == [("arms.grpo.lr", 2, 1), ("tasks", None, 2)]


def test_the_error_has_the_one_value_and_not_the_record_around_it(tmp_path: Path) -> None:
    record = tmp_path / "conditions.json"
    note_conditions(record, {"arms": {"grpo": {"lr": 1, "temperature": 0.25}}})
    refuse_other_conditions(record, {"arms": {"grpo": {"lr": 1, "temperature": 0.25}}})
    with pytest.raises(ConfigError, match=r"^arms\.grpo\.lr is 2 now, .* says 1, and") as refused:
        refuse_other_conditions(record, {"arms": {"grpo": {"lr": 2, "temperature": 0.25}}})
    assert "0.25" not in str(refused.value)


def test_conditions_are_how_episodes_are_played_and_not_which() -> None:
    episodes = planned_episodes(
        EvalLiberoConfig(
            checkpoint="theirs",
            init_states="0-1",
            tasks="0-1",
            scene_seeds="0-1",
            scenes="same",
            temperature=0.5,
        )
    )
    assert len(episodes) == 8
    assert conditions_of_play(episodes) == {
        "assets": None,
        "image_size": 256,
        "physics": "exact",
        "quality": "exact",
        "step_limit": None,
        "temperature": 0.5,
    }
