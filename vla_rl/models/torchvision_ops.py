"""Makes `import torchvision` work beside a CPU build of torch; import this module before timm or torchvision.

The registries' torchvision wheel is built for CUDA. Beside a CPU-only torch its C++ library cannot be loaded, and its
Python half then fails because two operators that we never call were not declared. Declaring them is enough.
"""

import torch


def _torchvision_imports() -> bool:
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        return False
    return True


MISSING_OPS: torch.library.Library | None = None
"""Owns the declarations, which end with it; None where torchvision needs none."""

if not _torchvision_imports():
    MISSING_OPS = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for _name in ("nms", "qnms"):
        MISSING_OPS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
