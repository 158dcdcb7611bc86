"""torch, imported when a function first uses it.

Losses are declared beside their functions, and configurations read the declarations. A simulator
process reads configurations too, and torch would cost each of them hundreds of megabytes.

`Tensor` is for annotations; write `torch.Tensor` to check an instance.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module("torch"), name)
            setattr(self, name, found)  # losses run once per micro-batch: look it up once
            return found

    torch = _Torch()
