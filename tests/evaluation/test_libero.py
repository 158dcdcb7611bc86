"""Numbers and names of LIBERO's tasks are read, and what cannot be is refused by name."""

from typing import Any

import pytest

from vla_rl.envs.libero import tasks as libero_tasks
from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    libero,
    parse_numbers,
)
from vla_rl.recipes.eval_libero import EvalLiberoConfig


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
    monkeypatch.setattr(libero_tasks, "package_root", without_libero)
    with pytest.raises(ConfigError, match="suites: LIBERO is not installed; run `pip install it`"):
        EvalLiberoConfig()
    with pytest.raises(ConfigError, match="tasks: LIBERO is not installed"):
        libero.parse_tasks(("libero_goal",), "tasks")
