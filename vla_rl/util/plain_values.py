"""Plain values: what a configuration, an environment's arguments and a reset's options may hold.

NumPy's numbers become Python's own where they come in, since a run writes its settings as JSON and
sends them to other processes. NumPy itself is not imported: a process of a sandbox has
configurations, and no use for it.
"""

import sys
from typing import Any, Final

import msgspec

_AS_THEY_ARE: Final = frozenset({str, bytes, bool, int, float, type(None)})


def plain(value: Any) -> Any:
    """Return a value with NumPy's scalars, at any depth of dicts, lists and tuples, as Python's own.

    The same object is returned if there are none. Arrays and all else stay as they are.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        parts = {plain(key): plain(part) for key, part in value.items()}
        same = all(
            key is new_key and value[key] is parts[new_key]
            for key, new_key in zip(value, parts, strict=False)
        )
        return value if same else parts
    if kind is list or kind is tuple:
        items = [plain(part) for part in value]
        same = all(old is new for old, new in zip(value, items, strict=True))
        return value if same else kind(items)
    return value.item() if is_numpy_scalar(value) else value


def make_plain(fields: msgspec.Struct) -> None:
    """Make the fields of a struct plain; call it in `__post_init__`."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if type(value) not in _AS_THEY_ARE and (new := plain(value)) is not value:
            msgspec.structs.force_setattr(fields, name, new)


def is_numpy_scalar(value: object) -> bool:
    """Return whether a value is one of NumPy's numbers, booleans or strings."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def part_without_json(value: Any, name: str) -> tuple[str, Any] | None:
    """Return the name and value of a part that JSON cannot hold, such as `kwargs['size']`; None if
    it can hold everything.
    """
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    else:
        return None
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    elif isinstance(value, msgspec.Struct):
        parts = [(f"{name}.{field}", getattr(value, field)) for field in value.__struct_fields__]
    for inner, part in parts:
        if (found := part_without_json(part, inner)) is not None:
            return found
    return name, value
