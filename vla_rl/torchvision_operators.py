"""Makes torchvision importable with a CPU build of torch.

It does so once `vla_rl` is imported, and imports nothing before it is needed.

The torchvision wheel of the package index is built for CUDA. With a CPU-only torch its C++ library
cannot be loaded, and its Python code then fails (`operator torchvision::nms does not exist`),
because two operators that it never calls on its own are not declared. Declaring them is enough for
torchvision, and for timm, transformers, peft and vLLM, which import it.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_declared: list[Any] = []
"""Keeps the declarations alive; empty unless torchvision needs them."""


class TorchvisionFinder:
    """Finds torchvision through the other finders.

    Executes it again with its operators declared if it needs them.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torchvision; return None for every other import."""
        if name != "torchvision":
            return None
        others = (
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        found = next(
            (
                spec
                for finder in others
                if (spec := finder.find_spec(name, path, target)) is not None
            ),
            None,
        )
        if found is not None and found.loader is not None:
            execute = functools.partial(_execute, found.loader.exec_module)
            found.loader.exec_module = execute  # type: ignore[method-assign]  # of this one loader
        return found


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _declared:
            raise
        _declare_operators()
        execute(module)


def _declare_operators() -> None:
    import torch  # torchvision has imported it already

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)


def install() -> None:
    """Put the finder before all others; a second call does nothing."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
