"""An environment's spaces, attributes, values in the form that is sent between processes.

A simulator process sends its environment's spaces to its owner (`describe_space`, `build_space`), and
checks each observation with a function compiled once (`observation_check`): kind, shape and dtype
of each part. The range of each number, which `Space.contains` would also check, is checked once per
episode.

Attributes and results of methods are marked (`mark`), because a message would turn their tuples into
lists and cannot hold gymnasium's spaces.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.util.arrays import parse_dtype
from vla_rl.util.values import excerpt

_AS_THEY_ARE = frozenset({str, bytes, bool, int, float, type(None)})


def as_plain(value: Any, name: str) -> Any:
    """Return the value with NumPy's scalars as Python's own.

    Args:
        value: nested dicts (with keys of str or int), lists and tuples of numbers, strings, None
            and numeric arrays.
        name: name of the value in errors.

    Raises: TypeError naming the part of any other type.
    """
    kind = type(value)
    # The common types first, by one look-up: an info of twenty numbers passes here at every step.
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        return {
            _plain_key(key, name): as_plain(part, f"{name}[{key!r}]") for key, part in value.items()
        }
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(
                f"{name} is an array of {value.dtype}, expected numbers; only those can be sent "
                "between processes"
            )
        return value
    if isinstance(value, np.generic):
        return as_plain(value.item(), name)
    if kind is list or kind is tuple:
        parts = [as_plain(part, f"{name}[{index}]") for index, part in enumerate(value)]
        return parts if kind is list else tuple(parts)
    if isinstance(value, dict):
        return as_plain(dict(value), name)
    raise TypeError(
        f"{name} is a {kind.__name__}, expected numbers, strings, None, arrays, or dicts, lists "
        "and tuples of them: only those can be sent between processes"
    )


def find_wrong_entry(info: dict[Any, Any]) -> str | None:
    """Return what is wrong with an info of plain values, or None."""
    # A message has no other names at its top.
    if any(not isinstance(name, str) for name in info):
        return f"the names {excerpt(list(info))}, expected texts"
    success = info.get("is_success")
    # The text "no", a share of 0.3 and robomimic's {"task": False} would all count as solved.
    if success is None or is_truth(success):
        return None
    return (
        f"is_success={excerpt(success)}, expected True or False; give another measure another name"
    )


def _plain_key(key: Any, name: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{name} has the key {key!r} of {type(key).__name__}, expected str or int")


SpaceDescription: TypeAlias = dict[str, Any]
"""A space as nested dicts of plain values and arrays; `kind` names its class."""

Check: TypeAlias = Callable[[Any], str | None]
"""Describes the fault of a value, as "<what it is>, expected <what it should be>"; None if there is
none."""


def describe_space(space: spaces.Space[Any]) -> SpaceDescription:
    """Return the space as plain values. Raises: TypeError for a class that has no plain form."""
    match space:
        case spaces.Box():
            return {"kind": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {
                "kind": "Discrete",
                "n": int(space.n),
                "start": int(space.start),
                "dtype": str(space.dtype),
            }
        case spaces.MultiDiscrete():
            return {
                "kind": "MultiDiscrete",
                "nvec": space.nvec,
                "start": space.start,
                "dtype": str(space.dtype),
            }
        case spaces.MultiBinary():
            return {"kind": "MultiBinary", "shape": list(space.shape)}
        case spaces.Text():
            characters = "".join(sorted(space.character_set))
            return {
                "kind": "Text",
                "max": space.max_length,
                "min": space.min_length,
                "charset": characters,
            }
        case spaces.Dict():
            return {
                "kind": "Dict",
                "spaces": {key: describe_space(part) for key, part in space.items()},
            }
        case spaces.Tuple():
            return {"kind": "Tuple", "spaces": [describe_space(part) for part in space]}
    raise TypeError(
        f"space {space} is a {type(space).__name__}, expected {_KNOWN_SPACES}: others cannot be sent "
        "between processes."
    )


_KNOWN_SPACES = "a Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple"


def build_space(description: SpaceDescription) -> spaces.Space[Any]:
    """Build the space from the result of `describe_space`."""
    of: Any = description
    match description["kind"]:
        case "Box":
            return spaces.Box(
                np.array(of["low"]), np.array(of["high"]), dtype=parse_dtype(of["dtype"]).type
            )
        case "Discrete":
            return spaces.Discrete(of["n"], start=of["start"], dtype=parse_dtype(of["dtype"]).type)
        case "MultiDiscrete":
            dtype = parse_dtype(of["dtype"]).type
            return spaces.MultiDiscrete(
                np.array(of["nvec"]), dtype=dtype, start=np.array(of["start"])
            )
        case "MultiBinary":
            return spaces.MultiBinary(tuple(of["shape"]))
        case "Text":
            return spaces.Text(max_length=of["max"], min_length=of["min"], charset=of["charset"])
        case "Dict":
            return spaces.Dict({key: build_space(part) for key, part in of["spaces"].items()})
        case "Tuple":
            return spaces.Tuple([build_space(part) for part in of["spaces"]])
    raise ValueError(f"space of kind {description['kind']!r} is unknown, expected {_KNOWN_SPACES}.")


_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def observation_check(space: spaces.Space[Any], name: str = "observation") -> Check:
    """Return a cheap check of values of `space`.

    `name` is the name of the value in its messages.
    """
    match space:
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array_check(space, name)
        case spaces.Dict():
            return _dict_check(space, name)
        case spaces.Tuple():
            return _tuple_check(space, name)
        case spaces.Text():
            return _text_check(space, name)
        case _:
            return _contains_check(space, name)


def holds_only_plain(space: spaces.Space[Any]) -> bool:
    """Return whether values of this space are arrays, texts and dicts of them.

    Checked ones can then be sent unchanged.
    """
    if isinstance(space, spaces.Dict):
        return all(holds_only_plain(part) for part in space.values())
    return isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text)


def holds_tuple(space: spaces.Space[Any]) -> bool:
    """Return whether values of this space contain a tuple, which becomes a list when it is sent."""
    if isinstance(space, spaces.Dict):
        return any(holds_tuple(part) for part in space.values())
    return isinstance(space, spaces.Tuple)


def restore_tuples(space: spaces.Space[Any], value: Any) -> Any:
    """Restore the tuples of the space in a value from another process."""
    if isinstance(space, spaces.Dict):
        return {key: restore_tuples(part, value[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(restore_tuples(part, item) for part, item in zip(space, value, strict=True))
    return value


def _array_check(space: spaces.Space[Any], name: str) -> Check:
    # closures with what they compare, because a check runs at every control step of every environment
    shape, dtype = space.shape, space.dtype

    def check(value: Any) -> str | None:
        if isinstance(value, np.ndarray) and value.shape == shape and value.dtype == dtype:
            return None
        return f"{name} is {describe_value(value)}, expected {dtype} {list(shape or ())}"

    return check


def _dict_check(space: spaces.Dict, name: str) -> Check:
    whole = name == "observation"
    arrays = [
        (key, part.shape, part.dtype) for key, part in space.items() if isinstance(part, _ARRAYS)
    ]
    others = [
        (key, observation_check(part, key))
        for key, part in space.items()
        if not isinstance(part, _ARRAYS)
    ]
    parts = [
        (key, observation_check(part, key if whole else f"{name}.{key}"))
        for key, part in space.items()
    ]
    expected = set(space.spaces)

    def check(value: Any) -> str | None:
        if type(value) is dict and value.keys() == expected:
            for key, shape, dtype in arrays:
                array = value[key]
                if (
                    type(array) is not np.ndarray
                    or array.dtype is not dtype
                    or array.shape != shape
                ):
                    break  # check again below, slower but with a message
            else:
                if not others or all(part(value[key]) is None for key, part in others):
                    return None
        if not isinstance(value, dict) or value.keys() != expected:
            return f"{name} is {describe_value(value)}, expected a dict with the keys {sorted(expected)}"
        for key, part in parts:
            if (problem := part(value[key])) is not None:
                return problem
        return None

    return check


def _tuple_check(space: spaces.Tuple[Any], name: str) -> Check:
    parts = [observation_check(part, f"{name}[{index}]") for index, part in enumerate(space)]

    def check(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(parts):
            return f"{name} is {describe_value(value)}, expected a tuple of {len(parts)}"
        for part, item in zip(parts, value, strict=True):
            if (problem := part(item)) is not None:
                return problem
        return None

    return check


def _text_check(space: spaces.Text, name: str) -> Check:
    shortest, longest = space.min_length, space.max_length

    def check(value: Any) -> str | None:
        if type(value) is str and shortest <= len(value) <= longest:
            return None
        return f"{name} is {describe_value(value)}, expected a value of {space}"

    return check


def _contains_check(space: spaces.Space[Any], name: str) -> Check:
    def check(value: Any) -> str | None:
        return (
            None
            if space.contains(value)
            else f"{name} is {describe_value(value)}, expected a value of {space}"
        )

    return check


def find_out_of_range(
    space: spaces.Space[Any], value: Any, name: str = "observation"
) -> str | None:
    """Check each number; return which part of `value` is out of range, or None.

    Kinds, shapes and dtypes must be right.
    """
    if isinstance(space, spaces.Dict):
        # By part, so that the error names the key: a whole observation is too long to be read in a
        # message.
        found = (find_out_of_range(part, value[key], key) for key, part in space.items())
        return next((problem for problem in found if problem), None)
    if space.contains(value):
        return None
    return f"{name} is {describe_value(value)} with values outside {space}"


def is_truth(value: Any) -> bool:
    """Return whether a value is true or false: a bool, 0 or 1, or an array of one such number.

    Any other value, such as the text "False" or a list of one bool, is taken for true by `if`.
    """
    if not isinstance(value, (int, float)):  # one number of NumPy or torch
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError):
            return False
    return isinstance(value, (int, float)) and value in (0, 1)


def describe_value(value: Any) -> str:
    """Return a short description of a value for errors.

    It has dtype and shape of an array, keys of a dict, else type and text.
    """
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    return f"{type(value).__name__} {excerpt(value)}"


def call_method(
    env: gymnasium.Env[Any, Any], name: str, args: list[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the marked result of a method, or the marked attribute, `name`.

    It is what `SyncVectorEnv.call` returns.

    Raises: AttributeError if neither the environment nor a wrapper has it; TypeError for a value
    that cannot be sent; any error of the method.
    """
    found: Any = env.get_wrapper_attr(name)
    return mark(found(*args, **kwargs) if callable(found) else found, name)


def mark(value: Any, name: str) -> list[Any]:
    """Mark a value for sending to another process; `unmark` restores it.

    Raises: TypeError for what cannot be sent.
    """
    if isinstance(value, spaces.Space):
        return ["space", describe_space(value)]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [mark(part, f"{name}[{index}]") for index, part in enumerate(value)]]
    if isinstance(value, dict):
        return ["dict", {key: mark(part, f"{name}[{key!r}]") for key, part in value.items()}]
    return ["plain", as_plain(value, name)]


def unmark(value: list[Any]) -> Any:
    """Return the value that was given to `mark`."""
    kind, content = value
    match kind:
        case "space":
            return build_space(content)
        case "tuple":
            return tuple(unmark(part) for part in content)
        case "list":
            return [unmark(part) for part in content]
        case "dict":
            return {key: unmark(part) for key, part in content.items()}
    return content
