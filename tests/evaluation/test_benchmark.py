"""A policy fits a benchmark's cameras, state and arm, or is refused with what differs."""

from types import SimpleNamespace
from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.benchmark import (
    LIBERO,
    METAWORLD,
    benchmark_of,
    expected_of,
    require_fitting,
)


def policy(**changes: Any) -> Any:
    proprio = SimpleNamespace(low=(0.0,) * 8)
    fields = {"cameras": ("image",), "proprio": proprio, "action_dim": 7} | changes
    return SimpleNamespace(config=SimpleNamespace(**fields))


def test_a_suite_belongs_to_its_simulator_and_unknown_ones_to_libero() -> None:
    assert benchmark_of("libero_goal") is LIBERO
    assert benchmark_of("some_new_suite") is LIBERO
    assert all(benchmark_of(suite) is METAWORLD for suite in METAWORLD.suites)


def test_a_suite_of_the_other_simulator_is_shown_its_recipes() -> None:
    suite = METAWORLD.suites[0]
    assert expected_of(LIBERO, suite).endswith("; the recipes for Meta-World end in _metaworld")
    assert "recipes" not in expected_of(LIBERO, "some_new_suite")
    assert "libero_goal" in expected_of(LIBERO, "some_new_suite")


def test_a_policy_that_fits_passes() -> None:
    require_fitting(policy(), "mine", LIBERO)
    require_fitting(policy(proprio=None, cameras=("image", "wrist_image")), "mine", LIBERO)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("image", "left")}, "mine needs the camera 'left', which LIBERO does not"),
        (
            {"proprio": SimpleNamespace(low=(0.0,) * 4)},
            "mine reads a state of 4 numbers, and LIBERO's has 8",
        ),
        ({"action_dim": 14}, "mine gives actions of 14 numbers, and LIBERO's arm takes 7"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_fitting(policy(**changes), "mine", LIBERO)
