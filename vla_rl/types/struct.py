"""The metaclass of classes that users build by keyword.

It reports a wrong keyword with the class and the nearest field.
"""

import difflib
from typing import TYPE_CHECKING, Any

import msgspec


class ExplainsFields(msgspec.StructMeta):
    """Metaclass of a `msgspec.Struct` that explains which field was probably meant."""

    # type checkers know the fields, which this signature would hide from them
    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except TypeError as error:
                problem = _misfit(cls, args, fields)
                if problem is None:  # raised by the class's own __post_init__
                    raise
                raise TypeError(problem) from error.__cause__


def _misfit(cls: type[msgspec.Struct], args: tuple[Any, ...], given: dict[str, Any]) -> str | None:
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
