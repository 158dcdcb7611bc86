"""Results of operations on the meta device, remembered by the shapes of what they take.

torch finds the shape of many a result in Python, which takes longer than all else that a path does.
An operation that takes the same shapes and numbers again gives the same shapes again.
"""

from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = tuple[Any, ...]


class KnownShapes:
    """Runs operations on the meta device, each once for the same shapes."""

    def __init__(self) -> None:
        self._results: dict[Key, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation gives, made from memory if it is known."""
        if not _makes_new_tensors(func):
            return func(*args, **kwargs)
        key = (func, _describe(args), _describe(tuple(kwargs.items())))
        if key not in self._results:
            result = func(*args, **kwargs)
            self._results[key] = _kept(result)
            return result
        return _made(self._results[key])


KNOWN_SHAPES: Final = KnownShapes()
"""The memory of this process."""


class _Empty:
    """Shape, strides and type of a result."""

    def __init__(self, result: Tensor) -> None:
        self._size, self._stride = result.shape, result.stride()
        self._dtype, self._device = result.dtype, result.device

    def made(self) -> Tensor:
        """Make a tensor like the result."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


def _kept(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_kept(part) for part in result)
    return _Empty(result) if isinstance(result, Tensor) else result


def _made(kept: Any) -> Any:
    if isinstance(kept, tuple | list):
        return type(kept)(_made(part) for part in kept)
    return kept.made() if isinstance(kept, _Empty) else kept


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Return whether no result is a view of an operand, nor an operand that was written to."""
    schema = func._schema
    return all(part.alias_info is None for part in (*schema.arguments, *schema.returns))


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, tuple | list):
        return tuple(_describe(part) for part in value)
    # 1, 1.0 and True are equal, and give results of different types
    return (type(value), value)
