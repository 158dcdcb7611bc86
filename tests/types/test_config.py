"""Configurations check their fields; a wrong keyword names the nearest one."""

import re
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from vla_rl.errors import ConfigError
from vla_rl.types import Config, EnvSpec
from vla_rl.types.config import ExplainsFields


class Lamp(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A class with one required field."""

    colour: str
    brightness: float = 1.0

    def __post_init__(self) -> None:
        if self.brightness < 0:
            raise TypeError("too dark")


def test_a_wrong_keyword_is_named_with_the_nearest_field() -> None:
    with pytest.raises(TypeError, match=r"^Lamp has no field 'color'; did you mean 'colour'\?$"):
        Lamp(color="red")  # type: ignore[call-arg]


def test_a_keyword_that_resembles_no_field_is_answered_with_all_fields() -> None:
    with pytest.raises(TypeError, match="Lamp has no field 'x'; its fields: colour, brightness"):
        Lamp(colour="red", x=1)  # type: ignore[call-arg]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(TypeError, match=r"^Lamp lacks 'colour'$"):
        Lamp(brightness=0.5)  # type: ignore[call-arg]


def test_arguments_without_names_are_counted() -> None:
    with pytest.raises(TypeError, match="Lamp got 1 argument without a name, expected keywords"):
        Lamp("red")  # type: ignore[misc,call-arg]


def test_an_error_of_the_class_itself_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match=r"^too dark$"):
        Lamp(colour="red", brightness=-1.0)


class Oven(Config, frozen=True, kw_only=True):
    heat: Literal["top", "bottom", "fan"] = "fan"
    level: Literal[1, 2, 3] | None = None
    dish: str | Literal[0] = "pie"


class CheckedOven(Oven, frozen=True, kw_only=True):
    light: Literal["on", "off"] = "off"

    def __post_init__(self) -> None:
        self.require(
            {"on": True, "off": False}[self.light] or self.heat != "top",
            "light",
            "on, to see the top",
        )


@pytest.mark.parametrize("oven", [Oven, CheckedOven])
def test_a_value_that_is_none_of_a_fields_choices_is_refused_with_the_nearest_one(
    oven: type[Oven],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"Oven.heat is 'topp', expected one of 'top', 'bottom', 'fan'; did you mean 'top'\?$",
    ):
        oven(heat="topp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Oven.level is 4, expected one of 1, 2, 3, None$"):
        msgspec.structs.replace(oven(), level=4)


def test_a_subclass_checks_its_choices_before_its_own_rules_and_keeps_both() -> None:
    with pytest.raises(
        ConfigError, match=r"CheckedOven.light is 'onn', expected one of 'on', 'off'"
    ):
        CheckedOven(light="onn")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"CheckedOven.light is 'off', expected on, to see the top"
    ):
        CheckedOven(heat="top")


def test_fields_that_allow_more_than_a_few_values_take_any() -> None:
    assert Oven(level=2, dish="cake").dish == "cake"


def test_a_field_of_a_type_that_only_type_checkers_know_is_not_checked() -> None:
    class Mine(Config, frozen=True, kw_only=True):
        other: "Unknown | None" = None  # type: ignore[name-defined]  # noqa: F821

    assert Mine().other is None


class Kitchen(Config, frozen=True, kw_only=True):
    oven: Oven = Oven()
    num_cooks: int = 1
    slots: tuple[int, ...] = ()
    chef: str | None = None


def test_a_misspelt_field_is_reported_with_the_class_and_the_nearest_field() -> None:
    with pytest.raises(
        TypeError, match=r"^Kitchen has no field 'num_cook'; did you mean 'num_cooks'\?$"
    ):
        Kitchen(num_cook=2)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError,
        match=r"^Kitchen has no field 'knives'; its fields: oven, num_cooks, slots, chef$",
    ):
        Kitchen(knives=2)  # type: ignore[call-arg]


def test_a_field_without_a_name_or_without_a_value_is_reported_with_the_class() -> None:
    with pytest.raises(
        TypeError, match=r"^Kitchen got 1 argument without a name, expected keywords only: oven, "
    ):
        Kitchen(2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^EnvSpec lacks 'id'$"):
        EnvSpec(kwargs={})  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_cooks", "2", "'2', expected int"),
        ("num_cooks", 2.0, "2.0, expected int"),
        ("chef", 3, "3, expected str or none"),
        ("oven", {"heat": "fan"}, "{'heat': 'fan'}, expected Oven"),
        ("oven", None, "None, expected Oven"),
    ],
)
def test_a_value_of_another_type_is_reported_with_its_field_and_the_type(
    field: str, value: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'Kitchen.{field} is {problem}')}$"):
        Kitchen(**{field: value})


def test_a_config_of_another_class_is_reported_by_its_class() -> None:
    with pytest.raises(ConfigError, match=r"^Kitchen.oven is a Kitchen, expected Oven$"):
        Kitchen(oven=Kitchen())  # type: ignore[arg-type]


def test_numbers_of_numpy_and_configs_of_a_subclass_are_taken() -> None:
    kitchen = Kitchen(num_cooks=np.int64(3), slots=(1, 2), oven=CheckedOven())  # type: ignore[arg-type]
    assert (kitchen.num_cooks, kitchen.oven) == (3, CheckedOven())


def test_an_error_of_the_configs_own_check_is_not_taken_for_a_wrong_field() -> None:
    class Broken(Config, frozen=True, kw_only=True):
        size: int = 1

        def __post_init__(self) -> None:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        Broken()
