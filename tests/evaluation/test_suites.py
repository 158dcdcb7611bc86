"""Tasks and starts of a suite are read by number and name; a policy fits its cameras, state and arm, or is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from vla_rl.envs.libero import tasks
from vla_rl.errors import ConfigError
from vla_rl.evaluation import parse_numbers, suites
from vla_rl.evaluation.suites import (
    LIBERO,
    METAWORLD,
    describe_suites,
    get_benchmark,
    require_fitting,
)
from vla_rl.recipes.eval_libero import EvalLiberoConfig


def policy(**changes: Any) -> Any:
    proprio = SimpleNamespace(low=(0.0,) * 8)
    fields = {"cameras": ("image",), "proprio": proprio, "action_dim": 7} | changes
    return SimpleNamespace(config=SimpleNamespace(**fields))


def test_a_suite_belongs_to_its_simulator_and_unknown_ones_to_libero() -> None:
    assert get_benchmark("libero_goal") is LIBERO
    assert get_benchmark("some_new_suite") is LIBERO
    assert all(get_benchmark(suite) is METAWORLD for suite in METAWORLD.suites)


def test_a_suite_of_the_other_simulator_is_shown_its_recipes() -> None:
    suite = METAWORLD.suites[0]
    assert describe_suites(LIBERO, suite).endswith("; the recipes for Meta-World end in _metaworld")
    assert "recipes" not in describe_suites(LIBERO, "some_new_suite")
    assert "libero_goal" in describe_suites(LIBERO, "some_new_suite")


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


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", (0, 1, 2, 3, 4)), ("0-2", (0, 1, 2)), ("4,0-1,1", (4, 0, 1)), ("3", (3,))],
)
def test_numbers_are_lists_of_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, 5, "tasks") == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-5", "tasks are '0-5', expected numbers from 0 to 4"),
        ("3-1", "expected ascending ranges, not '3-1'"),
        ("", "expected 'all', or numbers and ranges"),
        ("1;2", "expected 'all', or numbers and ranges"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_numbers(text, 5, "tasks")


def without_libero(package: str) -> Any:
    raise ImportError("LIBERO is not installed; run `pip install it`.")


def test_without_libero_an_evaluation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_package_root", without_libero)
    with pytest.raises(ConfigError, match="suites: LIBERO is not installed; run `pip install it`"):
        EvalLiberoConfig()
    with pytest.raises(ConfigError, match="tasks: LIBERO is not installed"):
        suites.parse_tasks(("libero_goal",), "tasks")
