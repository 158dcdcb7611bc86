"""A stand-in for a GPU: networks on torch's meta device, and a watch on what passes to the host.

A tensor on the meta device has a shape and no numbers. What asks for its numbers is answered with
zeros and noted, because on a GPU the host would wait there for all work that is queued:

    waits     numbers copied to the host, a scalar read, a comparison, a selection by a mask
    uploads   copies to the device that wait: from pageable memory, or not asynchronous

What mixes tensors of both places fails at once, as it does on a GPU, and so does a shape that
depends on numbers.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, Self, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vla_rl
from benchmarks.gpu.known_shapes import KNOWN_SHAPES

META: Final = torch.device("meta")

Kind: TypeAlias = Literal["wait", "upload"]

_ROOT: Final = str(Path(vla_rl.__file__).parent)

_BY_DATA: Final = ("_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount")
"""Operations whose result has a shape that depends on numbers."""

_INDEXED: Final = ("index", "index_put", "index_put_", "_index_put_impl_")


class NotForGpusError(AssertionError):
    """A line that would fail on a GPU, or wait there without being counted."""


@dataclass(frozen=True)
class Crossing:
    """One place at which the host waits for the device."""

    kind: Kind
    location: str
    """File in `vla_rl` and function, such as `engines/torch_engine.py:_act`."""

    operation: str


@dataclass
class Crossings:
    """All crossings of a path, of all its threads."""

    found: list[Crossing] = field(default_factory=list)

    def add(self, kind: Kind, operation: str) -> None:
        """Note a crossing of the line of `vla_rl` that runs."""
        self.found.append(Crossing(kind, _running_location(), operation))

    def waits(self) -> list[Crossing]:
        """Return the crossings for which the host reads numbers of the device."""
        return [each for each in self.found if each.kind == "wait"]

    def watched(self) -> AbstractContextManager[object]:
        """Watch the code of this thread inside the `with` block."""
        return _Watch(self)


@contextmanager
def unwatched() -> Iterator[None]:
    """Do what no path does while it computes, such as building a network, unseen by a watch."""
    _PAUSED.depth = getattr(_PAUSED, "depth", 0) + 1
    try:
        yield
    finally:
        _PAUSED.depth -= 1


_PAUSED: Final = threading.local()


def _is_paused() -> bool:
    return getattr(_PAUSED, "depth", 0) > 0


class _Watch(ExitStack):
    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __enter__(self) -> Self:
        super().__enter__()
        self.enter_context(_Functions(self._crossings))
        self.enter_context(_Operations(self._crossings))
        return self


class _Functions(TorchFunctionMode):
    """Notes tensors and indices that are made from Python's numbers on the device: they are copied
    from pageable memory."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_paused():
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and _is_meta(kwargs.get("device")):
            made: Tensor = func(*args, **kwargs)
            if made.numel():  # of nothing, nothing is copied
                self._crossings.add("upload", func.__name__)
            return made
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                self._crossings.add("upload", func.__name__)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes and answers operations that ask for numbers of the meta device."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._crossings = crossings

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if _is_paused() or name == "_has_compatible_shallow_copy_type":
            return func(*args, **kwargs)
        if _is_made_of_others(func):
            # inference mode does not take it apart before this
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copied(func, name, args, kwargs)
        tensors = _tensors_of((*args, *kwargs.values()))
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        _require_fit_for_gpus(func, name, args, tensors)
        if name == "_local_scalar_dense":
            self._crossings.add("wait", name)
            return torch.zeros((), dtype=args[0].dtype).item()
        if name == "equal":
            self._crossings.add("wait", name)
            return False
        if name == "nonzero":
            self._crossings.add("wait", name)
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.long, device=META)
        return KNOWN_SHAPES.run(func, args, kwargs)

    def _copied(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "copy_":
            source, target = args[1].device, args[0].device
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source, target = args[0].device, kwargs.get("device") or args[0].device
            is_asynchronous = kwargs.get("non_blocking", False)
        if source.type == "cpu" and target.type == "meta" and not is_asynchronous:
            self._crossings.add("upload", name)
        if source.type != "meta" or target.type != "cpu":
            return func(*args, **kwargs)
        self._crossings.add("wait", name)
        if name == "copy_":
            return args[0].zero_()
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


@cache
def _is_made_of_others(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's operands, which are nested in lists at most once."""
    lists = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return [each for values in lists for each in values if isinstance(each, Tensor)]


def _require_fit_for_gpus(func: Any, name: str, args: Any, tensors: Sequence[Tensor]) -> None:
    # a number on the host may be an operand of a kernel; a tensor may not
    if any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
        raise NotForGpusError(f"{func} mixes tensors of host and device in {_running_location()}")
    if name in _BY_DATA or (name == "repeat_interleave" and len(tensors) == len(args)):
        raise NotForGpusError(f"{func} gives a shape that depends on data: {_running_location()}")
    if name in _INDEXED and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    ):
        raise NotForGpusError(f"{func} selects by a mask, so the host waits for the number of "
                              f"True: {_running_location()}")  # fmt: skip


def fused_optimizers_on_meta() -> AbstractContextManager[object]:
    """Let fused optimizers take parameters of the meta device, for which torch has their shapes."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    devices = module._get_fused_kernels_supported_devices()
    return patch.object(
        module, "_get_fused_kernels_supported_devices", lambda: [*devices, META.type]
    )


def watching(crossings: Crossings, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, watched in the thread that calls it."""

    def watched(*args: Any) -> Any:
        with crossings.watched():
            return fn(*args)

    return watched


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _running_location() -> str:
    """Return the innermost function of `vla_rl` that runs in this thread."""
    frame: FrameType | None = sys._getframe(1)
    # comprehensions have frames of their own until Python 3.12
    while frame is not None and not (
        frame.f_code.co_filename.startswith(_ROOT) and frame.f_code.co_name[0] != "<"
    ):
        frame = frame.f_back
    if frame is None:
        return "outside of vla_rl"
    file = Path(frame.f_code.co_filename).relative_to(_ROOT)
    return f"{file.as_posix()}:{frame.f_code.co_name}"


def describe(crossings: Sequence[Crossing]) -> str:
    """Return crossings as text, one to a line."""
    return "\n".join(f"{each.kind} in {each.location} ({each.operation})" for each in crossings)
