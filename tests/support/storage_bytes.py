"""The memory of tensors while some code runs, on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and notes the most, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = self.largest = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        number, size = storage._cdata, storage.nbytes()
        self._known[number] = weakref.ref(storage, lambda _: self._forget(number, size))
        self.alive += size
        self.most, self.largest = max(self.most, self.alive), max(self.largest, size)

    def _forget(self, number: int, size: int) -> None:
        del self._known[number]
        self.alive -= size
