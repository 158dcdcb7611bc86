"""OpenVLA-OFT with discrete action tokens: fused vision towers, a bidirectional Llama, a whole chunk in one forward pass.

Configs import in an instant; `OpenVlaOft` itself brings torch, timm and transformers, when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from vla_rl.models.openvla_oft.action_tokens import LIBERO_BOUNDS, ActionBounds, ActionTokenizer, unit_bounds
from vla_rl.models.openvla_oft.config import (
    LIBERO_PROPRIO,
    LlmConfig,
    OpenVlaOftConfig,
    ProprioConfig,
    VisionTowerConfig,
    tiny,
)

if TYPE_CHECKING:
    from vla_rl.models.openvla_oft.policy import OpenVlaOft

__all__ = [
    "LIBERO_BOUNDS",
    "LIBERO_PROPRIO",
    "ActionBounds",
    "ActionTokenizer",
    "LlmConfig",
    "OpenVlaOft",
    "OpenVlaOftConfig",
    "ProprioConfig",
    "VisionTowerConfig",
    "tiny",
    "unit_bounds",
]


def __getattr__(name: str) -> Any:
    if name == "OpenVlaOft":
        from vla_rl.models.openvla_oft.policy import OpenVlaOft

        return OpenVlaOft
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
