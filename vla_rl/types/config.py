"""The base of every configuration: small, frozen, keyword-only, and closed to unknown fields."""

import difflib
import functools
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from vla_rl.errors import ConfigError


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration. Subclasses say `frozen=True, kw_only=True` again (msgspec does not hand the second down) and check
    themselves in `__post_init__` with `require`; nothing is edited after it is built.

    A field that is a `Literal`, or one or none, is checked before that, whoever builds the config.

    Fields are documented by a string under each of them; the command line shows that string as the option's help.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own_check = cls.__dict__.get("__post_init__")
        if own_check is None:
            return

        @functools.wraps(own_check)
        def check(self: Config) -> None:
            self._require_choices()
            own_check(self)

        cls.__post_init__ = check  # type: ignore[method-assign]  # msgspec calls what the class has by this name

    def __post_init__(self) -> None:
        self._require_choices()

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `ConfigError` naming the field, its value and what was expected, unless `condition` holds."""
        if not condition:
            value: Any = getattr(self, field)
            raise ConfigError(f"{type(self).__name__}.{field} is {value!r}, expected {expected}")

    def _require_choices(self) -> None:
        for field, choices in _choices_of(type(self)):
            value: Any = getattr(self, field)
            if value not in choices:
                near = difflib.get_close_matches(str(value), [each for each in choices if isinstance(each, str)], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.require(False, field, f"one of {', '.join(map(repr, choices))}{hint}")


@functools.cache
def _choices_of(config: type[Config]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The fields that allow a few values only, with those values."""
    try:
        hints = get_type_hints(config)
    except NameError:  # a type that is known to type checkers only; nothing is known of the fields then
        return ()
    found = ((field, _choices_in(hints[field])) for field in config.__struct_fields__)
    return tuple((field, choices) for field, choices in found if choices)


def _choices_in(hint: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, or of a union of them and None; empty for any other type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, UnionType):
        return ()
    members = [(None,) if member is NoneType else _choices_in(member) for member in get_args(hint)]
    return tuple(value for member in members for value in member) if all(members) else ()
