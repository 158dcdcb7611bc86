"""The ranges that configurations declare are checked when they are made, and when files are read."""

import importlib
import itertools
import math
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import msgspec
import pytest

import vla_rl
from vla_rl.errors import ConfigError
from vla_rl.types import (
    FINITE,
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from vla_rl.types.config import describe_range, explain_refusal

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
