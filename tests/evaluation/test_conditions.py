"""Results under other conditions are refused with the value that differs, and nothing else."""

from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import differences, note_conditions, refuse_other_conditions


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
