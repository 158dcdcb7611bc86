"""The base of every configuration: small, frozen, keyword-only, without unknown fields.

Classes that users build by keyword report a wrong one with the class, the nearest field.
"""

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.util.values import make_fields_plain


class ExplainsFields(msgspec.StructMeta):
    """Metaclass of a `msgspec.Struct` that explains which field was probably meant."""

    # type checkers know the fields, which this signature would hide from them
    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except TypeError as error:
                problem = _describe_misfit(cls, args, fields)
                if problem is None:  # raised by the class's own __post_init__
                    raise
                raise TypeError(problem) from error.__cause__


def _describe_misfit(
    cls: type[msgspec.Struct], args: tuple[Any, ...], given: dict[str, Any]
) -> str | None:
    """Describe the argument that the fields of `cls` do not allow; None if all fit."""
    fields = msgspec.structs.fields(cls)
    names = [field.name for field in fields]
    if args:
        number = "1 argument" if len(args) == 1 else f"{len(args)} arguments"
        return (
            f"{cls.__name__} got {number} without a name, expected keywords only: "
            f"{', '.join(names)}"
        )
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its fields: {', '.join(names)}"
            return f"{cls.__name__} has no field {name!r}; {hint}"
    missing = [field.name for field in fields if field.required and field.name not in given]
    return f"{cls.__name__} lacks {', '.join(map(repr, missing))}" if missing else None


class Config(
    msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A configuration, which cannot be changed after it is built.

    Subclasses repeat `frozen=True, kw_only=True` (msgspec does not inherit the second) and check
    their values in `__post_init__` with `require`.

    The type of every field, and the values of a `Literal`, are checked before `__post_init__`.
    NumPy's numbers become Python's own before that.

    A string under each field documents it; the command line shows that string as the option's help.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that fields have in files of earlier versions, each with its name of today. Files with
    them are read; the command line takes the names of today alone."""

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[Any, Any]]] = MappingProxyType({})
    """Values that fields have in files of earlier versions, by field, each with its value of today."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own_check = cls.__dict__.get("__post_init__")
        if own_check is None:
            return

        @functools.wraps(own_check)
        def check(self: Config) -> None:
            self._require_types()
            own_check(self)

        cls.__post_init__ = check  # type: ignore[method-assign]  # msgspec looks it up on the class by this name

    def __post_init__(self) -> None:
        self._require_types()

    def unused_options(self) -> Mapping[str, str]:
        """Return options that nothing reads beside the other values, each with the reason.

        Options are named by dotted path; the name of a table stands for all of its options.

        The command line leaves them out of the help and refuses to set them.
        """
        return {}

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `ConfigError` unless `condition` holds.

        The error has the field, its value and what was expected.
        """
        if not condition:
            value: Any = getattr(self, field)
            raise ConfigError(f"{type(self).__name__}.{field} is {value!r}, expected {expected}")

    def _require_types(self) -> None:
        make_fields_plain(self)
        for field, hint, choices in _get_types(type(self)):
            value: Any = getattr(self, field)
            if choices and value not in choices:
                near = difflib.get_close_matches(
                    str(value), [each for each in choices if isinstance(each, str)], n=1
                )
                nearest = f"; did you mean {near[0]!r}?" if near else ""
                self.require(False, field, f"one of {', '.join(map(repr, choices))}{nearest}")
            if not choices and not _fits_type(value, hint):
                shown = f"a {type(value).__name__}" if isinstance(value, Config) else repr(value)
                raise ConfigError(
                    f"{type(self).__name__}.{field} is {shown}, expected {_describe_type(hint)}"
                )


def _fits_type(value: Any, hint: Any) -> bool:
    """Return whether `value` is of the type `hint`.

    Integers are valid floats.
    """
    configs = [
        member
        for member in (hint, *get_args(hint))
        if isinstance(member, type) and issubclass(member, Config)
    ]
    if configs and isinstance(value, Config | dict):  # msgspec would build a config from a dict
        return isinstance(value, tuple(configs))
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    except TypeError:  # a type that msgspec does not know, such as a protocol
        return True
    return True


def _describe_type(hint: Any) -> str:
    """Return a type in words: `int or none`, `'hidden', 'all-linear' or a list of str`."""
    members = get_args(hint)
    if hint is NoneType:
        return "none"
    if get_origin(hint) is Literal:
        return ", ".join(map(repr, members))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe_type, members))
    if get_origin(hint) is tuple and members[-1:] == (...,):
        return f"a list of {_describe_type(members[0])}"
    return (
        hint.__name__
        if isinstance(hint, type) and not members
        else str(hint).replace("typing.", "")
    )


@functools.cache
def _get_types(config: type[Config]) -> tuple[tuple[str, Any, tuple[Any, ...]], ...]:
    """Return each field with its type and, if it allows a few values only, those values."""
    try:
        hints = get_type_hints(config)
    except NameError:  # a type that only type checkers can import: the fields are not checked then
        return ()
    return tuple(
        (field, hints[field], _list_choices(hints[field])) for field in config.__struct_fields__
    )


def _list_choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal`, or of a union of them and None.

    Empty for any other type.
    """
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, UnionType):
        return ()
    members = [
        (None,) if member is NoneType else _list_choices(member) for member in get_args(hint)
    ]
    return tuple(value for member in members for value in member) if all(members) else ()
