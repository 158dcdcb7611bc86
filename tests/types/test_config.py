"""What every configuration refuses by itself."""

from typing import Literal

import msgspec
import pytest

from vla_rl.errors import ConfigError
from vla_rl.types import Config


class Oven(Config, frozen=True, kw_only=True):
    heat: Literal["top", "bottom", "fan"] = "fan"
    level: Literal[1, 2, 3] | None = None
    dish: str | Literal[0] = "pie"


class CheckedOven(Oven, frozen=True, kw_only=True):
    light: Literal["on", "off"] = "off"

    def __post_init__(self) -> None:
        self.require({"on": True, "off": False}[self.light] or self.heat != "top", "light", "on, to see the top")


@pytest.mark.parametrize("oven", [Oven, CheckedOven])
def test_a_value_that_is_none_of_a_fields_choices_is_refused_with_the_nearest_one(oven: type[Oven]) -> None:
    with pytest.raises(
        ConfigError, match=r"Oven.heat is 'topp', expected one of 'top', 'bottom', 'fan'; did you mean 'top'\?$"
    ):
        oven(heat="topp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Oven.level is 4, expected one of 1, 2, 3, None$"):
        msgspec.structs.replace(oven(), level=4)


def test_a_subclass_checks_its_choices_before_its_own_rules_and_keeps_both() -> None:
    with pytest.raises(ConfigError, match=r"CheckedOven.light is 'onn', expected one of 'on', 'off'"):
        CheckedOven(light="onn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"CheckedOven.light is 'off', expected on, to see the top"):
        CheckedOven(heat="top")


def test_fields_that_allow_more_than_a_few_values_take_any() -> None:
    assert Oven(level=2, dish="cake").dish == "cake"


def test_a_field_of_a_type_that_only_type_checkers_know_is_not_checked() -> None:
    class Mine(Config, frozen=True, kw_only=True):
        other: "Unknown | None" = None  # type: ignore[name-defined]  # noqa: F821

    assert Mine().other is None
