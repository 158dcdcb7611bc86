"""The base of every configuration: small, frozen, keyword-only, without unknown fields.

Classes that users build by keyword report a wrong one with the class, the nearest field.
"""

import difflib
import functools
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.util.values import make_fields_plain

# pydantic's names, which most readers know
PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]

FINITE: Final = sys.float_info.max
"""Upper bound of a number that may not be infinite, because msgspec takes no infinite bound."""


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
    # Unknown before missing: a misspelt field is both, and the first says what to do.
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its fields: {', '.join(names)}"
            return f"{cls.__name__} has no field {name!r}; {hint}"
    missing = [field.name for field in fields if field.required and field.name not in given]
    return f"{cls.__name__} lacks {', '.join(map(repr, missing))}" if missing else None


class ReadIf(NamedTuple):
    """Options that are read only beside certain values of another one of their table.

    Example:
        ReadIf(("buffer", "factor"), "max_length")             read if max_length is on
        ReadIf(("vjepa2",), "encoder", ("vjepa2",))            read with one of these values
    """

    options: tuple[str, ...]
    """Empty: all others of the table."""

    decides: str
    values: tuple[Any, ...] = ()
    """Empty: any value but none, 0, false and "none"."""

    def accepts(self, value: Any) -> bool:
        """Return whether the options are read beside this value."""
        return value in self.values if self.values else bool(value) and value != "none"


class Config(
    msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A configuration, which cannot be changed after it is built.

    Subclasses repeat `frozen=True, kw_only=True` (msgspec does not inherit the second). The type of
    a field declares its range, `updates: PositiveInt` or `Annotated[int, msgspec.Meta(ge=2)]`, which
    the help shows; what depends on several fields is checked in `__post_init__` with `require`.

    The type and range of every field, and the values of a `Literal`, are checked before
    `__post_init__`. NumPy's numbers become Python's own before that.

    A string under each field documents it; the command line shows that string as the option's help.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that fields have in files of earlier versions, each with its name of today. Files with
    them are read; the command line takes the names of today alone."""

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[Any, Any]]] = MappingProxyType({})
    """Values that fields have in files of earlier versions, by field, each with its value of today."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = ()
    """Rows on options that nothing reads beside some values; those of base classes count as well."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # wrapped, because a class with a check of its own would forget the types before it
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

        The command line leaves them out of the help and refuses to set them. The rows of `READ_IF`
        are the rule; a class overrides this for what depends on more than one value.
        """
        # a row of the class itself wins: its reason is nearer to what was set than a base's
        rows = [row for kind in type(self).__mro__ for row in vars(kind).get("READ_IF", ())]
        found: dict[str, str] = {}
        for row in rows:
            value: Any = getattr(self, row.decides)
            if not row.accepts(value):
                others = set(self.__struct_fields__) - {row.decides}
                shown = {"None": "none", "False": "off"}.get(repr(value), repr(value))
                found = (
                    dict.fromkeys(row.options or sorted(others), f"{row.decides} is {shown}")
                    | found
                )
        return found

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `ConfigError` unless `condition` holds.

        The error has the field, its value and what was expected.
        """
        if not condition:
            value: Any = getattr(self, field)
            raise ConfigError(f"{type(self).__name__}.{field} is {value!r}, expected {expected}")

    def _require_types(self) -> None:
        make_fields_plain(self)
        # msgspec checks types and ranges when it converts alone: a class that is called checks none
        for field in self.__struct_fields__:
            if problem := explain_refusal(type(self), field, getattr(self, field)):
                raise ConfigError(problem)


def explain_refusal(config: type[Config], field: str, value: Any) -> str | None:
    """Explain why a field does not take a value by its type and range; None if it takes it."""
    types = _get_types(config)
    if field not in types:
        return None
    hint, ranged, choices = types[field]
    if choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        named = [each for each in choices if isinstance(each, str)]
        if value in choices:
            return None
        # Named by itself: in a list of twenty choices one wrong letter is hard to see.
        if near := difflib.get_close_matches(str(value), named, n=1):
            expected += f"; did you mean {near[0]!r}?"
    elif _fits_type(value, ranged):
        return None
    else:
        expected = describe_range(ranged) if _fits_type(value, hint) else _describe_type(hint)
    shown = f"a {type(value).__name__}" if isinstance(value, Config) else repr(value)
    return f"{config.__name__}.{field} is {shown}, expected {expected}"


def _fits_type(value: Any, hint: Any) -> bool:
    """Return whether `value` is of the type `hint`.

    Integers are valid floats.
    """
    configs = [
        member
        for member in (hint, *get_args(hint))
        if isinstance(member, type) and issubclass(member, Config)
    ]
    # A dict where a table belongs is a slip of a program; files and the command line convert before.
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


_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@functools.cache
def describe_range(hint: Any) -> str:
    """Return the range that a type declares: `at least 1, or none`; empty if it declares none."""
    members = get_args(hint)
    if get_origin(hint) is Annotated:
        bounds = (bound for meta in hint.__metadata__ for bound in _list_bounds(meta))
        return " and ".join(filter(None, (*bounds, describe_range(members[0]))))
    if get_origin(hint) is tuple:
        inner = describe_range(members[0])
        return f"each {inner}" if inner and not inner.startswith("each") else inner
    if get_origin(hint) in (Union, UnionType) and any(map(describe_range, members)):
        return ", or ".join(describe_range(member) or _describe_type(member) for member in members)
    return ""


def _list_bounds(meta: Any) -> Iterator[str]:
    for name, words in _BOUNDS.items():
        if (bound := getattr(meta, name, None)) is not None:
            yield "finite" if bound == FINITE else f"{words} {bound}"
    if getattr(meta, "multiple_of", None) is not None:
        yield f"a multiple of {meta.multiple_of}"
    if getattr(meta, "min_length", None) is not None:
        yield "not empty" if meta.min_length == 1 else f"of length {meta.min_length} or more"


@functools.cache
def _get_types(config: type[Config]) -> Mapping[str, tuple[Any, Any, tuple[Any, ...]]]:
    """Return each field's type, its type with ranges, and the values of a `Literal`."""
    try:
        hints, ranged = get_type_hints(config), get_type_hints(config, include_extras=True)
    except NameError:  # a type that only type checkers can import: the fields are not checked then
        return {}
    return {
        field: (hints[field], ranged[field], _list_choices(hints[field]))
        for field in config.__struct_fields__
    }


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
