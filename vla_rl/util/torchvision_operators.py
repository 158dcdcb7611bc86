"""Makes torchvision importable with a CPU build of torch.

It does so once `vla_rl` is imported, and executes torchvision again with its operators declared if
it needs them.

The torchvision wheel of the package index is built for CUDA. With a CPU-only torch its C++ library
cannot be loaded, and its Python code then fails (`operator torchvision::nms does not exist`),
because two operators that it never calls on its own are not declared. Declaring them is enough for
torchvision, and for timm, transformers, peft and vLLM, which import it.
"""

from types import ModuleType
from typing import Any

from vla_rl.util.watched_imports import Execute, watch

_declared: list[Any] = []
"""Keeps the declarations alive; empty unless torchvision needs them."""


def _execute(execute: Execute, module: ModuleType) -> None:
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
    """Watch for the import of torchvision; a second call does nothing."""
    watch("torchvision", _execute)
