"""Configurations check their fields, with the ranges that they declare; a wrong keyword names the nearest one."""

import importlib
import itertools
import math
import pkgutil
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest

import vla_rl
from vla_rl.errors import ConfigError
from vla_rl.types import (
    FINITE,
    Config,
    EnvSpec,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from vla_rl.types.config import ExplainsFields, describe_range, explain_refusal


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


NEEDS_OTHERS: Final = ("carla_side", "preload", "export_scenes", "stable_baselines")
"""Modules for other programs, which have no configuration."""


def list_configs() -> list[type[Config]]:
    """Return every configuration class of the package."""
    for module in pkgutil.walk_packages(vla_rl.__path__, "vla_rl."):
        if not any(part in module.name for part in NEEDS_OTHERS):
            importlib.import_module(module.name)
    found, todo = set[type[Config]](), [Config]
    while todo:
        below = todo.pop().__subclasses__()
        found.update(each for each in below if each.__module__.startswith("vla_rl."))
        todo += below
    return sorted(found, key=lambda config: (config.__module__, config.__name__))


CONFIGS: Final = list_configs()


def list_ranges(hint: Any) -> Iterator[tuple[Any, msgspec.Meta]]:
    """Yield each number's type in a field's type with the bounds that it declares."""
    if get_origin(hint) is Annotated:
        yield from ((get_args(hint)[0], each) for each in hint.__metadata__ if describe(each))
    for member in get_args(hint):
        yield from list_ranges(member)


def describe(meta: Any) -> str:
    return describe_range(Annotated[int, meta]) if isinstance(meta, msgspec.Meta) else ""


def beyond(kind: Any, meta: msgspec.Meta) -> list[Any]:
    """Return the values just outside the bounds of a number, or of a sequence."""
    if meta.min_length:
        return [()]
    step = 1 if kind is int else 1e-9
    bad = [math.nan] if kind is float else []
    bad += [] if meta.ge is None else [meta.ge - step]
    bad += [] if meta.gt is None else [meta.gt]
    bad += [] if meta.le is None else [math.inf if meta.le == FINITE else meta.le + step]
    bad += [] if meta.lt is None else [meta.lt]
    return [kind(value) for value in bad]


def wrapped(hint: Any, value: Any, inner: msgspec.Meta) -> Any:
    """Return `value` at the place in a field's type that declares `inner`; others get the same."""
    if get_origin(hint) is Annotated:
        return value if inner in hint.__metadata__ else wrapped(get_args(hint)[0], value, inner)
    if get_origin(hint) is tuple:
        members = [each for each in get_args(hint) if each is not ...]
        return tuple(wrapped(each, value, inner) for each in members)
    for member in get_args(hint):
        if inner in [meta for _, meta in list_ranges(member)]:
            return wrapped(member, value, inner)
    return value


def cases() -> Iterator[Any]:
    for config in CONFIGS:
        hints = get_type_hints(config, include_extras=True)
        for field in config.__struct_fields__:
            for kind, meta in list_ranges(hints[field]):
                for value in beyond(kind, meta):
                    bad = wrapped(hints[field], value, meta)
                    yield pytest.param(config, field, bad, id=f"{config.__name__}.{field}={bad}")


CASES: Final = list(cases())


def test_the_table_has_every_configuration_whose_fields_have_ranges() -> None:
    assert len(CASES) > 500
    assert {"RunConfig", "VllmConfig", "SrpoLiberoConfig", "TextLimits"} <= {
        case.values[0].__name__ for case in CASES
    }


@pytest.mark.parametrize(("config", "field", "value"), CASES)
def test_a_value_just_out_of_range_is_refused_with_the_option_the_value_and_the_range(
    config: type[Config], field: str, value: Any
) -> None:
    expected = describe_range(get_type_hints(config, include_extras=True)[field])
    problem = f"{config.__name__}.{field} is {value!r}, expected {expected}"
    assert explain_refusal(config, field, value) == problem
    if all(not each.required for each in msgspec.structs.fields(config)):
        with pytest.raises(ConfigError) as caught:
            config(**{field: value})
        assert str(caught.value) == problem


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_default_is_in_range_and_a_subclass_keeps_the_range(config: type[Config]) -> None:
    hints = get_type_hints(config, include_extras=True)
    for each in msgspec.structs.fields(config):
        if each.default is not msgspec.NODEFAULT:
            assert explain_refusal(config, each.name, each.default) is None
    for base in config.__mro__[1:]:
        if base is not Config and isinstance(base, type) and issubclass(base, Config):
            of_base = get_type_hints(base, include_extras=True)
            for field in base.__struct_fields__:
                range_, kept = describe_range(of_base[field]), describe_range(hints[field])
                assert range_.removesuffix(", or none") == kept.removesuffix(", or none"), field


class Kiln(Config, frozen=True, kw_only=True):
    """One field for each kind of range."""

    count: PositiveInt = 1
    spare: NonNegativeInt = 0
    rate: PositiveFloat = 1.0
    loss: NonNegativeFloat = 0.0
    share: Share | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=FINITE)] = 1.0
    even: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 2
    shelves: Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)] = (1,)


@pytest.mark.parametrize(
    ("field", "accepted", "refused", "expected"),
    [
        ("count", [1, 10**9], [0, -1, True, 1.0, None], "at least 1"),
        ("spare", [0], [-1], "at least 0"),
        ("rate", [1e-12, math.inf, 1], [0.0, math.nan, -math.inf], "above 0"),
        ("loss", [0, math.inf], [-1e-12, math.nan], "at least 0"),
        ("share", [None, 0, 1.0], [1.1, -0.1, math.nan], "at least 0 and at most 1, or none"),
        ("weight", [1e9], [math.inf, 0.0, math.nan], "above 0 and finite"),
        ("even", [4], [0, 3], "at least 2 and a multiple of 2"),
        ("shelves", [(1, 2)], [(), (1, 0)], "not empty and each at least 1"),
    ],
)
def test_a_range_is_read_from_the_type(
    field: str, accepted: list[Any], refused: list[Any], expected: str
) -> None:
    for value in accepted:
        assert getattr(Kiln(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^Kiln\.{field} is "):
            Kiln(**{field: value})
    with pytest.raises(ConfigError, match=rf", expected {expected}$"):
        Kiln(**{field: refused[0]})
    # msgspec itself checks what is read from files and wires
    for value in itertools.islice(refused, 2):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({field: value}, Kiln)
